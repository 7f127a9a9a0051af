"""A call is one record: a field that is added there is in all that is made of it, no other file edited."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FIELDS_END = "\n\n    @property"
PLANTED = "\n    planted: int = 0\n\n    @property"

SCRIPT = """
import torch
import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends.fused import exchange_plans, gather_plans, plan_cache
from overlap_gemm.backends.op_call import OpCall, CallOperands
from overlap_gemm.dispatch.ops import GEMM_OPS
from overlap_gemm.dispatch.bound import call_op
from overlap_gemm.dispatch.lowering import lower
from overlap_gemm.runtime.group import LOCAL, resolve
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards

x, weight, group = torch.randn(6, 4), torch.randn(8, 4), resolve(LOCAL)
overlap_gemm.register  # loads all ops
for name, spec in OPS.items():
    op = GEMM_OPS[name]
    assert "int planted" in str(getattr(torch.ops.overlap_gemm, name).default._schema)  # torch's schema

    operands = CallOperands(x, [weight] if spec.takes_lists else weight)
    counts = []
    for planted in (0, 1, 1, 2):
        call_op(op, operands, None, OpCall(planted=planted))
        counts.append(len(group.calls))
    assert counts[0] < counts[1] == counts[2] < counts[3], counts  # the key

    choice = overlap_gemm.explain(name, x, weight, planted=7)
    assert "planted=7" in str(choice) and "planted" not in str(overlap_gemm.explain(name, x, weight))
    assert dict(choice.problem.agreed())["planted"] == 7  # what ranks compare
    lowered = lower(spec, LOCAL, operands, OpCall(planted=7))
    # The facts that ranks exchange together with lengths.
    assert spec.unresolved_axis is None or dict(lowered.facts)["planted"] == 7
    assert lowered.call.planted == 7 == lowered.call.backward().planted

# The 32 bits that fused kernels compare on the device.
launched = []
plan_cache.compiled_kernel = lambda *_, **__: lambda *arguments: launched.append(arguments[-3])
gather_plans.compiled_gather = exchange_plans.compiled_gather = plan_cache.compiled_kernel
with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
    for name, spec in OPS.items():
        x, weight = (
            torch.ones(shape, dtype=torch.bfloat16)
            for shape in spec.shapes(64, 64, 64, Shards.owned_by(2, 0))
        )
        operands, signatures = CallOperands(x, [weight] if spec.takes_lists else weight), []
        for planted in (0, 1, 1, 2):
            call = OpCall(backend="fused", rows=64, columns=64, k=64, planted=planted)
            call_op(GEMM_OPS[name], operands, world.names[0], call)
            signatures.append(getattr(launched[-1], "exchange", launched[-1]).signature)
        assert signatures[1] == signatures[2] and len({*signatures}) == 3, (name, signatures)
"""


def test_an_option_that_is_added_to_the_record_is_everywhere(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    record = tmp_path / "src" / "overlap_gemm" / "backends" / "op_call.py"
    text = record.read_text()
    head, record_class, body = text.partition("class OpCall")
    record.write_text(head + record_class + body.replace(FIELDS_END, PLANTED, 1))
    path = os.pathsep.join([str(tmp_path / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
