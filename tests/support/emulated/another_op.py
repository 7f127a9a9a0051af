"""GEMM all-to-all as an op from outside: registered with its dual, with its half of the fused kernel.

Every rank multiplies its rows of x with all of the weight, and gets its columns of all ranks' rows: x
`[M / P, K]`, weight `[N, K]` -> `[M, N / P]`.

    epilogue        rounds each tile -> ring
    comm lane       bulk store into the slot[source][tile] of the tile's owner, then its flag
    receive role    per source and tile: waits for the flag, copies the slot into the source's rows
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm import OpSpec, PatternSpec, register
from overlap_gemm.config.orders import InterleavedShards
from overlap_gemm.device.failure import Role
from overlap_gemm.exchange.copies import CopiedUnit
from overlap_gemm.exchange.receive import Part, Receiver, Window, copy_unit, unit_exists
from overlap_gemm.exchange.send import OwnerSender
from overlap_gemm.exchange.tile_exchange import TileExchange
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.work import CtaTile, Share, TileShards, shard_tiles
from overlap_gemm.spec.sharding import ceil_div, num_owners

SPEC = OpSpec("rows_to_columns", 21, "R2C", x="m", weight=None, out="n", dual="columns_to_rows")
DUAL = OpSpec("columns_to_rows", 22, "C2R", x="k", weight=None, out="m", dual="rows_to_columns")
PATTERN = PatternSpec(
    "tiles_to_columns",
    SPEC.name,
    cut="columns",
    to_all=False,
    returns=False,
    kernel=f"{__name__}:RowsToColumns",
)
rows_to_columns = register(SPEC, PATTERN)
columns_to_rows = register(DUAL)


@dataclass(frozen=True)
class RowsToColumns(TileExchange):
    """`out[rows of source] = (x of source) @ (own rows of the weight).T`, from every source."""

    code = SPEC.code

    @property
    def order(self) -> InterleavedShards:
        """Owners in turn."""
        return InterleavedShards(self.config.raster_group)

    @property
    def visits(self) -> Visits:
        """An accumulator is a complete sum."""
        return Visits(self.config, ("partial", "complete"))

    @property
    def receive(self) -> Receiver:
        """Stores every source's rows."""
        return Receiver(self.config, (RowsOfSources(self),))

    def share(self, exchange: Any, rows: Any, cols: Any, out: Any) -> Share:
        """The own rows by the owners' columns; slots are counted by full shards of both."""
        full, shard = ceil_div(cute.size(out, mode=[0]), exchange.world), exchange.shard_rows
        return Share(
            rows, cols, exchange.rank, num_owners(cols, shard), TileShards(full, shard, 0, shard), shard
        )

    def output(self, out: Any, exchange: Any) -> Output:
        """By ordinary stores."""
        return Output(None, out)

    def sender(self, stages: Any, work: Any, call: Any, output: Output) -> OwnerSender:
        """Sends every tile to its owner."""
        return OwnerSender(self, work, call, stages, call.epoch)


@dataclass(frozen=True)
class RowsOfSources(Part):
    """Tiles of all sources in turn, from this rank's slots into their rows."""

    op: RowsToColumns

    def tiles(self, given: Any) -> Any:
        """Every source's."""
        return given.call.exchange.world * Int32(shard_tiles(self.op.config, given.work.all_tiles))

    def locate(self, given: Any, index: Any, unit: Any) -> CopiedUnit:
        """The tile is numbered as its source computed it: its columns are this rank's."""
        cfg, call, out, work = self.op.config, given.call, given.out, given.work
        source, tile = index % call.exchange.world, index // call.exchange.world
        at = CtaTile.numbered(cfg, self.op.order, work.all_tiles, tile)
        first = source * work.shards.rows
        rows = cutlass.min(work.shards.rows, cute.size(out, mode=[0]) - first)
        window = Window.of(out, first, 0, rows, cute.size(out, mode=[1]))
        slot = call.memory.local.at[call.slots(cfg, work.slots)[Int64(source), tile]]
        exists = unit_exists(cfg, unit, at, window)
        return CopiedUnit(exists, slot.address, unit, at, window, source, tile)

    def await_tile(self, given: Any, index: Any) -> None:
        """The source's flag of the tile."""
        world = given.call.exchange.world
        source, tile = index % world, index // world
        self.op.transport.await_result(given.call, self.op.code, tile, tile, source)

    @cute.jit
    def finish(self, given: Any, place: CopiedUnit) -> None:
        """Copies one unit."""
        if place.exists:
            transport = self.op.transport
            arrival = transport.arrival(given.call, SPEC.code, Role.RECEIVE_RESULT, place.tile)
            copy_unit(self.op.config, transport, arrival, *place.copied)
