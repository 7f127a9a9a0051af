"""GEMM all-gather into a symmetric output against the op, whose result is the caller's own memory.

    torchrun --standalone --nproc-per-node 2 benchmarks/symmetric_output.py --json out.json

Times are those of CUDA graphs of eight calls; results are compared with torch's once. Columns are over all
ranks. ``product``: this rank's columns alone, by torch.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import overlap_gemm
from overlap_gemm.backends.symmetric_output import gemm_all_gather_into, symmetric_output
from overlap_gemm.cli.machine import describe
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.tuning.timing import captured, measure

SHAPES = ((8192, 8192, 8192), (8192, 8192, 4096), (2048, 8192, 8192), (512, 8192, 8192), (16, 8192, 8192))


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 11,
) -> None:
    """Times every shape's variants in turn."""
    world = overlap_gemm.init(device="cuda")
    group = resolve(group_name(None))
    report = {"machine": describe(world), "ranks": group.size, "results": []}
    for m, n, k in SHAPES:
        draw = torch.Generator(device="cuda").manual_seed(m + n + k)
        x = torch.randn(m, k, generator=draw, device="cuda").bfloat16()
        whole = torch.randn(n, k, generator=draw, device="cuda").bfloat16() / k**0.5
        own = whole.chunk(group.size)[group.rank].clone()
        output = symmetric_output(m, n, torch.bfloat16)

        def op(backend: str, x: Tensor = x, own: Tensor = own) -> Tensor:
            return overlap_gemm.gemm_all_gather(x, own, backend=backend)

        ways: dict[str, Callable[[], Tensor]] = {
            "fused": lambda op=op: op("fused"),
            "symmetric": lambda o=output, x=x, own=own: gemm_all_gather_into(o, x, own),
            "torch": lambda op=op: op("torch"),
            "product": lambda x=x, own=own: torch.mm(x, own.t()),
        }
        expected = (x @ whole.t()).float()
        for name in ("fused", "symmetric", "torch"):
            error = (ways[name]().float() - expected).norm() / expected.norm()
            assert error < 0.02, f"{name} of {m}, {n}, {k} differs by {error}"
        calls = {name: captured(way, 8) for name, way in ways.items()}
        found = measure(calls, group=group.process_group, device="cuda", rounds=rounds, burst_seconds=0.01)
        row = {"m": m, "n": n, "k": k}
        row["us"] = {name: round(found.median(name) * 1e6, 2) for name in calls}
        row["ratio"] = {name: round(found.ratio(name, "fused"), 4) for name in calls}
        report["results"].append(row)
        if group.rank == 0:
            print(json.dumps(row), flush=True)
            if json_file is not None:
                json_file.write_text(json.dumps(report, indent=1) + "\n")
    overlap_gemm.finalize()


if __name__ == "__main__":
    typer.run(main)
