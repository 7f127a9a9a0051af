"""The one sharding rule of the package: contiguous blocks as `torch.chunk` and DTensor's `Shard` cut them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shards:
    """How `total` rows (or columns) are divided over the ranks.

    Rank r owns `[r * chunk, (r + 1) * chunk)`, clipped to `total`. With `chunk = ceil(total / parts)` this is
    the rule of `torch.chunk` and of DTensor's `Shard`: every shard is full but the last non-empty one, and
    ranks after it own nothing.

    Attributes:
        total: Rows (or columns) over all ranks.
        parts: Ranks of the group.
        chunk: Rows of a full shard.
    """

    total: int
    parts: int
    chunk: int

    @classmethod
    def even(cls, total: int, parts: int, unit: int = 1) -> "Shards":
        """The shards of `total` rows over `parts` ranks, cut only at multiples of `unit` rows."""
        return cls(total, parts, -(-(total // unit) // parts) * unit)

    @classmethod
    def owned_by(cls, parts: int, rank: int) -> Callable[[int], int]:
        """An extent -> what `rank` of so many ranks owns of it."""
        return lambda total: cls.even(total, parts).size(rank)

    def range(self, rank: int) -> tuple[int, int]:
        """First row of `rank`'s shard and one past its last."""
        return min(rank * self.chunk, self.total), min((rank + 1) * self.chunk, self.total)

    def size(self, rank: int) -> int:
        """Rows that `rank` owns."""
        start, stop = self.range(rank)
        return stop - start

    @property
    def sizes(self) -> list[int]:
        """Rows of every rank, in rank order."""
        return [self.size(rank) for rank in range(self.parts)]
