"""Division of attention heads over P ranks: the argument `heads=` of the ops of `all_to_all`.

The ops cut columns as `torch.chunk` does. If that would cut a head, a changed copy of the weight is used:

- If there are at least P heads, and P does not divide their number, zero columns are appended until every
  rank has ceil(heads / P) heads. The result's columns for them are removed. So 4 ranks get 2, 2, 2, 0 of 6
  heads.
- If there are fewer heads than ranks, rank r gets head `r * heads // P`: the columns of each head are
  repeated. The number of heads must divide P. The gradient of the weight is summed over the replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec.sharding import Shards

Heads = int | Sequence[int] | None


@dataclass(frozen=True)
class HeadShards:
    """Division of a matrix's columns, which are heads of equal size, over the ranks.

    Attributes:
        op: Name of the op, for messages.
        columns: Columns over all ranks.
        heads: Heads over all ranks.
        world: Number of ranks.
    """

    op: str
    columns: int
    heads: int
    world: int

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: `heads` is not a positive integer, or does not divide `columns`. Or there are fewer
                heads than ranks, and their number does not divide the number of ranks.
        """
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"{self.op}: heads must be a number, 1 or more, got {self.heads!r}")
        if self.columns % self.heads:
            raise ValueError(
                f"{self.op}: heads={self.heads} must divide the {self.columns} columns: heads have equal size"
            )
        if self.world % self.heads and self.heads < self.world:
            raise ValueError(
                f"{self.op}: heads={self.heads} are fewer than the {self.world} ranks, and must divide their "
                f"number, because each head is replicated on {self.world} / heads ranks"
            )

    @property
    def replicas(self) -> int:
        """Returns the number of ranks that get the same head; 1 if there are at least as many heads."""
        return max(self.world // self.heads, 1)

    @property
    def shards(self) -> Shards:
        """Returns the division over the ranks of the replicated columns, at multiples of a head's columns."""
        return Shards.even(self.columns * self.replicas, self.world, unit=max(self.columns // self.heads, 1))

    @property
    def padding(self) -> int:
        """Returns the number of zero columns to append so that `torch.chunk` cuts between heads."""
        return self.shards.chunk * self.world - self.shards.total

    @property
    def is_chunked(self) -> bool:
        """Returns whether `torch.chunk` cuts the columns between heads without replication or padding."""
        return not self.padding and self.replicas == 1

    def expanded(self, matrix: Tensor, dim: int) -> Tensor:
        """Returns the matrix with heads replicated and zeros appended; unchanged if `is_chunked`.

        Args:
            matrix: Matrix with `columns` elements along `dim`.
            dim: Dimension of the heads, 0 or 1.
        """
        if self.is_chunked:
            return matrix
        # torch's operations do not support all types of 8 bits.
        if matrix.is_floating_point() and matrix.dtype.itemsize == 1:
            return self.expanded(matrix.view(torch.int8), dim).view(matrix.dtype)
        if self.replicas > 1:
            by_heads = matrix.unflatten(dim, (self.heads, -1))
            matrix = by_heads.repeat_interleave(self.replicas, dim).flatten(dim, dim + 1)
        return F.pad(matrix, (0, 0) * (matrix.ndim - 1 - dim) + (0, self.padding))


def heads_of_each(op: str, heads: Heads, weights: Sequence[Tensor]) -> list[int]:
    """Returns the number of heads of each weight.

    Args:
        op: Name of the op, for messages.
        heads: A number for all weights, or a list with one number for each weight.
        weights: Weights.

    Raises:
        ValueError: The list's length is not the number of weights.
    """
    numbers = list(heads) if isinstance(heads, (list, tuple)) else [heads] * len(weights)
    if len(numbers) != len(weights):
        raise ValueError(
            f"{op}: heads must be a number, or one for each of the {len(weights)} weights, got {numbers}"
        )
    return numbers  # type: ignore[return-value]


def attention_heads(heads: int, kv_heads: int, world: int) -> list[int]:
    """Returns the arguments `heads=` of q, k and v for attention: queries that share a key stay on one rank.

    Args:
        heads: Heads of queries.
        kv_heads: Heads of keys and values; it divides `heads`.
        world: Number of ranks.

    Returns:
        `[kv_heads, kv_heads, kv_heads]` if every rank gets a key's head: the queries of a key are one unit.
        Else `[heads, kv_heads, kv_heads]`.

    Raises:
        ValueError: `kv_heads` is less than `world` and does not divide it, or then `world` does not divide
            `heads`.
    """
    if kv_heads >= world:
        return [kv_heads] * 3
    if heads % world or world % kv_heads:
        raise ValueError(
            f"{kv_heads} key and value heads are fewer than the {world} ranks: they must divide the "
            f"number of ranks, which must divide the {heads} heads of queries"
        )
    return [heads, kv_heads, kv_heads]


def refuse(shards: HeadShards, options: Mapping[str, object], names: Sequence[str]) -> None:
    """Checks that no option is set that a replicated or padded weight does not support.

    Args:
        shards: Division of the heads.
        options: Values of the caller's options, by name.
        names: Names of the unsupported options.

    Raises:
        TypeError: The weight is replicated or padded, and one of these options is not None.
    """
    if shards.is_chunked:
        return
    if names := [name for name in names if options.get(name) is not None]:
        raise TypeError(
            f"{shards.op}: heads={shards.heads} on {shards.world} ranks are replicated or padded, which "
            f"{', '.join(names)} does not support; use a multiple of {shards.world} heads, or omit "
            f"{', '.join(names)}"
        )
