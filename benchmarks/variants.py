"""Settings of the fused kernels against each other, in turn: what decides which of two ways is the default.

    torchrun --standalone --nproc-per-node 2 benchmarks/variants.py cases.json --json out.json

`cases.json` is a list of objects: ``op``, ``m``, ``n``, ``k`` over all ranks, and ``variants``: name -> the
keyword arguments of `overlap_gemm.tuning.settings.configured`; ``"float8": true`` gives e4m3 operands with a
scale for each row. Times are those of CUDA graphs, whose calls take operands in turn that no cache holds
together; ratios are to the first variant's. In addition ``torch``: its way with the same operands; of 8-bit
ones also the product alone (``product``, ``product fast``: `use_fast_accum`), and torch's fused op
(``torch-symm``), where it has one.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import overlap_gemm
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.runtime.group import Group, group_name, resolve
from overlap_gemm.testing.workload import OpTensors, Workload, in_turn
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.timing import captured, measure
from overlap_gemm_tools.baselines import product, symmetric

COLD_BYTES = 160 << 20
"""OpTensors that together are larger than the L2 caches of today's GPUs."""


def operand_sets(workload: Workload, group: Group) -> list[OpTensors]:
    """Returns operands of the op, more than a cache holds."""
    first = workload.operands(group, torch.device("cuda"))
    size = sum(each.numel() * each.itemsize for each in (first.x, first.weight))
    count = min(8, 1 + COLD_BYTES // size)
    return [first, *(workload.operands(group, torch.device("cuda")) for _ in range(count - 1))]


def prepared(
    workload: Workload, group: Group, sets: list[OpTensors], backend: str, settings: dict[str, Any]
) -> Callable[[], object]:
    """Returns a graph of eight calls with the settings, whose result was compared with torch's."""
    op = getattr(overlap_gemm, workload.op)
    turn = iter(range(1 << 30))
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}

    def call(which: int | None = None, backend: str = backend) -> Tensor:
        one = sets[next(turn) % len(sets) if which is None else which]
        how = {**one.scales, **workload.arguments}
        out = op(one.x, one.weight, group=group.process_group, backend=backend, **how)
        return out[0] if isinstance(out, tuple) else out

    with ExitStack() as stack:
        stack.enter_context(configured(**settings))
        result, expected = call(0), call(0, "torch")
        error = (result.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.02, f"{workload} {settings}: differs by {error}"
        return captured(call, 8)


def torchs(workload: Workload, group: Group, sets: list[OpTensors]) -> dict[str, Callable[[], object]]:
    """Returns torch's other implementations for 8-bit operands, each a call that takes operands in turn."""
    full = [workload.gathered(each) if workload.spec.gathers_operand else each for each in sets]
    calls = {
        name: [product(workload, each, fast) for each in full]
        for name, fast in (("product", False), ("product fast", True))
    }
    if workload.spec.x != workload.spec.out:
        others = [symmetric(workload, each, group, fast=True) for each in sets]
        calls |= {name: [calls_of[name] for calls_of in others] for name in others[0] if name == "torch-symm"}
    return {name: in_turn(each) for name, each in calls.items()}


def timed(case: dict[str, Any], group: Group, rounds: int) -> dict[str, Any]:
    """Returns times of a case's variants. No graph outlives it: NCCL would wait for its graphs at the end."""
    float8 = bool(case.get("float8"))
    kind = (torch.float8_e4m3fn, "rows") if float8 else (torch.bfloat16,)
    workload = Workload("", case["op"], case["m"], case["n"], case["k"], *kind)
    sets, calls, failed = operand_sets(workload, group), {}, {}
    backends = {name: ("fused", settings) for name, settings in case["variants"].items()}
    backends["torch"] = ("torch", {})
    if float8:
        backends["torch fast"] = ("torch", {"fast_accum": True})
    making: dict[str, Callable[[], Callable[[], object]]] = {
        name: partial(prepared, workload, group, sets, backend, settings)
        for name, (backend, settings) in backends.items()
    }
    if float8:
        others = torchs(workload, group, sets)
        making |= {name: partial(captured, call, 8) for name, call in others.items()}
    for name, make in making.items():
        failure = None
        try:
            ready = make()
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        failures = [other for other in group.all_gather_object(failure) if other]
        if failures:
            failed[name] = failures[0]
        else:
            calls[name] = ready
    row = {**{key: case[key] for key in ("op", "m", "n", "k")}, "float8": float8, "failed": failed}
    if calls:
        timings = measure(calls, group=group.process_group, device="cuda", rounds=rounds, burst_seconds=0.01)
        row |= timings.summary(next(iter(calls)))
    return row


def main(
    cases: Annotated[Path, typer.Argument(help="JSON file, see above.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 11,
) -> None:
    """Times every case's variants in turn."""
    world = overlap_gemm.init(device="cuda")
    group = resolve(group_name(None))
    report: dict[str, Any] = {
        "machine": describe(world),
        "ranks": group.size,
        "rounds": rounds,
        "results": [],
    }
    for case in json.loads(cases.read_text()):
        row = timed(case, group, rounds)
        report["results"].append(row)
        if group.rank == 0:
            print(json.dumps(row), flush=True)
            if json_file is not None:
                json_file.write_text(json.dumps(report, indent=1) + "\n")
    overlap_gemm.finalize()


if __name__ == "__main__":
    typer.run(main)
