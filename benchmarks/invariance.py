"""Cost of `invariant=` and `partials=` next to the default, and to what people do for the same promise.

    torchrun --standalone --nproc-per-node 2 benchmarks/invariance.py --json out.json

Variants are the fused kernels with each promise; `fp32 NCCL`: torch's float32 product and NCCL's float32 sum,
which promises nothing of the number of ranks; `whole product`: every rank multiplies all of K. Times are of
CUDA graphs, interleaved; ratios are to the default. `differing` counts elements whose bits are others than

- `batch`: those of the same rows in a call of few rows,
- `ranks`: those of one rank that has all of K.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import overlap_gemm
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.spec.promises import LEAVES
from overlap_gemm.testing.workload import in_turn
from overlap_gemm.tuning.timing import captured, measure

FEW = 16
"""Rows of the small batch."""

SETS = 2
"""Sets of operands, taken in turn."""


def promises(ranks: int) -> dict[str, dict[str, str]]:
    """Returns the options of each variant of the fused kernels."""
    fewest = [name for name, leaves in LEAVES.items() if leaves == ranks]
    names = dict.fromkeys(["batch", "ranks", *fewest])
    return {"default": {}, "partials": {"partials": "float32"}} | {n: {"invariant": n} for n in names}


class Case:
    """Operands of an op on all ranks, the same on each, and its calls.

    Args:
        op: "gemm_reduce_scatter" or "gemm_all_reduce".
        m, n, k: Extents over all ranks.
        alone: Group of this rank.
    """

    def __init__(self, op: str, m: int, n: int, k: int, alone: Any) -> None:
        self.op, self.m, self.n, self.k, self.alone = op, m, n, k, alone
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator("cuda").manual_seed(m + n + k)
        self.sets = [
            tuple(torch.randn(rows, k, generator=generator, device="cuda").bfloat16() for rows in (m, n))
            for _ in range(SETS)
        ]
        self.parts = [tuple(self._part(full) for full in pair) for pair in self.sets]
        self.scatters = op == "gemm_reduce_scatter"

    def _part(self, full: Tensor) -> Tensor:
        return full.chunk(self.ranks, 1)[self.rank].contiguous()

    def call(self, which: int, **options: Any) -> Tensor:
        """Returns the result of the fused kernel."""
        x, weight = self.parts[which]
        return self._call(x, weight, **options)

    def _call(self, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        out: Tensor = getattr(overlap_gemm, self.op)(x, weight, backend="fused", k=self.k, **options)
        return out

    def by_nccl(self, which: int) -> Tensor:
        """Returns the result of a float32 product, summed by NCCL."""
        x, weight = self.parts[which]
        total = torch.mm(x, weight.t(), out_dtype=torch.float32)
        if not self.scatters:
            dist.all_reduce(total)
            return total.bfloat16()
        shard = total.new_empty(self.m // self.ranks, self.n)
        dist.reduce_scatter_tensor(shard, total)
        return shard.bfloat16()

    def unsharded(self, which: int) -> Tensor:
        """Returns the product over all of K."""
        x, weight = self.sets[which]
        return x @ weight.t()

    def differing(self, **options: str) -> dict[str, int]:
        """Returns how many elements have other bits in a small batch, and on one rank."""
        (x, weight), out = self.sets[0], self.call(0, **options)
        each, shard = FEW // self.ranks, self.m // self.ranks
        rows = [r * shard + i for r in range(self.ranks) for i in range(each)]
        few = self._call(self._part(x[rows]), self.parts[0][1], **options)
        one = self._call(x, weight, group=self.alone, **options)
        if self.scatters:
            in_batch, alone = out[:each], one[self.rank * shard : (self.rank + 1) * shard]
        else:
            in_batch, alone = out[rows], one
        counts = torch.stack([count(few, in_batch), count(out, alone)])
        dist.all_reduce(counts)
        return dict(zip(("batch", "ranks"), counts.tolist(), strict=True))


def count(one: Tensor, other: Tensor) -> Tensor:
    """Returns the number of elements with other bits."""
    return (one.view(torch.int16) != other.view(torch.int16)).sum()


def of_sets(call: Callable[..., Tensor], **options: Any) -> Callable[[], object]:
    """Returns a call that takes the sets of operands in turn."""
    return in_turn([partial(call, which, **options) for which in range(SETS)])


def timed(case: Case, rounds: int) -> dict[str, Any]:
    """Returns times and differing elements of a case's variants."""
    row: dict[str, Any] = {"op": case.op, "m": case.m, "n": case.n, "k": case.k, "differing": {}}
    calls: dict[str, Callable[[], object]] = {}
    for name, options in promises(case.ranks).items():
        row["differing"][name] = case.differing(**options)
        calls[name] = captured(of_sets(case.call, **options), 4)
    for name, call in (("fp32 NCCL", case.by_nccl), ("whole product", case.unsharded)):
        calls[name] = captured(of_sets(call), 4)
    times = measure(calls, group=dist.group.WORLD, device="cuda", rounds=rounds, burst_seconds=0.02)
    return row | times.summary("default")


def main(
    rows: Annotated[str, typer.Option(help="Rows over all ranks, divided by commas.")] = "16,128,2048,8192",
    columns: Annotated[int, typer.Option(min=1, help="N.")] = 8192,
    depths: Annotated[str, typer.Option(help="K over all ranks, divided by commas.")] = "8192,28672",
    ops: Annotated[str, typer.Option(help="Ops, divided by commas.")] = "gemm_reduce_scatter,gemm_all_reduce",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 11,
) -> None:
    """Times every op, depth and number of rows."""
    world = overlap_gemm.init(device="cuda")
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    report: dict[str, Any] = {"machine": describe(world), "ranks": world.size, "rounds": rounds}
    report["results"] = []
    for op in ops.split(","):
        for k in map(int, depths.split(",")):
            for m in map(int, rows.split(",")):
                row = timed(Case(op, m, columns, k, groups[world.rank]), rounds)
                report["results"].append(row)
                if world.rank == 0:
                    print(json.dumps(row), flush=True)
                    if json_file is not None:
                        json_file.write_text(json.dumps(report, indent=1) + "\n")
    overlap_gemm.finalize()


if __name__ == "__main__":
    typer.run(main)
