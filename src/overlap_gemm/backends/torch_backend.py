"""Backend `torch`: torch's product and torch's collective, as a model without this library calls them.

It is the baseline of benchmarks. `auto` chooses it if every backend before it is excluded or expected to be
slower. The collective sums over ranks: NCCL and gloo choose the order, and round every partial sum to the
operands' dtype.

The collectives support only blocks of equal size, so short shards are padded. A product to be scattered is
written into a padded tensor without a copy. A short shard to be gathered is copied.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.group import Group
from ..spec.sharding import Shards
from .base import Portable, Problem
from .collectives import collective
from .op_call import CallOperands
from .portable_arithmetic import Arithmetic
from .scales.scaling import Scaled, why_no_scaled_mm

# Name since torch 2.13, in which the older name warns.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Torch(Portable):
    """Torch's products alongside `all_gather`, `reduce_scatter` or `all_reduce` of torch.distributed.

    Products are `torch.mm`; with scales, `torch._scaled_mm` or, for blocks, `F.scaled_mm`.
    """

    name = "torch"
    deterministic = False
    operand = Scaled

    def why_not(self, problem: Problem) -> str | None:
        """Returns the reason torch or torch.distributed cannot run a problem; None if they can.

        Products with scales have limits, see `scaling.why_no_scaled_mm`.
        """
        return super().why_not(problem) or (why_no_scaled_mm(problem) if problem.is_scaled else None)

    def why_slower(self, problem: Problem) -> str | None:
        """Returns None: every other backend is compared with this one."""
        return None

    def gemm_reduce_scatter(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies into a padded tensor and reduce-scatters it; see `Portable.gemm_reduce_scatter`."""
        x, weight, bias, *_ = operands
        if group.size == 1:
            return how.product(x, weight, bias)
        padded_rows = group.size * shards.chunk
        if padded_rows == shards.total:
            return reduce_scatter_padded(how.partial(x, weight), bias, shards, group, how.type_of_sum(x))
        padded = x.new_empty(padded_rows, weight.shape[0], dtype=how.type_of(x))
        how.partial(x, weight, out=padded[: shards.total])
        return reduce_scatter_padded(padded, bias, shards, group, how.type_of_sum(x))

    def gemm_all_reduce(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies and all-reduces; see `Portable.gemm_all_reduce`."""
        x, weight, bias, *_ = operands
        if group.size == 1:
            return how.product(x, weight, bias)
        out = how.partial(x, weight)
        with collective("all-reduce", group, out):
            dist.all_reduce(out, group=group.process_group)
        return (out if bias is None else out.add_(bias)).to(how.type_of_sum(x))

    def gemm_all_gather(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Gathers blocks of columns, then copies them next to each other; see `Portable.gemm_all_gather`.

        Copying runs of a block's columns is several times faster than computing the product transposed and
        transposing the gathered tensor.
        """
        x, weight, bias, *_ = operands
        if group.size == 1:
            return how.product(x, weight, bias)
        rows, columns = x.shape[0], weight.shape[0]
        block = how.product(x, weight, bias) if columns == shards.chunk else x.new_empty(rows, shards.chunk)
        if columns < shards.chunk:
            how.product(x, weight, bias, out=block[:, :columns])
            block[:, columns:].zero_()
        blocks = block.new_empty(group.size, rows, shards.chunk)
        if blocks.numel():
            with collective("all-gather", group, block):
                group.all_gather(blocks.flatten(0, 1), block)
        gathered = blocks.movedim(0, 1).reshape(rows, group.size * shards.chunk)
        return gathered[:, : shards.total].contiguous()


def reduce_scatter_padded(
    padded: Tensor,
    addend: Tensor | None,
    shards: Shards,
    group: Group,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns this rank's rows of the sum of all ranks' `padded`, by torch's reduce-scatter, plus addend.

    Args:
        padded: `[P * shards.chunk, N]`, contiguous; written to. Rows from `shards.total` on are ignored.
        addend: `[N]` or None.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        dtype: Dtype of the result; the default is that of `padded`.

    Returns:
        `[shards.size(rank), N]`.
    """
    if padded.shape[0] > shards.total:
        padded[shards.total :].zero_()
    out = padded.new_empty(shards.chunk, padded.shape[1])
    if out.numel():
        with collective("reduce-scatter", group, padded):
            reduce_scatter_single(out, padded, group=group.process_group)
    if (rows := shards.size(group.rank)) < shards.chunk:
        out = out[:rows]
    return (out if addend is None else out.add_(addend)).to(dtype or out.dtype)
