"""Backend ``fused``: one persistent kernel that computes and communicates.

What an op asks of its tensors is here; what becomes of a call, in `plans`. A call allocates its output and
nothing else, waits for nothing on the host, and can be captured in a CUDA graph, once the first call of its
kind has compiled the kernel and made the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.geometry import MAX_WORLD, ExchangeShape, Pattern
from ..runtime.executor import open_emulator, why_no_cuda
from ..runtime.group import Group
from ..schedules import shard_rows
from ..sharding import Shards
from ..tuning.machine import machine_for
from ..tuning.settings import settings
from . import gather
from .base import Op, Problem
from .operands import ROW_ELEMENTS, aligned, aligned_bias, has_tma_strides, major
from .plans import DTYPES, Plan, plan_for

PATTERNS: dict[Op, Pattern] = {
    "gemm_reduce_scatter": "reduce_scatter",
    "gemm_all_reduce": "two_shot",  # or one-shot, as the plan settles
    "gemm_all_gather": "output_gather",
}
"""How the tiles of an op are exchanged, of those that there are kernels for."""


class Sizes(NamedTuple):
    """What an op makes of the shapes of its tensors.

    Attributes:
        shape: of the exchange, the same on all ranks.
        first: the product's row that is this rank's result's first.
        out: (rows, columns) of this rank's result.
    """

    shape: ExchangeShape
    first: int
    out: tuple[int, int]

    def made_by(self, plan: Plan) -> tuple[int, slice]:
        """(rows that a plan's kernel writes, or one at least; which of them are the result)."""
        rows, _ = self.out
        if self.shape.pattern == "reduce_scatter" and plan.shape.pattern != "reduce_scatter":
            return self.shape.rows, slice(self.first, self.first + rows)
        # A rank that owns no row of the result passes one row, which the kernel leaves alone.
        return max(rows, 1), slice(0, rows)


def sizes(op: Op, x: Tensor, weight: Tensor, shards: Shards, group: Group) -> Sizes:
    """Those of a call; arguments as for `Backend`'s method of that name."""
    rows, columns = x.shape[0], shards.total if op == "gemm_all_gather" else weight.shape[0]
    first, end = shards.range(group.rank) if op == "gemm_reduce_scatter" else (0, rows)
    shape = ExchangeShape(rows, columns, group.size, shards.chunk, PATTERNS[op])
    return Sizes(shape, first, (end - first, columns))


class Fused:
    """The fused kernels, for 16-bit operands."""

    name = "fused"
    deterministic = True

    def why_not(self, problem: Problem) -> str | None:
        """Fused kernels exist for some dtypes, extents and devices."""
        if problem.dtype not in DTYPES:
            return f"fused kernels take bfloat16 or float16, not {problem.dtype}"
        if problem.op != "all_gather_gemm" and problem.features % ROW_ELEMENTS:
            return f"N={problem.features} must be a multiple of {ROW_ELEMENTS}: TMA rows are whole 16 bytes"
        columns = shard_rows(problem.features, problem.world_size)
        if problem.op == "gemm_all_gather" and columns % ROW_ELEMENTS:
            return (
                f"N={problem.features} in {problem.world_size} parts is {columns} columns a rank, which must "
                f"be a multiple of {ROW_ELEMENTS}: tiles are stored 16 bytes at a time"
            )
        if problem.deterministic and problem.op == "gemm_all_reduce" and settings().transport == "nvls":
            return "deterministic sums are asked for, and transport='nvls' sums in an order of the switch's"
        if problem.world_size > MAX_WORLD:
            return f"a workspace has words for {MAX_WORLD} ranks, not {problem.world_size}"
        if problem.device_type == "cuda":
            return why_no_cuda(torch.cuda.current_device())
        if open_emulator() is None:
            return f"fused kernels need a Hopper or Blackwell GPU, or the emulator; not {problem.device_type}"
        return None

    def why_slower(self, problem: Problem) -> str | None:
        """Worth comparing on GPUs whose ranks reach each other and whose constants are known."""
        if problem.virtual:
            return None
        if problem.device_type != "cuda":
            return "the emulator is there to be right, not to be fast; ask for it with backend='fused'"
        if problem.reach is None:
            return "nobody asked what the ranks' GPUs reach"
        if problem.reach.why_not is None and machine_for(problem.reach.arch) is None:
            return f"nothing is known of its time on {problem.reach.arch}; ask for it with backend='fused'"
        return problem.reach.why_not

    def bind(
        self,
        problem: Problem,
        x: Tensor,
        weight: Any,
        bias: Any,
        shards: Shards,
        group: Group,
    ) -> Callable[..., Any]:
        """See `Backend.bind`: what is left is where the tensors lie, the output, and the launch."""
        if problem.op == "all_gather_gemm":
            return gather.bind(x, weight, bias, shards, group, problem.keep)
        op, depth = problem.op, problem.k
        found = sizes(op, x, weight, shards, group)
        shape, _, (_, columns) = found

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self.call(op, x, weight, bias, shards, group, depth)

        if not (
            shape.rows and columns and weight.shape[0] and has_tma_strides(x) and has_tma_strides(weight)
        ):
            return run
        majors = major(x, "m"), major(weight, "n")
        plan = plan_for(group, x.device, x.dtype, shape, *majors, bias is not None, depth)
        written, own = found.made_by(plan)
        whole = own == slice(0, written)

        def run_as_planned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
            if addresses % 16 or not plan.is_open:
                return run(x, weight, bias)
            out = x.new_empty(written, columns)
            plan.launch(x, weight, out, bias)
            return out if whole else out[own]

        return run if bias is not None and bias.stride(0) != 1 else run_as_planned

    def call(
        self,
        op: Op,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shards: Shards,
        group: Group,
        depth: int | None = None,
    ) -> Tensor:
        """Carries out an op on any tensors; `depth` is K over all ranks, where they have agreed on it."""
        found = sizes(op, x, weight, shards, group)
        shape, _, (rows, columns) = found
        if shape.rows == 0 or columns == 0:
            return x.new_empty(rows, columns)
        if weight.shape[0] == 0:  # no columns of its own, but the others': B is some matrix that is not read
            weight, bias = x, None
        a, b = aligned(x), aligned(weight)
        majors = major(a, "m"), major(b, "n")
        plan = plan_for(group, x.device, x.dtype, shape, *majors, bias is not None, depth)
        written, own = found.made_by(plan)
        out = x.new_empty(written, columns)
        plan.launch(a, b, out, None if bias is None else aligned_bias(bias))
        return out[own]

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """See `Backend.gemm_reduce_scatter`. Every rank's partial is rounded once, before the sum."""
        return self.call("gemm_reduce_scatter", x, weight, bias, shards, group)

    def gemm_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """See `Backend.gemm_all_reduce`. Every rank's partial is rounded once, before the sum."""
        return self.call("gemm_all_reduce", x, weight, bias, shards, group)

    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """See `Backend.gemm_all_gather`."""
        return self.call("gemm_all_gather", x, weight, bias, shards, group)

    def all_gather_gemm(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], shards: Shards, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Backend.all_gather_gemm`. Keeping the gathered x costs a copy of it."""
        return gather.all_gather_gemm(x, weights, biases, shards, group, keep=True)
