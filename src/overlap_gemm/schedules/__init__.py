"""Tile orders and row ownership, in plain integer arithmetic.

Everything here works on non-negative values with ``+ - * // % <`` only, so that the same function runs on
Python integers (tests, performance model) and on a kernel's ``Int32``.
"""

from overlap_gemm.schedules.orders import (
    DealtShards,
    LinearOrder,
    OwnShardFirst,
    OwnTilesLast,
    Place,
    TileGrid,
    WorkList,
)
from overlap_gemm.schedules.shards import ceil_div, num_owners, shard_rows

__all__ = [
    "DealtShards",
    "LinearOrder",
    "OwnShardFirst",
    "OwnTilesLast",
    "Place",
    "TileGrid",
    "WorkList",
    "ceil_div",
    "num_owners",
    "shard_rows",
]
