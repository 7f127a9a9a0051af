"""Which rank owns which rows: the rule of ``torch.chunk`` and DTensor's ``Shard``.

Every shard has ``ceil(rows / world)`` rows; the last ones may be shorter, or empty when ``rows`` is small. So
the owners of any row are ranks ``0 .. num_owners - 1``.
"""

from __future__ import annotations

from typing import TypeVar

Int = TypeVar("Int")  # int on the host, Int32 in a kernel


def ceil_div(a: Int, b: Int) -> Int:
    """``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + b - 1) // b  # type: ignore[operator]


def shard_rows(rows: Int, world: Int) -> Int:
    """Rows of a full shard; at least 1 when ``rows >= 1``."""
    return ceil_div(rows, world)


def num_owners(rows: Int, world: Int) -> Int:
    """Ranks that own at least one row; ``rows >= 1``."""
    return ceil_div(rows, shard_rows(rows, world))


def owned_rows(rows: int, world: int, rank: int) -> int:
    """Rows of ``rank``'s shard (host only); 0 for a rank behind the last owner."""
    size = shard_rows(rows, world)
    return max(0, min(size, rows - rank * size))
