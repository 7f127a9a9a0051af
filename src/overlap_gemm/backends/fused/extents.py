"""Extents of fused calls whose result is sent: shape of the exchange, and place of a rank's result in it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...exchange.geometry import ExchangeShape
from ...runtime.group import Group
from ...spec import PATTERNS, OpSpec, patterns_of
from ...spec.sharding import Shards
from .launch_plan import Plan


class Sizes(NamedTuple):
    """Extents of a call.

    Attributes:
        shape: Shape of the exchange, the same on all ranks.
        first: First row of this rank's result in the full product.
        out: (rows, columns) of this rank's result.
    """

    shape: ExchangeShape
    first: int
    out: tuple[int, int]

    @property
    def shard(self) -> int:
        """Returns the rows of x in a full shard if tiles restart at each shard; 0: they do not."""
        shape = self.shape
        return shape.shard if shape.spec.cut == "rows" and shape.owners > 1 else 0

    def made_by(self, plan: Plan) -> tuple[int, slice]:
        """Returns (rows of the output tensor of a plan, at least 1; slice of them that is the result)."""
        rows, _ = self.out
        if (
            PATTERNS[plan.pattern].op != self.shape.spec.op
        ):  # the plan's op computes all rows, of which this op's result is a shard
            return self.shape.rows, slice(self.first, self.first + rows)
        # A rank that owns no row of the result passes one row, which the kernel does not write.
        return max(rows, 1), slice(0, rows)


def sizes(spec: OpSpec, x: Tensor, weight: Tensor, shards: Shards, group: Group) -> Sizes:
    """Returns the extents of a call.

    Args:
        spec: Definition of the op.
        x: Operand `[rows, K]`.
        weight: Local weight `[columns, K]`.
        shards: Division of the rows, or of the columns if the output is gathered.
        group: Ranks that take part.
    """
    rows, columns = x.shape[0], shards.total if spec.gathers_output else weight.shape[0]
    pattern = patterns_of(spec.name)[-1]  # the plan chooses one
    if spec.x == "m":  # x keeps its rows; columns of the product are sent to their owners
        local = Shards.even(columns, group.size)
        shape = ExchangeShape(shards.chunk, columns, group.size, local.chunk, pattern)
        return Sizes(shape, 0, (shards.total, local.size(group.rank)))
    first, end = shards.range(group.rank) if spec.out == "m" else (0, rows)
    shape = ExchangeShape(rows, columns, group.size, shards.chunk, pattern)
    return Sizes(shape, first, (end - first, columns))
