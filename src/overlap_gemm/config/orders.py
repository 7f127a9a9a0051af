"""In which order a persistent kernel computes its tiles.

An order maps a position ``t`` in the kernel's work list to a :class:`TilePlace`: the shard (owner rank) and
the tile in it. Positions are dealt to clusters round robin: cluster ``c`` of ``C`` takes ``t = c, c + C, c +
2C, ...``, a wave after the other.

Plain integer arithmetic, on non-negative values with ``+ - * // % <`` only, so that the same function runs on
Python integers (tests, performance model) and on a kernel's ``Int32``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Int = Any  # int on the host, Int32 in a kernel


class TileGrid(NamedTuple):
    """Cluster tiles of one shard: ``rows`` x ``cols``."""

    rows: Int
    cols: Int


class TilePlace(NamedTuple):
    """Where position ``t`` lies: owner ``shard``, tile ``index`` in the shard, coordinates ``m``, ``n``.

    ``index`` depends only on the position within the shard, never on the rank, so sender and owner agree on
    it.
    """

    shard: Int
    index: Int
    m: Int
    n: Int


def grouped_raster(index: Int, grid: TileGrid, group: Int) -> tuple[Int, Int]:
    """Walks bands of ``group`` tile rows, column by column, so that a wave shares A and B in the L2 cache.

    Args:
        index: position in the shard, ``0 <= index < grid.rows * grid.cols``.
        grid: the shard's tiles.
        group: tile rows per band; the last band has the rest.

    Returns:
        The tile's ``(m, n)``.
    """
    band = index // (group * grid.cols)
    num_bands = (grid.rows + group - 1) // group
    is_last = (band + 1) // num_bands
    height = group - is_last * (num_bands * group - grid.rows)
    inside = index - band * group * grid.cols
    return band * group + inside % height, inside // height


class WorkList(NamedTuple):
    """What a position is counted in.

    Attributes:
        grid: cluster tiles of one shard.
        rank: this rank.
        owners: ranks that own rows.
    """

    grid: TileGrid
    rank: Int
    owners: Int


@dataclass(frozen=True)
class _Order:
    """What orders have in common: the tiles of a shard, and that all of them are computed.

    Attributes:
        group: tile rows per band of the raster.
    """

    group: int = 8

    def num_tiles(self, work: WorkList) -> Int:
        """Positions in the work list: all tiles of all shards that have rows."""
        return work.owners * work.grid.rows * work.grid.cols

    def tile(self, index: Int, work: WorkList) -> tuple[Int, Int]:
        """``(m, n)`` of the tile with this index in its shard."""
        return grouped_raster(index, work.grid, self.group)


@dataclass(frozen=True)
class LinearOrder(_Order):
    """One shard, walked once: a plain GEMM."""

    def num_tiles(self, work: WorkList) -> Int:
        """Positions in the work list."""
        return work.grid.rows * work.grid.cols

    def place(self, t: Int, work: WorkList) -> TilePlace:
        """The tile at position ``t``."""
        m, n = self.tile(t, work)
        return TilePlace(0, t, m, n)


@dataclass(frozen=True)
class OwnShardFirst(_Order):
    """All-gather GEMM: whole shards one after the other, the own one first, then ``rank + 1, rank + 2, ...``.

    That is the order in which shards arrive where every rank sends to ``rank - 1, rank - 2, ...``, so that
    all ranks receive from different ones. Ranks after the last owner own nothing to begin with.
    """

    def place(self, t: Int, work: WorkList) -> TilePlace:
        """The tile at position ``t``."""
        tiles = work.grid.rows * work.grid.cols
        index = t % tiles
        m, n = self.tile(index, work)
        return TilePlace((work.rank + t // tiles) % work.owners, index, m, n)


@dataclass(frozen=True)
class DealtShards(_Order):
    """GEMM reduce-scatter: tiles are dealt to their owners in turn, rank ``r`` beginning with ``r + 1``.

    In each turn every rank computes one tile for every owner, itself last, so the links are asked for the
    same from the first wave to the last, and no two ranks send to one owner at the same time. (With whole
    shards one after the other the link idled during the own one, and limited the others. Turning the deal
    from turn to turn, and own tiles a wave late, were tried and are slower:
    docs/design/exchange.md.) Ranks after the last owner (``rank >= owners``) own nothing and
    send all their tiles.

    Attributes:
        group: tile rows per band of the raster, in all shards together: what a wave shares in the L2 cache.
    """

    def place(self, t: Int, work: WorkList) -> TilePlace:
        """The tile at position ``t``."""
        index = t // work.owners
        m, n = self.tile(index, work)
        return TilePlace((work.rank + 1 + t) % work.owners, index, m, n)

    def tile(self, index: Int, work: WorkList) -> tuple[Int, Int]:
        """``(m, n)`` of the tile with this index in its shard."""
        band = self.group // work.owners
        return grouped_raster(index, work.grid, band + (band < 1) * 1)
