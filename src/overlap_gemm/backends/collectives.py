"""Functions that the portable backends share: products, ordered sums, and collectives for uneven shards."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.group import Group
from ..spec.sharding import Shards
from ..tuning.spans import span
from .op_call import Joined
from .scales.scaling import Scaled


def gemm(x: Any, weight: Any, addend: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns `x @ weight.T + addend`, by torch.

    Args:
        x: `[m, K]`, a Tensor, `Scaled` or `Joined`.
        weight: `[N, K]`, of the same type as x.
        addend: `[N]`, or None.
        out: `[m, N]` to store the result in, or None.
    """
    with span("compute", "GEMM"):
        if isinstance(x, (Scaled, Joined)):
            return x.times(weight, addend, out)
        if addend is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(addend, x, weight.t(), out=out)


class collective(span):  # noqa: N801
    """Context manager around a collective of torch.distributed: a profiler span with checks.

    If the group verifies calls, ranks compare label and dtype before the collective starts.

    Args:
        label: Name of the collective.
        group: Ranks that take part.
        data: Tensor to send, for its dtype.

    Raises:
        DisagreementError: On every rank: a peer is in another call, or in another transfer of the call.
        RuntimeError: The collective failed. The message names this rank and quotes the transport's error.
    """

    __slots__ = ("group", "kind_of_data")

    def __init__(self, label: str, group: Group, data: Tensor) -> None:
        super().__init__("transfer", label)
        self.group, self.kind_of_data = group, data.dtype

    def __enter__(self) -> None:
        # Callers allocate before this point: from here on no rank may raise alone, because peers wait.
        if self.group.enter is not None:
            self.group.enter(f"{self.label} of {self.kind_of_data}")
        super().__enter__()

    def __exit__(self, failure: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(failure, error, trace)
        if isinstance(error, RuntimeError):
            group = self.group
            raise RuntimeError(
                f"rank {group.global_rank(group.rank)}: the {self.label} with the {group.size - 1} others of "
                f"its group failed; one of them has ended, or runs another call: {error}"
            ) from error


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which partial results of `dtype` are summed over ranks."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_rank_order(
    partials: Sequence[Tensor],
    addend: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns `((p_0 + p_1) + ...) + addend`, summed in float32 or wider and converted once.

    Args:
        partials: One `[m, N]` per rank, in rank order. They are not written to.
        addend: `[N]`, added after the sum.
        out: `[m, N]` to store into.
        dtype: Dtype of the result; the default is the partials'.
    """
    first, *others = partials
    out = torch.empty_like(first, dtype=dtype) if out is None else out
    wide = accumulation_dtype(first.dtype)
    with span("compute", "sum"):
        total = out if out.dtype == wide else torch.empty_like(first, dtype=wide)
        if others:
            torch.add(first.to(wide), others[0], out=total)
        else:
            total.copy_(first)
        for partial in others[1:]:
            total += partial
        if addend is not None:
            total += addend
        return out if total is out else out.copy_(total)


def sum_in_tree(leaves: Sequence[Tensor]) -> Tensor:
    """Returns the sum of 1, 2, 4, .. tensors by a binary tree: `(l_0 + l_1) + (l_2 + l_3)`."""
    with span("compute", "sum"):
        while len(leaves) > 1:
            leaves = [one + other for one, other in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def all_gather_rows(x: Any, shards: Shards, group: Group) -> Any:
    """Gathers every rank's rows, concatenated in rank order.

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
        with collective("all-gather", group, padded):
            group.all_gather(gathered, padded)
    return gathered if gathered.shape[0] == shards.total else gathered[: shards.total]


def reduce_scatter_rows(x: Tensor, shards: Shards, group: Group) -> Tensor:
    """Returns this rank's rows of the sum of all ranks' x, in rank order; see `scattered_rows`."""
    return x if group.size == 1 else sum_in_rank_order(scattered_rows(x, shards, group))


def scattered_rows(x: Tensor, shards: Shards, group: Group) -> Sequence[Tensor]:
    """Returns this rank's rows of every rank's x, in rank order.

    An all-to-all sends as many bytes as a reduce-scatter: (P - 1) / P of x per rank. It leaves the order and
    the precision of the sum to this library; torch.distributed's reduce_scatter fixes neither.

    Args:
        x: A partial result `[shards.total, N]`, contiguous.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.

    Returns:
        One `[shards.size(rank), N]` per rank.
    """
    if group.size == 1:
        return (x,)
    rows = shards.size(group.rank)
    received = x.new_empty(group.size * rows, x.shape[1])
    with collective("all-to-all", group, x):
        dist.all_to_all_single(received, x, [rows] * group.size, shards.sizes, group=group.process_group)
    return received.unflatten(0, (group.size, rows)).unbind()


def rows_to_columns(parts: Sequence[Tensor], shards: Shards, group: Group) -> list[Tensor]:
    """Returns this rank's columns of every rank's rows, for several matrices in one all-to-all.

    Args:
        parts: This rank's rows `[shards.size(rank), N_i]` of each matrix.
        shards: Division of the rows; columns are divided as `torch.chunk` does.
        group: Ranks that take part, each of which must call.

    Returns:
        `[shards.total, local columns of N_i]` of each matrix; `parts` in a group of one.
    """
    if group.size == 1:
        return list(parts)
    columns = [Shards.even(part.shape[1], group.size) for part in parts]
    widths = [sum(of.size(rank) for of in columns) for rank in range(group.size)]
    rows, width = shards.size(group.rank), widths[group.rank]
    sent = [
        part[:, slice(*of.range(to))].reshape(-1)
        for to in range(group.size)
        for part, of in zip(parts, columns, strict=True)
    ]
    of_source = [n * width for n in shards.sizes]
    received = _exchanged(torch.cat(sent), [rows * n for n in widths], of_source, group)
    if len(parts) == 1:
        return [received.view(shards.total, width)]
    outs = []
    first = 0
    for of in columns:
        end = first + of.size(group.rank)
        blocks = zip(received.split(of_source), shards.sizes, strict=True)
        of_each = [block[n * first : n * end].view(n, end - first) for block, n in blocks]
        outs.append(torch.cat(of_each))
        first = end
    return outs


def columns_to_rows(part: Tensor, columns: int, shards: Shards, group: Group) -> Tensor:
    """Returns this rank's rows of every rank's columns.

    Args:
        part: This rank's columns `[shards.total, k]` of a matrix, contiguous, as `torch.chunk` cuts them.
        columns: Number of columns over all ranks.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.

    Returns:
        `[shards.size(rank), columns]`; `part` in a group of one.
    """
    return part if group.size == 1 else parts_to_rows([part], [columns], shards, group)[0]


def parts_to_rows(
    parts: Sequence[Tensor], columns: Sequence[int], shards: Shards, group: Group
) -> list[Tensor]:
    """Returns `columns_to_rows` of several matrices, in one all-to-all; more than one rank."""
    rows, width = shards.size(group.rank), sum(part.shape[1] for part in parts)
    widths = [Shards.even(number, group.size).sizes for number in columns]
    of_source = [rows * sum(of_rank) for of_rank in zip(*widths, strict=True)]
    sent = parts[0].view(-1)
    if len(parts) > 1:
        by_rank = zip(*[part.split(shards.sizes) for part in parts], strict=True)
        sent = torch.cat([block.reshape(-1) for of_rank in by_rank for block in of_rank])
    received = _exchanged(sent, [n * width for n in shards.sizes], of_source, group)
    blocks: list[list[Tensor]] = [[] for _ in parts]
    for of_rank, sizes in zip(received.split(of_source), zip(*widths, strict=True), strict=True):
        each = of_rank.split([rows * n for n in sizes])
        for matrix, block, n in zip(blocks, each, sizes, strict=True):
            matrix.append(block.view(rows, n))
    return [torch.cat(matrix, 1) for matrix in blocks]


def _exchanged(sent: Tensor, to_each: list[int], of_each: list[int], group: Group) -> Tensor:
    """Returns the elements that every rank sends to this one, in rank order.

    Args:
        sent: Elements to send; rank r gets `to_each[r]` of them.
        to_each: Number of elements for each rank.
        of_each: Number of elements from each rank.
        group: Ranks that take part, each of which must call.
    """
    received = sent.new_empty(sum(of_each))
    with collective("all-to-all", group, sent):
        dist.all_to_all_single(received, sent, of_each, to_each, group=group.process_group)
    return received
