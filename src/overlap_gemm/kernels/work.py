"""One cluster's share of the work list."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, cute

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.schedules import Place, TileGrid, ceil_div, num_owners


class Work(NamedTuple):
    """What one cluster computes: positions ``first, first + stride, ...`` of the order's work list.

    Attributes:
        first: first position.
        stride: clusters in the grid.
        num_tiles: this cluster's tiles.
        num_foreign: how many of them, all at the front, another rank owns.
        grid: cluster tiles of one shard.
        rank: this rank.
        owners: ranks that own rows.
        shard_rows: rows of a full shard.
    """

    first: Any
    stride: Any
    num_tiles: Any
    num_foreign: Any
    grid: TileGrid
    rank: Any
    owners: Any
    shard_rows: Any

    def place(self, order: Any, j: Any) -> Place:
        """Place of this cluster's ``j``-th tile."""
        return order.place(self.first + j * self.stride, self.grid, self.rank, self.owners)


def plan_work(config: GemmConfig, order: Any, rows: Any, cols: Any, rank: Any, shard: Any) -> Work:
    """This cluster's share, from run-time values and the launch's grid.

    Args:
        config: the kernel's configuration.
        order: the op's order.
        rows: global rows.
        cols: columns.
        rank: this rank.
        shard: rows of a full shard.
    """
    owners = num_owners(rows, shard)
    grid = TileGrid(ceil_div(shard, config.cluster_tile[0]), ceil_div(cols, config.cluster_tile[1]))
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    first, stride = block // config.cluster[0], blocks // config.cluster[0]

    def share(total: Any) -> Any:
        return (Int32(total) - first + stride - 1) // stride  # >= 0: a grid has at most one cluster per tile

    return Work(
        first,
        stride,
        share(order.num_tiles(grid, rank, owners)),
        share(order.num_foreign(grid, rank, owners)),
        grid,
        rank,
        owners,
        shard,
    )
