"""The parts of a receive role that store complete values which other ranks have computed.

waits on    `TileCopies`: a source's flag of the tile; `ResultCopies`: an owner's flag of the unit; with LL
            packets, the data
produces    the values in the output, clipped
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import TileGrid, WorkList
from overlap_gemm.device.failure import Role
from overlap_gemm.device.memory import DTYPES, LANES
from overlap_gemm.device.remote import Ref
from overlap_gemm.device.traced import Predicate, Scalar
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.geometry import result_slots
from overlap_gemm.exchange.receive import (
    Part,
    ReceiveContext,
    Window,
    copy_unit,
    unit_exists,
)
from overlap_gemm.kernel.stages import StageChunks
from overlap_gemm.kernel.work import CtaTile, Work, shard_tiles
from overlap_gemm.spec.sharding import ceil_div
from overlap_gemm.transports.interface import Transport


class CopiedUnit(NamedTuple):
    """A unit to be copied.

    Attributes:
        exists: Whether the unit was sent.
        slot: Address of its tile's slot.
        unit: Number of the unit in the tile.
        at: Place of the tile in the window.
        window: Window of the output.
        source: Rank that sent the tile.
        tile: Index of the tile in the source's shard.
    """

    exists: Predicate
    slot: Scalar
    unit: Scalar
    at: CtaTile
    window: Window
    source: Scalar
    tile: Scalar

    @property
    def copied(self) -> tuple[Any, ...]:
        """Returns the arguments of `copy_unit` for this unit."""
        return self.slot, self.unit, self.at, self.window, self.source


SHOTS = 2
"""Number of wait limits for a sum: its owner may itself wait for partials, up to one limit."""


@dataclass(frozen=True)
class TileCopies(Part):
    """Copies of every peer's tiles from its slots to its columns of the output (a ``receive.Part``).

    Sources alternate, beginning with the next rank; the tiles of each are in the order of their computation.

    Attributes:
        config: The kernel's configuration.
        order: Order of the op.
        op: Code of the op, for failure records.
        transport: Transport by which tiles arrive.
    """

    config: GemmConfig
    order: Any
    op: int
    transport: Transport

    def tiles(self, context: ReceiveContext) -> Any:
        """Returns the number of tiles of all other ranks with columns: for each, that of a full shard."""
        return self._others(context) * Int32(self._slots(context))

    @cute.jit
    def await_tile(self, context: ReceiveContext, index: Int32) -> None:
        """Waits for the source's tile, if the source has that many."""
        source, tile = self._locate(context, index)
        if tile < shard_tiles(self.config, self._list(context, source)):
            self.transport.await_result(context.call, self.op, tile, tile, source)

    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> CopiedUnit:
        """Returns slot and destination of a unit."""
        cfg, call, out = self.config, context.call, context.out
        source, tile = self._locate(context, index)
        work_list = self._list(context, source)
        at = CtaTile.numbered(cfg, self.order, work_list, tile)
        first, columns = self._columns(context, source)
        window = Window.of(out, 0, first, cute.size(out, mode=[0]), columns)
        slot = call.memory.local.at[call.slots(cfg, self._slots(context))[Int64(source), tile]]
        exists = (tile < shard_tiles(cfg, work_list)) & unit_exists(cfg, unit, at, window)
        return CopiedUnit(exists, slot.address, unit, at, window, source, tile)

    @cute.jit
    def finish(self, context: ReceiveContext, place: CopiedUnit) -> None:
        """Copies one unit."""
        if place.exists:
            arrival = self.transport.arrival(context.call, self.op, Role.RECEIVE_RESULT, place.tile)
            copy_unit(self.config, self.transport, arrival, *place.copied)

    def _grid(self, context: ReceiveContext, columns: Scalar) -> TileGrid:
        """Returns the cluster tiles of so many columns.

        Computed from the output's rows, not from the cluster's work: epilogue warps would keep the work in
        registers, which they lack, through the mainloop.
        """
        tile_m, tile_n = self.config.cluster_tile
        return TileGrid(ceil_div(cute.size(context.out, mode=[0]), tile_m), ceil_div(columns, tile_n))

    def _slots(self, context: ReceiveContext) -> Any:
        """Returns the number of slots of each source: `Work.slots`."""
        grid = self._grid(context, context.call.exchange.shard_rows)
        return grid.rows * grid.cols * self.config.cluster_size

    def _sources(self, context: ReceiveContext) -> Any:
        """Returns the number of ranks that have columns."""
        return ceil_div(cute.size(context.out, mode=[1]), context.call.exchange.shard_rows)

    def _others(self, context: ReceiveContext) -> Any:
        """Returns the number of ranks that have columns, without this rank.

        So many ranks from ``rank + 1`` on, modulo `_sources`, are these ranks.
        """
        sources = self._sources(context)
        return sources - (context.call.exchange.rank < sources) * 1

    def _locate(self, context: ReceiveContext, index: Scalar) -> tuple[Any, Any]:
        """Returns (source, its tile) of the part's tile ``index``."""
        others = self._others(context)
        source = (context.call.exchange.rank + 1 + index % others) % self._sources(context)
        return source, index // others

    def _columns(self, context: ReceiveContext, source: Scalar) -> tuple[Any, Any]:
        """Returns (first, number) of the source's columns of the output."""
        chunk = context.call.exchange.shard_rows
        first = source * chunk
        return first, cutlass.min(chunk, cute.size(context.out, mode=[1]) - first)

    def _list(self, context: ReceiveContext, source: Scalar) -> WorkList:
        """Returns the source's work list."""
        _, columns = self._columns(context, source)
        return WorkList(self._grid(context, columns), 0, 1)


@dataclass(frozen=True)
class ResultCopies(Part):
    """Copies of the other owners' sums from local result slots to the output (a ``receive.Part``).

    Owners alternate; the units of each are awaited one by one, in the order in which the owner sums them.

    Attributes:
        results: Layout of the sums.
        order: Order of the op.
        op: Code of the op, for failure records.
    """

    results: Results
    order: Any
    op: int

    def tiles(self, context: ReceiveContext) -> Any:
        """Returns the number of tiles of all other owners."""
        return self._others(context) * Int32(context.work.slots)

    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> CopiedUnit:
        """Returns slot and destination of a unit."""
        call, work, cfg = context.call, context.work, self.results.config
        others = self._others(context)
        tile, rank = index // others, work.all_tiles.rank
        owner = (rank + 1 + index % others) % work.all_tiles.owners
        at = CtaTile.numbered(cfg, self.order, work.all_tiles, tile)
        window = Window.shard(context.out, work, owner)
        slot = self.results.slot(call, work, owner, tile).address
        return CopiedUnit(unit_exists(cfg, unit, at, window), slot, unit, at, window, owner, tile)

    @cute.jit
    def finish(self, context: ReceiveContext, place: CopiedUnit) -> None:
        """Waits for one unit and copies it."""
        transport, wait = self.results.transport, partial(self._await_unit, context, place)
        if place.exists:
            wait()
            arrival = transport.arrival(context.call, self.op, Role.RECEIVE_RESULT, place.tile, SHOTS)
            copy_unit(self.results.config, transport, arrival, *place.copied)
        transport.if_absent(place.exists, wait)

    def _await_unit(self, context: ReceiveContext, place: CopiedUnit) -> None:
        flag = self.results.flag(context.work, place.tile, place.unit)
        transport = self.results.transport
        transport.await_result(context.call, self.op, flag, place.tile, place.source, waits=SHOTS)

    def _others(self, context: ReceiveContext) -> Any:
        """Returns the number of owners without this rank.

        So many ranks from ``rank + 1`` on, modulo the owners, are these owners.
        """
        work_list = context.work.all_tiles
        return work_list.owners - (work_list.rank < work_list.owners) * 1


@dataclass(frozen=True)
class Results:
    """Transport of an owner's sums to the other ranks: stores into result slots, a flag per unit and peer.

    To ranks without P2P access the sums are put from the local result slot, unit by unit.

    There is a flag per unit, not per tile, because different warps of a CTA sum the units of a tile. One flag
    for all units would need a counter per tile in memory, which must be reset. The last warp would have to
    release the stores of the other warps. With a flag per unit a receiver waits for 4 KiB at a time.

    Result slots are after the partial slots in the call's buffer, ``[owner][tile]``: chunks of the output's
    type in the places in which `StageChunks` has the partials'. Flags are after the partial tiles' flags.

    Attributes:
        config: The kernel's configuration.
        transport: Transport that stores at peers.
    """

    config: GemmConfig
    transport: Transport

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes of a chunk."""
        return StageChunks(self.config).elements * (DTYPES[self.config.out_dtype].width // 8)

    def slot(self, call: Call, work: Work, owner: Scalar, tile: Scalar) -> Ref:
        """Returns a summed tile's slot on this rank; it is in the same place everywhere."""
        world = Int64(call.exchange.world)
        slots = result_slots(self.config, call.buffer, work.slots, world)
        return call.memory.local.at[slots[Int64(owner), tile]]

    def flag(self, work: Work, tile: Scalar, unit: Scalar) -> Any:
        """Returns the number of a unit's flag, as `Call.flag` takes it."""
        return work.slots + tile * self.config.units + unit

    def lane(self, call: Call, work: Work, tile: Scalar, first: Scalar) -> Ref:
        """Returns the calling lane's place of its sums, from chunk ``first`` of a local tile on."""
        return self.slot(call, work, call.exchange.rank, tile).at[first * self.chunk_bytes]

    def send(self, lane: Ref, chunk: Scalar, values: cute.Tensor) -> None:
        """Stores a chunk, ``chunk`` after the lane's first, at every peer; one lane."""
        self.transport.store_to_all(lane.at[chunk * self.chunk_bytes], values)

    @cute.jit
    def pad(self, lane: Ref, chunk: Int32, values: cute.Tensor) -> None:
        """Stores zeros for a chunk outside the output; one lane."""
        values.fill(0.0)
        self.send(lane, chunk, values)

    @cute.jit
    def publish(
        self, call: Call, work: Work, tile: Int32, unit: Int32, exists: cutlass.Constexpr = True
    ) -> None:
        """Releases the unit's flag at every peer; all lanes, after their stores, a peer each.

        A unit that does not exist is not put.
        """
        call = Call.begin(call.exchange)  # again: while it sums, the role has no registers for it
        cute.arch.sync_warp()
        rank, unit_bytes = call.exchange.rank, self.config.result_bytes // self.config.units
        slot = self.slot(call, work, rank, tile).at[unit * unit_bytes]
        flag = call.memory.local.at[call.flags[self.flag(work, tile, unit), rank]]
        for peer in cutlass.range(cute.arch.lane_idx(), call.exchange.world, LANES, unroll=1):
            if peer != rank:
                num_bytes = Int32(unit_bytes * exists)
                self.transport.publish(slot.remote(peer), flag.remote(peer), num_bytes, call.epoch)
