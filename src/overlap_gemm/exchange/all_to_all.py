"""GEMM all-to-all as an op of the fused kernel: every rank's rows are exchanged for its columns.

Every rank has its rows of ``a`` and all of ``b``: it computes its rows of each owner's columns.

    epilogue        applies visitors of partial sums (scales, bias), rounds each tile -> ring
    comm lane       bulk store into slot[source][tile] of the tile's owner; flag[tile][source] after it
    receive role    per source and tile: waits for the flag, copies the slot into the source's rows; or first
                    applies visitors of complete sums, whose inputs are those of the output, and rounds again

Of several weights (q, k, v) the tiles of each follow each other in an owner's shard (`work.WeightColumns`): a
tile's weight determines what is loaded, and the output into which it is copied.

A rank's tiles for itself pass through a slot, too. Shards of rows and of columns are those of
``torch.chunk``, and none is empty: a source with fewer rows sends the rows that exist, and flags of all tiles
of a full shard.

Progress, and reuse of slots and flags: as in :mod:`overlap_gemm.exchange.reduce_scatter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.orders import InterleavedShards
from overlap_gemm.device.failure import Role
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.copies import CopiedUnit
from overlap_gemm.exchange.receive import (
    Part,
    ReceiveContext,
    Receiver,
    Window,
    copy_unit,
    unit_exists,
    visit_unit,
)
from overlap_gemm.exchange.send import OwnerSender
from overlap_gemm.exchange.tile_exchange import TileExchange
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.work import CtaTile, Share, TileShards, WeightColumns, Work, shard_tiles
from overlap_gemm.spec import GEMM_ALL_TO_ALL
from overlap_gemm.spec.sharding import ceil_div, num_owners


@dataclass(frozen=True)
class AllToAll(TileExchange):
    """``out[rows of source] = (a of source) @ (columns of this rank).T``, from every source.

    Attributes:
        config: Configuration of the kernel; results are sent unchanged, so slots have the output's type.
        transport: Transport by which a tile reaches a rank.
    """

    code = GEMM_ALL_TO_ALL.code

    def __post_init__(self) -> None:
        """Raises ValueError for slots of another type."""
        if self.config.slot_dtype != self.config.out_dtype:
            raise ValueError(
                f"an all-to-all sends results: slot_dtype={self.config.slot_dtype!r} must be "
                f"out_dtype={self.config.out_dtype!r}"
            )

    @property
    def order(self) -> InterleavedShards:
        """Returns the order of tiles: owners in turn."""
        return InterleavedShards(self.config.raster_group)

    @property
    def visits(self) -> Visits:
        """Returns visits of partial sums; the owner visits complete ones."""
        return Visits(self.config, ("partial",))

    @property
    def receive(self) -> Receiver:
        """Returns the role that visits and stores every source's rows."""
        return Receiver(self.config, (RowsOfSources(self),))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns this rank's rows by each owner's columns; slots are counted by full shards of both."""
        world, shard = exchange.world, exchange.shard_rows
        if self.config.weights > 1:
            weights, shard = WeightColumns.of(self.config, cols, world)
            shards = TileShards(ceil_div(cute.size(out[0], mode=[0]), world), shard, 0, shard, weights)
            return Share(rows, shard * world, exchange.rank, world, shards, shard)
        shards = TileShards(ceil_div(cute.size(out, mode=[0]), world), shard, 0, shard)
        return Share(rows, cols, exchange.rank, num_owners(cols, shard), shards, shard)

    def output(self, out: Any, exchange: Exchange) -> Output:
        """Returns the output for ordinary stores."""
        return Output(None, out)

    def sender(self, stages: Stages, work: Work, call: Call, output: Output) -> OwnerSender:
        """Returns the sender of every tile to its owner."""
        return OwnerSender(self, work, call, stages, call.epoch)


@dataclass(frozen=True)
class RowsOfSources(Part):
    """Tiles of all sources in turn, from this rank's slots into their rows (a `receive.Part`).

    Attributes:
        op: Op of the kernel.
    """

    op: AllToAll

    def tiles(self, context: ReceiveContext) -> Any:
        """Returns the number of tiles of all sources: of each as many as of a full shard."""
        return context.call.exchange.world * Int32(shard_tiles(self.op.config, context.work.all_tiles))

    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> CopiedUnit:
        """Returns the slot and the place of a unit: a tile is numbered as its source computes it."""
        config, call, work = self.op.config, context.call, context.work
        source, tile = index % call.exchange.world, index // call.exchange.world
        at = CtaTile.numbered(config, self.op.order, work.all_tiles, tile)
        at, window = self._window(context, at, source * work.shards.rows)
        slot = call.memory.local.at[call.slots(config, work.slots)[Int64(source), tile]]
        exists = unit_exists(config, unit, at, window)
        return CopiedUnit(exists, slot.address, unit, at, window, source, tile)

    def _window(self, context: ReceiveContext, at: CtaTile, first: Scalar) -> tuple[CtaTile, Window]:
        """Returns the tile's place in its window: rows from ``first`` on of the output of its weight."""
        shards = context.work.shards
        outs = context.out if self.op.config.weights > 1 else (context.out,)
        rows = cutlass.min(shards.rows, cute.size(outs[0], mode=[0]) - first)
        window, *others = [Window.of(out, first, 0, rows, cute.size(out, mode=[1])) for out in outs]
        if not others:
            return at, window
        for other, weight in zip(others, shards.weights[1:], strict=True):
            window = Window.either(at.column >= weight.begin, other, window)
        return at._replace(column=at.column - shards.weight_at(at.column).begin), window

    def await_tile(self, context: ReceiveContext, index: Scalar) -> None:
        """Waits for the source's flag of a tile."""
        world = context.call.exchange.world
        source, tile = index % world, index // world
        self.op.transport.await_result(context.call, self.op.code, tile, tile, source)

    @cute.jit
    def finish(self, context: ReceiveContext, place: CopiedUnit) -> None:
        """Copies a unit, or visits and stores it."""
        if place.exists:
            config, transport = self.op.config, self.op.transport
            arrival = transport.arrival(context.call, GEMM_ALL_TO_ALL.code, Role.RECEIVE_RESULT, place.tile)
            visits = Visits(config, ("complete",))
            if cutlass.const_expr(visits.is_empty):
                copy_unit(config, transport, arrival, *place.copied)
            else:
                visit_unit(config, transport, visits, arrival, *place.copied, context.extras)
