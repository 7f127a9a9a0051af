"""The product and torch's own collective, nothing of ours in between: what a model without this library does.

The yardstick, and what `auto` takes where nothing is known to be faster. Sums over ranks are those of the
collective: NCCL and gloo round every partial sum to the operands' dtype, in an order of their own choosing.

Shards of different lengths cost what padding them to the longest costs, on the wire: the collectives take
equal blocks only. A product that is to be scattered is written into a padded tensor at once, and only a short
shard that is to be gathered is copied.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.group import Group
from ..spec.sharding import Shards
from .base import Portable, Problem
from .collectives import collective
from .portable_arithmetic import Arithmetic
from .scales.scaling import Scaled, why_no_scaled_mm

# The name since torch 2.13, where the older one warns.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Torch(Portable):
    """Torch's products alongside `all_gather`, `reduce_scatter` or `all_reduce` of torch.distributed.

    `torch.mm`, and of operands with scales `torch._scaled_mm` or, of blocks, `F.scaled_mm`.
    """

    name = "torch"
    deterministic = False
    operand = Scaled

    def why_not(self, problem: Problem) -> str | None:
        """Carries out everything that torch.distributed has a group for, and torch a product."""
        if problem.is_scaled and problem.promises.has_wide_partials:
            return "torch's products of 8-bit operands are rounded to 16 bits, partials='float32' or not"
        return super().why_not(problem) or (why_no_scaled_mm(problem) if problem.is_scaled else None)

    def why_slower(self, problem: Problem) -> str | None:
        """What every other way is compared with."""
        return None

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """See `Portable.gemm_reduce_scatter`."""
        if group.size == 1:
            return how.product(x, weight, bias)
        whole = group.size * shards.chunk
        if whole == shards.total:
            return reduce_scatter_padded(how.partial(x, weight), bias, shards, group, how.type_of_sum(x))
        padded = x.new_empty(whole, weight.shape[0], dtype=how.type_of(x))
        how.partial(x, weight, out=padded[: shards.total])
        return reduce_scatter_padded(padded, bias, shards, group, how.type_of_sum(x))

    def gemm_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """See `Portable.gemm_all_reduce`."""
        if group.size == 1:
            return how.product(x, weight, bias)
        out = how.partial(x, weight)
        with collective("all-reduce", group, out):
            dist.all_reduce(out, group=group.process_group)
        return (out if bias is None else out.add_(bias)).to(how.type_of_sum(x))

    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """See `Portable.gemm_all_gather`: blocks of columns are gathered whole, then laid side by side.

        A copy of runs of a block's columns, several times faster than to compute the product transposed and
        to transpose what is gathered.
        """
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
        whole = blocks.movedim(0, 1).reshape(rows, group.size * shards.chunk)
        return whole[:, : shards.total].contiguous()


def reduce_scatter_padded(
    padded: Tensor,
    bias: Tensor | None,
    shards: Shards,
    group: Group,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's rows of the sum of every rank's `padded`, by torch's reduce-scatter, plus bias.

    Args:
        padded: `[P * shards.chunk, N]`, contiguous; written to. Rows from `shards.total` on hold nothing.
        bias: `[N]` or None.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        dtype: Of the result; the default is that of `padded`.

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
    return (out if bias is None else out.add_(bias)).to(dtype or out.dtype)
