"""What is said once can be added once: an entry in a registry, nothing else, and it runs in the emulator."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import overlap_gemm
from overlap_gemm import epilogue
from overlap_gemm.config.arch import ARCHS, arch_of
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import Visitor, bias_of
from overlap_gemm.transports import PeerBulk
from tests.support.chosen import in_turn
from tests.support.emulated import another_transport
from tests.support.emulated.another_transport import SPEC, ChunkStores
from tests.support.emulated.kernel_cases import launched
from tests.support.emulated.rank_scripts import lines_of_ranks


@epilogue(inputs={"factor": "rows"})
def gated_square(x, factor):
    """Returns the square of each complete sum, times a factor of its row."""
    return x * x * factor


@epilogue(of="partial")
def halve(x):
    """Returns half of each partial sum."""
    return x * 0.5


ARCHITECTURES = "sm_90a", "sm_100a"


def run(config, transport, world, target=None):
    """One launch on every rank, checked against float64."""
    launched(config, transport, world, target, rows=264, cols=152, depth=200).check()


@pytest.mark.parametrize(
    ("transport", "world", "arch"),
    in_turn([(None, 1), (PeerBulk(), 3)], ARCHITECTURES),
    ids=lambda given: type(given).__name__ if isinstance(given, PeerBulk) else str(given),
)
def test_another_epilogue(arch, transport, world):
    mma = next(iter(ARCHS[arch].mma))
    config = GemmConfig(arch, mma=mma, tile=(64, 128) if mma == "pingpong" else (128, 64))
    run(
        replace(config, epilogue=(Visitor(halve), Visitor(gated_square, ("f32",)), bias_of("bf16"))),
        transport,
        world,
    )


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_another_transport(arch):
    mma = next(iter(ARCHS[arch].mma))
    run(GemmConfig(arch, mma=mma, tile=(64, 128) if mma == "pingpong" else (128, 64)), ChunkStores(), 3)


REFUSED = {
    "is there already; there are copy_engine, peer_bulk": {"name": "peer_bulk"},
    "'stores' must have tiles=True, and shards, puts and by_host False": {"shards": True},
    "must have tiles=True": {"tiles": False},
    "registered transport stores tiles at peers": {"puts": True},
    "stores tiles at peers, got TransportSpec": {"by_host": True},
    "'stores' needs device='module:class', .* got 'module'": {"device": "module"},
    "got ''": {"device": ""},
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_transport_that_does_not_store_tiles_is_refused(why):
    with pytest.raises(ValueError, match=why):
        overlap_gemm.register(replace(SPEC, **{"name": "stores", **REFUSED[why]}))
    with pytest.raises(ValueError, match="must be one of copy_engine, peer_bulk, ll, nvshmem, got 'stores'"):  # noqa: SIM117
        with overlap_gemm.configured(transport="stores"):
            pass


TRANSPORTS = """
import sys
import torch
import another_transport
import overlap_gemm
from overlap_gemm import DisagreementError

world = overlap_gemm.init()
if world.rank == 0:  # emulated ranks share a process
    overlap_gemm.register(another_transport.SPEC)
torch.distributed.barrier()
generator = torch.Generator().manual_seed(0)
x, weight = (torch.randn(rows, 72 * world.size, generator=generator).bfloat16() for rows in (150, 136))
exact, ours = x.double() @ weight.double().T, slice(72 * world.rank, 72 * (world.rank + 1))
local, columns = x[:, ours].contiguous(), weight[:, ours].contiguous()
for transport in ("chunk_stores", "peer_bulk", "chunk_stores"):
    number = len(another_transport.traced)
    with overlap_gemm.configured(transport=transport):
        out = overlap_gemm.gemm_reduce_scatter(local, columns, backend="fused")
        said = str(overlap_gemm.explain("gemm_reduce_scatter", local, columns, backend="fused"))
        torch.cuda.synchronize()
    expected = exact.chunk(world.size)[world.rank]
    assert ((out.double() - expected).abs() <= 0.02 * expected.abs() + 0.2).all()
    assert f"transport {transport!r}, as configured" in said, said
assert another_transport.traced and len(another_transport.traced) == number
try:
    with overlap_gemm.configured(transport="peer_bulk" if world.rank else "chunk_stores"):
        overlap_gemm.gemm_reduce_scatter(local[:64], columns, backend="fused")  # not compared before
except DisagreementError as error:
    print("DIFFER" if "chunk_stores" in str(error) else error)
try:
    with overlap_gemm.configured(transport="chunk_stores"):
        overlap_gemm.all_gather_gemm(local, columns, backend="fused")
except ValueError as error:
    print("GATHERS" if "transport='chunk_stores' is for gemm_reduce_scatter" in str(error) else error)
overlap_gemm.finalize()
"""


def test_another_transport_is_registered_configured_explained_and_compared(tmp_path):
    shutil.copy(another_transport.__file__, tmp_path)
    lines = lines_of_ranks(tmp_path, TRANSPORTS, env={**os.environ, "OVERLAP_GEMM_CACHE": "0"})
    assert lines == ["DIFFER", "DIFFER", "GATHERS", "GATHERS"]


PLANNED_TRANSPORT = """
import overlap_gemm
from overlap_gemm.cli import app
from tests.support.emulated import another_transport
overlap_gemm.register(another_transport.SPEC)
with overlap_gemm.configured(tile_transport="chunk_stores"):
    app(["plan", "gemm_reduce_scatter", "8192", "8192", "2048", "--ranks", "4"], standalone_mode=False)
"""


def test_the_planner_names_another_transport():
    assert " by transport chunk_stores, " in run_script(PLANNED_TRANSPORT)


def test_an_unknown_architecture_is_an_error():
    with pytest.raises(ValueError, match="arch must be one of sm_90a, sm_100a, sm_103a; got sm_120a"):
        arch_of("sm_120a")
    with pytest.raises(ValueError, match="got sm_120a"):
        GemmConfig("sm_120a")


SCRIPT = """
import sys
import torch
import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.emulated import another_op

arch, world = sys.argv[1], int(sys.argv[2])
rows, columns, depth = 150, 72 * world, 72
x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((rows, depth), (columns, depth), (columns,)))
exact = x.double() @ weight.double().T + bias.double()
with Emulator(arch, world) as emulator, VirtualWorld(world, emulator=emulator) as ranks:
    for transport in ("peer_bulk", "ll", "peer_bulk"):
        with overlap_gemm.configured(transport=transport):
            outs = [
                overlap_gemm.rows_to_columns(
                    own, [weight, weight], bias=[bias] * 2, group=group, rows=rows, backend="fused"
                )
                for own, group in zip(x.chunk(world), ranks.names, strict=True)
            ]
            ranks.synchronize()
        for each, expected in zip(outs, exact.split(columns // world, 1), strict=True):
            for out in each:
                assert out.shape == expected.shape
                assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()
    own, group = x.chunk(world)[0], ranks.names[0]
    how = {"group": group, "rows": rows, "backend": "fused", "epilogue": overlap_gemm.epilogues.apply_relu()}
    said = str(overlap_gemm.explain("rows_to_columns", own, weight, **how))
    assert said.startswith("rows_to_columns runs as 'fused'"), said
    assert "the kernel of rows_to_columns is registered without epilogues" in said, said
"""


def run_script(*arguments, **variables):
    """Runs a script in a process of its own: what it registers stays there."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("world", "arch"), [(3, "sm_90a"), pytest.param(2, "sm_100a", marks=pytest.mark.slow)]
)
def test_another_op(arch, world):
    """By its public function, ragged rows, a list of weights, again, by flags and as LL words."""
    run_script(SCRIPT, arch, world)


PLANNED = """
import sys
from overlap_gemm.cli import app
from tests.support.emulated import another_op
for op in ("rows_to_columns", "columns_to_rows"):
    app(["plan", op, *sys.argv[1:]], standalone_mode=False)
    print("---")
"""


def test_the_planner_knows_another_op_and_prints_no_time_of_a_kernel_that_is_not_there():
    with_kernel, without, _ = run_script(PLANNED, 8192, 8192, 2048, "--ranks", 4).split("---\n")
    rows = [
        {line.split()[0] for line in out.splitlines() if line.endswith("x")} for out in (with_kernel, without)
    ]
    assert rows == [{"fused", "torch", "sequential", "decomposed"}, {"torch", "sequential", "decomposed"}]
    assert "us expected\n  limited by" in with_kernel
    assert "fused kernel: no, no fused kernel of columns_to_rows is registered" in without


ANOTHER_ARCHITECTURE = """
from dataclasses import replace
import pytest
from overlap_gemm import PatternSpec, register
from overlap_gemm.cli import app
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.transports import PeerBulk
from tests.support.emulated.another_arch import SMALL_HOPPER
from tests.support.emulated.kernel_cases import launched
from tests.support.emulated.rank_scripts import lines_of_ranks

config = GemmConfig("sm_90s", mma="cooperative", tile=(128, 128))
assert config.ab_stages == 2 < replace(config, arch="sm_90a").ab_stages
with pytest.raises(ValueError, match="tile"):
    replace(config, tile=(128, 256))
for transport, world in ((None, 1), (PeerBulk(), 2)):
    launched(config, transport, world, SMALL_HOPPER.target, rows=264, cols=152, depth=200).check()

pattern = PatternSpec("tiles", "gemm_all_reduce", None, False, False, "a:b")
for error, why, entry, *patterns in (
    (ValueError, "'sm_90s' is there already; there are sm_90a, .*, sm_90s", SMALL_HOPPER),
    (ValueError, "'sm_90t' needs a compute capability of its own, .*9, 0. is that of sm_90a",
     replace(SMALL_HOPPER, name="sm_90t", capability=(9, 0))),
    (ValueError, "'sm_90u' has devices, and .* OVERLAP_GEMM_MACHINE must name a file",
     replace(SMALL_HOPPER, name="sm_90u", capability=(9, 8))),
    (TypeError, "patterns are of ops, and sm_90v is of type Arch",
     replace(SMALL_HOPPER, name="sm_90v"), pattern),
    (TypeError, "takes an OpSpec, an Arch or a TransportSpec, got str", "sm_90w"),
):
    with pytest.raises(error, match=why):
        register(entry, *patterns)
for name in "tuvw":
    with pytest.raises(ValueError, match=f"got sm_90{name}"):
        GemmConfig(f"sm_90{name}")

problem = ["plan", "gemm_reduce_scatter", "8192", "8192", "2048", "--ranks", "4", "--arch"]
app([*problem, "sm_90s", "--dtype", "float8_e4m3fn", "--block", "128"], standalone_mode=False)
register(replace(SMALL_HOPPER, name="sm_90x", capability=None))
with pytest.raises(Exception, match="there are no constants for sm_90x"):
    app([*problem, "sm_90x"], standalone_mode=False)
"""


def test_another_architecture(tmp_path):
    """Its kernels, alone and of two ranks, the planner by constants of its own, and what is refused."""
    constants = json.loads((Path(overlap_gemm.__file__).parent / "tuning/machines/h200.json").read_text())
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**constants, "archs": ["sm_90s", "sm_90t"]}))
    printed = run_script(ANOTHER_ARCHITECTURE, OVERLAP_GEMM_MACHINE=str(file))
    assert "fused kernel: sm_90s_cooperative_128x128_c1x1_e4m3_obf16_sbf16_b1x128x128, " in printed
