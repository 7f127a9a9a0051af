"""Orders in which a persistent kernel computes its tiles.

An order maps a position ``t`` in the kernel's work list to a :class:`TilePlace`: the shard (owner rank) and
the tile in it. Positions are dealt to clusters round robin: cluster ``c`` of ``C`` takes ``t = c, c + C, c +
2C, ...``, a wave after the other.

Orders are plain integer arithmetic, on non-negative values with ``+ - * // % <`` only. So the same function
runs on Python integers (tests, performance model) and on a kernel's ``Int32``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from overlap_gemm.spec.sharding import ceil_div, num_owners

if TYPE_CHECKING:
    from overlap_gemm.config.gemm_config import GemmConfig

Int = Any  # int on the host, Int32 in a kernel


class TileGrid(NamedTuple):
    """Cluster tiles of one shard: ``rows`` x ``cols``."""

    rows: Int
    cols: Int


class TilePlace(NamedTuple):
    """Tile at a position: owner ``shard``, tile ``index`` in the shard, coordinates ``m``, ``n``.

    ``index`` depends only on the position within the shard, never on the rank, so sender and owner compute
    the same one.
    """

    shard: Int
    index: Int
    m: Int
    n: Int


def grouped_raster(index: Int, grid: TileGrid, group: Int) -> tuple[Int, Int]:
    """Numbers tiles in bands of ``group`` rows, column by column: a wave shares A and B in the L2 cache.

    Args:
        index: Position in the shard, ``0 <= index < grid.rows * grid.cols``.
        grid: Tiles of the shard.
        group: Tile rows per band; the last band has the rest.

    Returns:
        The tile's ``(m, n)``.
    """
    band = index // (group * grid.cols)
    num_bands = (grid.rows + group - 1) // group
    is_last = (band + 1) // num_bands
    height = group - is_last * (num_bands * group - grid.rows)
    inside = index - band * group * grid.cols
    return band * group + inside % height, inside // height


SCALES_SENT = 4
"""Scales of rows that are sent at once: 16 bytes. A shard's are padded to a multiple in the gather buffer."""


def joins_shards(config: GemmConfig, rows: int, shard: int) -> bool:
    """Returns whether an all-gather GEMM's tiles have rows of several shards (`gather.few_rows`).

    They do if there are at most half as many tiles then: the weight is read less often, but no tile begins
    before all shards have arrived. Scales of rows must be one vector, without padding: `shard` is a multiple
    of `SCALES_SENT`. Rows with scales of blocks are not joined: these lie between the shards in the buffer.

    Args:
        config: Configuration of the kernel.
        rows: Rows of all shards together.
        shard: Rows of a full shard.
    """
    if config.blocks is not None or (config.visits_rows and shard % SCALES_SENT):
        return False
    tile = config.cluster_tile[0]
    apart = num_owners(rows, shard) * ceil_div(shard, tile)
    return 2 * ceil_div(rows, tile) <= apart


class WorkList(NamedTuple):
    """Extents that define the positions of a work list.

    Attributes:
        grid: Cluster tiles of one shard.
        rank: This rank.
        owners: Number of ranks with rows.
    """

    grid: TileGrid
    rank: Int
    owners: Int


@dataclass(frozen=True)
class _Order:
    """Common part of the orders: the tiles of a shard, all of which are computed.

    Attributes:
        group: Tile rows per band of the raster.
    """

    group: int = 8

    def num_tiles(self, work: WorkList) -> Int:
        """Returns the number of positions in the work list: all tiles of all shards that have rows."""
        return work.owners * work.grid.rows * work.grid.cols

    def tile(self, index: Int, work: WorkList) -> tuple[Int, Int]:
        """Returns ``(m, n)`` of the tile with this index in its shard."""
        return grouped_raster(index, work.grid, self.group)


@dataclass(frozen=True)
class LinearOrder(_Order):
    """Order of a plain GEMM: one shard, each tile once."""

    def num_tiles(self, work: WorkList) -> Int:
        """Returns the number of positions in the work list."""
        return work.grid.rows * work.grid.cols

    def place(self, t: Int, work: WorkList) -> TilePlace:
        """Returns the tile at position ``t``."""
        m, n = self.tile(t, work)
        return TilePlace(0, t, m, n)


@dataclass(frozen=True)
class LocalShardFirst(_Order):
    """Order of an all-gather GEMM: the local shard first, then those of ``rank + 1, rank + 2, ...``.

    Shards arrive in that order if every rank sends to ``rank - 1, rank - 2, ...``. Then all ranks receive
    from different ranks at any time. A rank after the last owner has no local shard. It begins with shard
    ``rank % owners``.
    """

    def place(self, t: Int, work: WorkList) -> TilePlace:
        """Returns the tile at position ``t``."""
        tiles = work.grid.rows * work.grid.cols
        index = t % tiles
        m, n = self.tile(index, work)
        return TilePlace((work.rank + t // tiles) % work.owners, index, m, n)


@dataclass(frozen=True)
class InterleavedShards(_Order):
    """Order of a GEMM reduce-scatter: tiles of all owners alternate; rank ``r`` begins with ``r + 1``.

    In each turn every rank computes one tile for every owner, the local one last. So the load of the links is
    even from the first wave to the last. At a position the owners compute tiles for different owners. If each
    shard were computed without a break, the links would be idle during the local shard. (Other orders are
    slower: docs/design/not-adopted.md.)

    Ranks after the last owner (``rank >= owners``) own nothing and send all their tiles. They begin with
    owner ``(rank + 1) % owners``.

    Attributes:
        group: Tile rows per band of the raster, in all shards together: a wave shares them in the L2 cache. A
            band has ``group // owners`` rows of each shard, at least 1.
    """

    def place(self, t: Int, work: WorkList) -> TilePlace:
        """Returns the tile at position ``t``."""
        index = t // work.owners
        m, n = self.tile(index, work)
        return TilePlace((work.rank + 1 + t) % work.owners, index, m, n)

    def tile(self, index: Int, work: WorkList) -> tuple[Int, Int]:
        """Returns ``(m, n)`` of the tile with this index in its shard."""
        band = self.group // work.owners
        return grouped_raster(index, work.grid, band + (band < 1) * 1)
