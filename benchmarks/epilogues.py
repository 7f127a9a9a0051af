"""Time of epilogues in the kernel next to the op alone and to the op followed by torch's operations.

    torchrun --standalone --nproc-per-node 2 benchmarks/epilogues.py --json out.json

Variants of each case:

- `op`: the fused kernel alone. `epilogue`: the same with the epilogue.
- `compiled`: the op, then torch's operations compiled by Inductor. `eager`: the op, then torch's operations.

In sums `epilogue` adds a residual and stores the sums of squares of rows. `epilogue, norm` also scales the
rows by them; a product that follows may do that instead (`norm` of `all_gather_gemm`). `residual` adds a
residual alone, in the kernel; `op, residual` after it. Times are of CUDA graphs, interleaved; ratios are to
`op`.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

import overlap_gemm
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.epilogues import add_residual, add_residual_squared, scale_gathered_rows, swiglu
from overlap_gemm.testing.workload import in_turn
from overlap_gemm.tuning.timing import captured, measure

SETS = 2
"""Sets of operands, taken in turn."""

EPS = 1e-6
"""Added to the mean square in a norm."""

HIDDEN, INNER = 8192, 28672
"""Features of a Llama-70B between layers and in its MLP."""

Variants = dict[str, Callable[[int], object]]


def random(*shape: int) -> Tensor:
    """Returns a bfloat16 matrix."""
    return torch.randn(*shape, device="cuda").bfloat16()


def scaled(stream: Tensor, squares: Tensor, gamma: Tensor) -> Tensor:
    """Returns the normalised rows of a stream whose sums of squares are known."""
    rstd = torch.rsqrt(squares / stream.shape[-1] + EPS)
    return (stream * rstd[:, None]).bfloat16() * gamma


def residual_and_norm(out: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the stream and its normalised rows."""
    stream = out + residual
    return stream, F.rms_norm(stream, stream.shape[-1:], gamma, EPS)


def sums(op: str, rows: int, k: int) -> Variants:
    """Returns the variants of a row-parallel product, then residual and RMS norm."""
    ranks = dist.get_world_size()
    mine = rows // ranks if op == "gemm_reduce_scatter" else rows
    sets = [(random(rows, k // ranks), random(HIDDEN, k // ranks), random(mine, HIDDEN)) for _ in range(SETS)]
    for *_, residual in sets:
        dist.broadcast(residual, 0)
    gamma, compiled = random(HIDDEN), torch.compile(residual_and_norm, dynamic=False)
    scale = torch.compile(scaled, dynamic=False)

    def call(which: int, **epilogue: Any) -> Any:
        x, weight, _ = sets[which]
        return getattr(overlap_gemm, op)(x, weight, backend="fused", k=k, **epilogue)

    def fused(which: int) -> Any:
        return call(which, epilogue=add_residual_squared(residual=sets[which][2]))

    def with_residual(which: int) -> Any:
        return call(which, epilogue=add_residual(residual=sets[which][2]))

    return {
        "op": call,
        "residual": with_residual,
        "op, residual": lambda which: call(which) + sets[which][2],
        "epilogue": fused,
        "epilogue, norm": lambda which: scale(*fused(which), gamma),
        "compiled": lambda which: compiled(call(which), sets[which][2], gamma),
        "eager": lambda which: residual_and_norm(call(which), sets[which][2], gamma),
    }


def gated(rows: int) -> Variants:
    """Returns the variants of a column-parallel product by gate and up, then SwiGLU."""
    ranks = dist.get_world_size()
    sets = [
        (random(rows // ranks, HIDDEN), *(random(INNER // ranks, HIDDEN) for _ in range(2)))
        for _ in range(SETS)
    ]
    both = [torch.cat(pair) for _, *pair in sets]

    def call(which: int) -> Any:
        return overlap_gemm.all_gather_gemm(sets[which][0], both[which], backend="fused", rows=rows)

    def activate(out: Tensor) -> Tensor:
        gate, up = out.chunk(2, -1)
        return F.silu(gate) * up

    compiled = torch.compile(activate, dynamic=False)
    return {
        "op": call,
        "epilogue": lambda which: overlap_gemm.all_gather_gemm(
            sets[which][0], list(sets[which][1:]), backend="fused", rows=rows, epilogue=swiglu()
        ),
        "compiled": lambda which: compiled(call(which)),
        "eager": lambda which: activate(call(which)),
    }


def normalised(rows: int, n: int) -> Variants:
    """Returns the variants of an RMS norm, then a column-parallel product; sums of squares are known."""
    ranks = dist.get_world_size()
    sets = [(random(rows // ranks, HIDDEN), random(n // ranks, HIDDEN)) for _ in range(SETS)]
    rstd = [torch.rsqrt(x.float().square().mean(-1) + EPS) for x, _ in sets]
    gamma = random(HIDDEN)

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gamma, EPS)

    compiled = torch.compile(norm, dynamic=False)

    def call(which: int, x: Tensor | None = None, **epilogue: Any) -> Any:
        shard, weight = sets[which]
        return overlap_gemm.all_gather_gemm(
            shard if x is None else x, weight, backend="fused", rows=rows, **epilogue
        )

    return {
        "op": call,
        "epilogue": lambda which: call(which, epilogue=scale_gathered_rows(scale=rstd[which])),
        "compiled": lambda which: call(which, compiled(sets[which][0])),
        "eager": lambda which: call(which, norm(sets[which][0])),
    }


def cases() -> dict[str, Callable[[], Variants]]:
    """Returns every case by name."""
    table: dict[str, Callable[[], Variants]] = {}
    for op, counts in (("gemm_all_reduce", (16, 64, 128)), ("gemm_reduce_scatter", (512, 2048, 8192))):
        for k in (HIDDEN, INNER):
            for rows in counts:
                name = f"{op} {rows},{HIDDEN},{k}: residual, norm"
                table[name] = lambda op=op, rows=rows, k=k: sums(op, rows, k)  # type: ignore[misc]
    for rows in (512, 2048, 8192):
        table[f"all_gather_gemm {rows},{2 * INNER},{HIDDEN}: swiglu"] = lambda rows=rows: gated(rows)  # type: ignore[misc]
        table[f"all_gather_gemm {rows},10240,{HIDDEN}: norm"] = lambda rows=rows: normalised(rows, 10240)  # type: ignore[misc]
    return table


def timed(variants: Variants, rounds: int) -> dict[str, Any]:
    """Returns times of the variants. No graph outlives it: NCCL would wait for its own graphs at the end."""
    calls = {
        name: captured(in_turn([partial(call, which) for which in range(SETS)]), 4)
        for name, call in variants.items()
    }
    times = measure(calls, group=dist.group.WORLD, device="cuda", rounds=rounds, burst_seconds=0.02)
    return times.summary("op")


def main(
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 11,
) -> None:
    """Times every case."""
    world = overlap_gemm.init(device="cuda")
    report: dict[str, Any] = {"machine": describe(world), "ranks": world.size, "rounds": rounds}
    report["results"] = []
    for name, make in cases().items():
        if only not in name:
            continue
        row = {"case": name} | timed(make(), rounds)
        report["results"].append(row)
        if world.rank == 0:
            print(json.dumps(row), flush=True)
            if json_file is not None:
                json_file.write_text(json.dumps(report, indent=1) + "\n")
    overlap_gemm.finalize()


if __name__ == "__main__":
    typer.run(main)
