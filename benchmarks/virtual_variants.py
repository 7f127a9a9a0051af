"""Variants of variants.py on one GPU, whose SMs P virtual ranks share, without a link between them.

    python benchmarks/virtual_variants.py cases.json --ranks 2 --json out.json

Cases are those of variants.py, without float8. The variants' results must be the same bits, unless one has
an `"epilogue"`, the name of a predefined one, whose inputs are random.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import overlap_gemm
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.workload import Workload
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.timing import captured, measure
from overlap_gemm_tools.epilogue_calls import EpilogueCalls

SETS = 2
"""Sets of operands, taken in turn."""


def caller(
    workload: Workload, world: VirtualWorld, sets: list[Any], epilogue: str | None
) -> Callable[[], list[Any]]:
    """Returns a call on all ranks, with the next operands; the current stream waits for all ranks."""
    op, applied = getattr(overlap_gemm, workload.op), {}
    if epilogue is not None:
        calls = EpilogueCalls(getattr(overlap_gemm.epilogues, epilogue), workload)
        for name, group, operands in zip(world.names, world.ranks, sets[0], strict=True):
            applied[name] = calls.inputs(calls.epilogue, operands, group)
    extents = workload.spec.arguments(workload.m, workload.n, workload.k, least=True)
    turn = iter(range(1 << 30))

    def call() -> list[Any]:
        operands = zip(world.names, sets[next(turn) % SETS], strict=True)
        outs = [
            op(o.x, o.weight, group=name, backend="fused", epilogue=applied.get(name), **extents)
            for name, o in operands
        ]
        for rank in range(len(world.names)):
            torch.cuda.current_stream().wait_stream(world.executor(rank).stream)  # type: ignore[attr-defined]
        return outs

    return call


def main(
    cases: Annotated[Path, typer.Argument(help="JSON file, see variants.py.")],
    ranks: Annotated[int, typer.Option(min=1, help="Virtual ranks.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 11,
) -> None:
    """Times every case's variants in turn."""
    device, report = torch.device("cuda", 0), []
    for case in json.loads(cases.read_text()):
        workload = Workload("", case["op"], case["m"], case["n"], case["k"], torch.bfloat16)
        alive: list[Any] = []  # graphs do not keep the epilogues' inputs
        calls, first, row = {}, None, {key: case[key] for key in ("op", "m", "n", "k")}
        with VirtualWorld(ranks, device=device) as world:
            sets = [[workload.operands(group, device) for group in world.ranks] for _ in range(SETS)]
            for name, settings in case["variants"].items():
                settings = {
                    key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
                }
                epilogue = settings.pop("epilogue", None)
                call = caller(workload, world, sets, epilogue)
                alive.append(call)
                with configured(**settings):
                    outs = call()
                    world.synchronize()
                    if epilogue is None:
                        first = first or outs
                        same = all(torch.equal(a, b) for a, b in zip(outs, first, strict=True))
                        row.setdefault("same bits", {})[name] = same
                    calls[name] = captured(call)
            timings = measure(calls, device="cuda", rounds=rounds, burst_seconds=0.02)
            row |= timings.summary(next(iter(calls)))
            calls.clear()
        report.append(row)
        print(json.dumps(row), flush=True)
        if json_file is not None:
            found_on = {"gpu": torch.cuda.get_device_name(device), "virtual ranks": ranks, "rounds": rounds}
            json_file.write_text(json.dumps({**found_on, "results": report}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when CUDA starts
    typer.run(main)
