"""One cluster's share of the work list, and the place of a CTA's part of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import TileGrid, TilePlace, WorkList
from overlap_gemm.device.traced import Scalar
from overlap_gemm.spec.sharding import ceil_div, num_owners


class WeightColumns(NamedTuple):
    """Columns of one of several weights in a full shard, of which each begins with a cluster tile.

    Attributes:
        begin: First column in the shard, a multiple of a cluster tile's.
        columns: Number of columns; up to the next weight's first one, the tile's other columns are not sent.
        step: Rows of the weight from an owner's first one to the next owner's; 0 if all are this rank's.
    """

    begin: Scalar
    columns: Scalar
    step: Scalar

    @staticmethod
    def of(config: GemmConfig, widths: Any, world: Any = None) -> tuple[tuple[WeightColumns, ...], Any]:
        """Returns the columns of each weight, and their end in a shard.

        They are cut as by `torch.chunk`; without ``world`` each shard has all columns of the weights.
        """
        wide, begin, parts = config.cluster_tile[1], Int32(0), []
        for width in widths:
            columns = width if world is None else ceil_div(width, world)
            parts.append(WeightColumns(begin, columns, Int32(0) if world is None else columns))
            begin = begin + ceil_div(columns, wide) * wide
        return tuple(parts), begin


class TileShards(NamedTuple):
    """Division of a rank's product into shards, one per owner: along the rows, or along the columns.

    Attributes:
        rows: Rows of a full shard.
        cols: Columns of a full shard, possibly 0.
        row_step: Rows from one shard to the next; 0 if they are cut along the columns.
        col_step: Columns from one shard to the next; 0 if they are cut along the rows.
        weights: `WeightColumns` of each weight, if there are several; else None.
    """

    rows: Scalar
    cols: Scalar
    row_step: Scalar
    col_step: Scalar
    weights: Any = None

    def weight_at(self, column: Scalar) -> WeightColumns:
        """Returns the columns of the weight, one of several, that has this column of a shard."""
        at = self.weights[0]
        for weight in self.weights[1:]:
            pairs = zip(weight, at, strict=True)
            at = WeightColumns(*[cutlass.select_(column >= weight.begin, new, old) for new, old in pairs])
        return at


class Share(NamedTuple):
    """A rank's share of the product, and the extents that determine its tiles and slots.

    Attributes:
        rows: Rows of the rank's product.
        cols: Columns of the rank's product.
        rank: Number of this rank among the owners.
        owners: Number of ranks that own a shard.
        shards: Division into shards.
        block_cols: Columns for which each source has slots: those of a full shard.
    """

    rows: Scalar
    cols: Scalar
    rank: Scalar
    owners: Scalar
    shards: TileShards
    block_cols: Scalar

    @staticmethod
    def by_rows(rows: Scalar, rank: Scalar, shard: Any, cols: Scalar) -> Share:
        """Returns the full product, in shards of ``shard`` rows."""
        return Share(rows, cols, rank, num_owners(rows, shard), TileShards(shard, cols, shard, 0), cols)

    def of_weights(self, weights: tuple[WeightColumns, ...]) -> Share:
        """Returns the same share of the product with several weights."""
        return self._replace(shards=self.shards._replace(weights=weights))

    @staticmethod
    def by_columns(rows: Scalar, rank: Scalar, shard: Any, cols: Scalar) -> Share:
        """Returns the full product, in shards of ``shard`` columns."""
        return Share(rows, cols, rank, num_owners(cols, shard), TileShards(rows, shard, 0, shard), shard)

    @staticmethod
    def unsharded(rows: Scalar, cols: Scalar, block_cols: Scalar) -> Share:
        """Returns ``cols`` columns as one shard, with slots for ``block_cols`` columns."""
        return Share(rows, cols, 0, 1, TileShards(rows, cols, 0, 0), block_cols)

    @staticmethod
    def of_local_columns(rows: Scalar, rank: Scalar, shard: Any, out: cute.Tensor) -> Share:
        """Returns this rank's columns of ``out`` as one shard, none or up to ``shard``."""
        left = cute.size(out, mode=[1]) - rank * shard
        return Share.unsharded(rows, cutlass.max(cutlass.min(left, shard), 0), shard)


class Work(NamedTuple):
    """Work of one cluster: positions ``first, first + stride, ...`` of the order's work list.

    Attributes:
        first: First position.
        stride: Number of clusters in the grid.
        num_tiles: Number of this cluster's tiles; 0 if there are more clusters than tiles and none is left.
        all_tiles: Work list of all clusters.
        shards: Division into shards.
        slots: Slots of each source in a buffer: CTA tiles of a full shard's rows and of ``block_cols``
            columns.
        rows: Rows of the rank's product.
        cols: Columns of the rank's product.
    """

    first: Scalar
    stride: Scalar
    num_tiles: Scalar
    all_tiles: WorkList
    shards: TileShards
    slots: Scalar
    rows: Scalar
    cols: Scalar

    def place(self, order: Any, j: Scalar) -> TilePlace:
        """Returns the place of this cluster's ``j``-th tile."""
        return order.place(self.first + j * self.stride, self.all_tiles)

    def left(self, at: CtaTile) -> tuple[Any, Any]:
        """Returns (rows, columns) from a tile's first ones to its shard's end; 0 or less past the end."""
        shards = self.shards
        rows = cutlass.min(shards.rows, self.rows - at.owner * shards.row_step)
        if shards.weights is not None:
            weight = shards.weight_at(at.column)
            return rows - at.row, weight.begin + weight.columns - at.column
        columns = cutlass.min(shards.cols, self.cols - at.owner * shards.col_step)
        return rows - at.row, columns - at.column


def cta_number() -> Any:
    """Returns this CTA's number in the grid."""
    x, y, z = cute.arch.block_idx()
    width, height, _ = cute.arch.grid_dim()
    return (z * height + y) * width + x


def num_ctas() -> Any:
    """Returns the number of CTAs of the grid."""
    width, height, depth = cute.arch.grid_dim()
    return width * height * depth


def plan_work(config: GemmConfig, order: Any, share: Share) -> Work:
    """Returns this cluster's work, from run-time values and the launch's grid.

    Args:
        config: The kernel's configuration.
        order: Order of the op.
        share: This rank's share of the product.
    """
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    first, stride = block // config.cluster[0], blocks // config.cluster[0]
    all_tiles = WorkList(_grid(config, share.shards.rows, share.shards.cols), share.rank, share.owners)
    slots = all_tiles.grid.rows * ceil_div(share.block_cols, config.cluster_tile[1]) * config.cluster_size
    total = Int32(order.num_tiles(all_tiles))
    # Not negative even with more clusters than tiles: ``first < stride``.
    num_tiles = (total - first + stride - 1) // stride
    return Work(first, stride, num_tiles, all_tiles, share.shards, slots, share.rows, share.cols)


def _grid(config: GemmConfig, rows: Scalar, cols: Scalar) -> TileGrid:
    return TileGrid(ceil_div(rows, config.cluster_tile[0]), ceil_div(cols, config.cluster_tile[1]))


def shard_tiles(config: GemmConfig, work: WorkList) -> Any:
    """Returns the number of CTA tiles of one shard."""
    return work.grid.rows * work.grid.cols * config.cluster_size


class CtaTile(NamedTuple):
    """One CTA's part of a cluster tile.

    Attributes:
        index: Index in the shard, counted in CTA tiles; it determines slot and flag.
        row: First row in the shard.
        column: First column in the shard.
        owner: Rank that owns the shard.
    """

    index: Scalar
    row: Scalar
    column: Scalar
    owner: Scalar

    @staticmethod
    def at(config: GemmConfig, place: TilePlace) -> CtaTile:
        """Returns the calling CTA's part of the cluster tile at ``place``."""
        x, y, _ = cute.arch.block_idx()
        return CtaTile.of(config, place, x % config.cluster[0], y)

    @staticmethod
    def of(config: GemmConfig, place: TilePlace, x: Any, y: Any) -> CtaTile:
        """Returns the part of the CTA at ``(x, y)`` of its cluster."""
        return CtaTile(
            place.index * config.cluster_size + y * config.cluster[0] + x,
            (place.m * config.cluster[0] + x) * config.cta_tile[0],
            (place.n * config.cluster[1] + y) * config.cta_tile[1],
            place.shard,
        )

    @staticmethod
    def numbered(config: GemmConfig, order: Any, work: WorkList, index: Scalar) -> CtaTile:
        """Returns the CTA tile with this index in this rank's shard, whichever CTA computes it."""
        inside = index % config.cluster_size
        tile = index // config.cluster_size
        m, n = order.tile(tile, work)
        place = TilePlace(work.rank, tile, m, n)
        return CtaTile.of(config, place, inside % config.cluster[0], inside // config.cluster[0])
