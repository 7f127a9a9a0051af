"""Which rank owns which rows: contiguous blocks, as ``torch.chunk`` and DTensor's ``Shard`` cut them.

Rank ``r`` owns rows ``[r * shard, (r + 1) * shard)``, clipped to ``rows``, where ``shard * world >= rows``.
By the rule of ``torch.chunk`` ``shard`` is ``shard_rows(rows, world)``; it is larger where rows belong
together in groups that are not cut (batch dimensions after the sharded one). The last shards may be shorter,
or empty when ``rows`` is small; so the owners of any row are ranks ``0 .. num_owners - 1``.
"""

from __future__ import annotations

from typing import TypeVar

Int = TypeVar("Int")  # int on the host, Int32 in a kernel


def ceil_div(a: Int, b: Int) -> Int:
    """``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + b - 1) // b  # type: ignore[operator]


def shard_rows(rows: Int, world: Int) -> Int:
    """Rows of a full shard by the rule of ``torch.chunk``; at least 1 when ``rows >= 1``."""
    return ceil_div(rows, world)


def num_owners(rows: Int, shard: Int) -> Int:
    """Ranks that own at least one row, with ``shard`` rows in a full shard; ``rows >= 1``."""
    return ceil_div(rows, shard)
