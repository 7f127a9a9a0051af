"""The sharding rule of the package: contiguous blocks as `torch.chunk` and DTensor's `Shard` cut them.

Functions also take a kernel's ``Int32``, of non-negative values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Int = TypeVar("Int")  # int on the host, Int32 in a kernel


def ceil_div(a: Int, b: Int) -> Int:
    """Returns ``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + b - 1) // b  # type: ignore[operator]


def shard_rows(rows: Int, world: Int) -> Int:
    """Returns the rows of a full shard by the rule of ``torch.chunk``; at least 1 if ``rows >= 1``."""
    return ceil_div(rows, world)


def num_owners(rows: Int, shard: Int) -> Int:
    """Returns the number of ranks that own a row, with ``shard`` rows in a full shard; ``rows >= 1``."""
    return ceil_div(rows, shard)


@dataclass(frozen=True)
class Shards:
    """Division of `total` rows (or columns) over the ranks.

    Rank r owns `[r * chunk, (r + 1) * chunk)`, clipped to `total`. With `chunk = ceil(total / parts)` this is
    the rule of `torch.chunk` and of DTensor's `Shard`: every shard is full but the last non-empty one, and
    ranks after it own nothing.

    Attributes:
        total: Rows (or columns) over all ranks.
        parts: Number of ranks of the group.
        chunk: Rows of a full shard.
    """

    total: int
    parts: int
    chunk: int

    @classmethod
    def even(cls, total: int, parts: int, unit: int = 1) -> "Shards":
        """Returns the shards of `total` rows over `parts` ranks, cut only at multiples of `unit` rows."""
        return cls(total, parts, ceil_div(total // unit, parts) * unit)

    @classmethod
    def owned_by(cls, parts: int, rank: int) -> Callable[[int], int]:
        """Returns a function from an extent to the part of it that `rank` of `parts` ranks owns."""
        return lambda total: cls.even(total, parts).size(rank)

    def range(self, rank: int) -> tuple[int, int]:
        """Returns the first row of `rank`'s shard and one past its last."""
        return min(rank * self.chunk, self.total), min((rank + 1) * self.chunk, self.total)

    def size(self, rank: int) -> int:
        """Returns the number of rows that `rank` owns."""
        start, stop = self.range(rank)
        return stop - start

    @property
    def sizes(self) -> list[int]:
        """Returns the number of rows of every rank, in rank order."""
        return [self.size(rank) for rank in range(self.parts)]
