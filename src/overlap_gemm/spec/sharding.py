"""Sharding rule of the package: contiguous ranges, cut as by `torch.chunk` and DTensor's `Shard`.

The functions also accept non-negative ``Int32`` values of a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Int = TypeVar("Int")  # int on the host, Int32 in a kernel


def ceil_div(a: Int, b: Int) -> Int:
    """Returns ``a / b`` rounded up; ``a >= 0``, ``b > 0``."""
    return (a + b - 1) // b  # type: ignore[operator]


def shard_rows(rows: Int, world: Int) -> Int:
    """Returns the number of rows of a full shard; at least 1 if ``rows >= 1``."""
    return ceil_div(rows, world)


def num_owners(rows: Int, shard: Int) -> Int:
    """Returns the number of ranks whose shard is not empty.

    Args:
        rows: Number of rows, at least 1.
        shard: Rows of a full shard, at least 1.
    """
    return ceil_div(rows, shard)


@dataclass(frozen=True)
class Shards:
    """Division of `total` rows (or columns) over ranks.

    Rank r has the range `[r * chunk, (r + 1) * chunk)`, clipped to `total`. The first shards are full, the
    next one has the rest, and those after it are empty: 9 rows on 4 ranks are 3, 3, 3, 0.

    Attributes:
        total: Rows (or columns) over all ranks.
        parts: Number of ranks of the group.
        chunk: Rows (or columns) of a full shard.
    """

    total: int
    parts: int
    chunk: int

    @classmethod
    def even(cls, total: int, parts: int, unit: int = 1) -> "Shards":
        """Returns the shards of `total` rows over `parts` ranks.

        Args:
            total: Number of rows, a multiple of `unit`; this is not checked.
            parts: Number of ranks.
            unit: Number of rows that stay together, such as those of a head; 3 units on 2 ranks are 2 and 1.
        """
        return cls(total, parts, ceil_div(total // unit, parts) * unit)

    @classmethod
    def owned_by(cls, parts: int, rank: int) -> Callable[[int], int]:
        """Returns a function from an extent to the size of the shard of `rank` of `parts` ranks."""
        return lambda total: cls.even(total, parts).size(rank)

    def range(self, rank: int) -> tuple[int, int]:
        """Returns the first row of the shard of `rank` and the row after its last."""
        return min(rank * self.chunk, self.total), min((rank + 1) * self.chunk, self.total)

    def size(self, rank: int) -> int:
        """Returns the number of rows of the shard of `rank`."""
        start, stop = self.range(rank)
        return stop - start

    @property
    def sizes(self) -> list[int]:
        """Returns the sizes of all shards, in rank order."""
        return [self.size(rank) for rank in range(self.parts)]
