"""In which order a persistent kernel computes its tiles.

An order maps a position ``t`` in the kernel's work list to a :class:`Place`: the shard (owner rank) and the
tile in it. Positions are dealt to clusters round robin: cluster ``c`` of ``C`` takes ``t = c, c + C, c + 2C,
...``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Int = Any  # int on the host, Int32 in a kernel


class TileGrid(NamedTuple):
    """Cluster tiles of one shard: ``rows`` x ``cols``."""

    rows: Int
    cols: Int


class Place(NamedTuple):
    """Where position ``t`` lies: owner ``shard``, tile ``index`` in the shard, coordinates ``m``, ``n``.

    ``index`` depends only on the position within the shard, never on the rank, so sender and owner agree on
    it.
    """

    shard: Int
    index: Int
    m: Int
    n: Int


def grouped_raster(index: Int, grid: TileGrid, group: int) -> tuple[Int, Int]:
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


@dataclass(frozen=True)
class LinearOrder:
    """Every tile is this rank's own: a plain GEMM.

    Attributes:
        group: tile rows per band of the raster.
    """

    group: int = 8

    def num_tiles(self, grid: TileGrid, rank: Int, owners: Int) -> Int:
        """Positions in the work list."""
        return grid.rows * grid.cols

    def num_foreign(self, grid: TileGrid, rank: Int, owners: Int) -> Int:
        """Leading positions whose tiles another rank owns: none."""
        return 0

    def place(self, t: Int, grid: TileGrid, rank: Int, owners: Int) -> Place:
        """The tile at position ``t``."""
        m, n = grouped_raster(t, grid, self.group)
        return Place(0, t, m, n)


@dataclass(frozen=True)
class RotatedShards:
    """GEMM reduce-scatter: the shard of ``rank + 1`` first, the own shard last.

    At step ``j`` rank ``r`` works on shard ``(r + 1 + j) % owners``, so while all ranks own rows each owner
    receives from one rank per step, and a rank waits for its peers only after it has sent everything. Ranks
    behind the last owner (``rank >= owners``) own nothing and send all their tiles.

    Attributes:
        group: tile rows per band of the raster within a shard.
    """

    group: int = 8

    def num_tiles(self, grid: TileGrid, rank: Int, owners: Int) -> Int:
        """Positions in the work list: all tiles of all shards that have rows."""
        return owners * grid.rows * grid.cols

    def num_foreign(self, grid: TileGrid, rank: Int, owners: Int) -> Int:
        """Leading positions whose tiles another rank owns."""
        owns = (rank < owners) * 1
        return (owners - owns) * grid.rows * grid.cols

    def place(self, t: Int, grid: TileGrid, rank: Int, owners: Int) -> Place:
        """The tile at position ``t``; own tiles come last."""
        per_shard = grid.rows * grid.cols
        step = t // per_shard
        index = t - step * per_shard
        m, n = grouped_raster(index, grid, self.group)
        return Place((rank + 1 + step) % owners, index, m, n)
