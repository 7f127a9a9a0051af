"""What the portable backends share: products, sums in rank order, and plain collectives for any shards."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.group import Group
from ..runtime.spans import span
from ..spec.sharding import Shards
from .scales.scaling import Scaled


def gemm(x: Any, weight: Any, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for 2-D x `[m, K]` and weight `[N, K]`, into `out` `[m, N]` if given.

    x and weight are Tensors, or both `Scaled`.
    """
    with span("compute", "GEMM"):
        if isinstance(x, Scaled):
            return x.times(weight, bias, out)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)


class collective(span):  # noqa: N801
    """A span of a transfer of torch.distributed, whose failure names the rank and the group.

    Raises:
        RuntimeError: It failed; the transport's words are quoted.
    """

    __slots__ = ("group",)

    def __init__(self, label: str, group: Group) -> None:
        super().__init__("transfer", label)
        self.group = group

    def __exit__(self, failure: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(failure, error, trace)
        if isinstance(error, RuntimeError):
            group = self.group
            raise RuntimeError(
                f"rank {group.global_rank(group.rank)}: the {self.label} with the {group.size - 1} others of "
                f"its group failed; one of them is gone, or does something else: {error}"
            ) from error


def gemms(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """`gemm` of x with each weight `[N_i, K]`; `biases` holds one `[N_i]` per weight, or nothing."""
    return [gemm(x, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are summed over ranks."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_rank_order(
    partials: Sequence[Tensor], bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`((p_0 + p_1) + ...) + bias` in float32 or wider, converted once to the partials' dtype.

    Args:
        partials: One `[m, N]` per rank, in rank order. They are not written to.
        bias: `[N]`, added after the sum.
        out: `[m, N]` to store into.
    """
    first, *others = partials
    out = torch.empty_like(first) if out is None else out
    dtype = accumulation_dtype(first.dtype)
    with span("compute", "sum"):
        total = out if out.dtype == dtype else torch.empty_like(first, dtype=dtype)
        if others:
            torch.add(first.to(dtype), others[0], out=total)
        else:
            total.copy_(first)
        for partial in others[1:]:
            total += partial
        if bias is not None:
            total += bias
        return out if total is out else out.copy_(total)


def all_gather_rows(x: Any, shards: Shards, group: Group) -> Any:
    """Every rank's rows one below the other.

    Args:
        x: This rank's rows `[shards.size(rank), K]`, contiguous: a Tensor, or `Scaled`, which costs two
            collectives.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.

    Returns:
        `[shards.total, K]`; x itself in a group of one.
    """
    if group.size == 1:
        return x
    if isinstance(x, Scaled):
        return x.gathered(lambda rows: all_gather_rows(rows, shards, group))
    # Only the last non-empty shard can be short, so the rows of shards padded to full chunks are the rows of
    # x followed by padding.
    padded = x
    if x.shape[0] != shards.chunk:
        padded = x.new_zeros(shards.chunk, x.shape[1])
        padded[: x.shape[0]] = x
    gathered = x.new_empty(group.size * shards.chunk, x.shape[1])
    if gathered.numel():
        with collective("all-gather", group):
            group.all_gather(gathered, padded)
    return gathered if gathered.shape[0] == shards.total else gathered[: shards.total]


def reduce_scatter_rows(x: Tensor, bias: Tensor | None, shards: Shards, group: Group) -> Tensor:
    """This rank's rows of the sum of every rank's x, plus bias.

    An all-to-all and a local sum move the bytes of a reduce-scatter, (P - 1) / P of x per rank, and leave the
    order and the precision of the sum to us; torch.distributed's reduce_scatter fixes neither.

    Args:
        x: A partial result `[shards.total, N]`, contiguous.
        bias: `[N]` or None.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.

    Returns:
        `[shards.size(rank), N]`.
    """
    if group.size == 1:
        return x if bias is None else sum_in_rank_order([x], bias)
    rows = shards.size(group.rank)
    received = x.new_empty(group.size * rows, x.shape[1])
    with collective("all-to-all", group):
        dist.all_to_all_single(received, x, [rows] * group.size, shards.sizes, group=group.process_group)
    return sum_in_rank_order(received.unflatten(0, (group.size, rows)).unbind(), bias)
