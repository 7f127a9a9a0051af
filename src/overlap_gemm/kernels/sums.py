"""The part of a receive role that sums: of an own tile, the partials of all ranks.

waits on    every source's flag of the tile, or, where data is its own flag, for each partial
produces    the sum of the sources' partials in rank order in fp32, the epilogue applied, rounded once; where
            the switch sums (:mod:`overlap_gemm.transports.nvls`), its sum, the epilogue applied, rounded
signals     nobody; or, where results go on to other ranks (`copies.Results`), releases a flag per unit
and peer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.device.failure import Op, Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, LANES, global_pointer
from overlap_gemm.device.multicast import alias_fence, load_sum
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import StageChunks, Visits
from overlap_gemm.kernels.receive import Awaited, ReceiveContext, Window, unit_exists
from overlap_gemm.kernels.send import place_of
from overlap_gemm.kernels.surface import Transport
from overlap_gemm.kernels.work import CtaTile, shard_tiles

LOADS_IN_FLIGHT = 8
"""Loads of 16 bytes that a lane has under way, whatever the number of ranks: each takes about a
microsecond."""

LOADS_BESIDE_A_RELAY = 4
"""The same where a relay puts sums to some peers: there the relay is the bound, and with more loads two-shot
kernels spill on sm_90a."""


class Lane(NamedTuple):
    """One lane's part of a unit.

    Attributes:
        address: of its first chunk in the first source's slot; the next is 32 chunks further on.
        source_bytes: bytes from one source's slots to the next one's.
        world: sources: the ranks, or one, the switch, for all of them.
        first: the first chunk's number in the tile.
        row: the tile's first row in the window.
        column: the tile's first column.
        window: of the output.
        awaited: of what is waited for as it is taken: what to say if it does not come; else None.
        result: where sums go on to: see `copies.Results.lane`; None where they do not.
    """

    address: Any
    source_bytes: Any
    world: Any
    first: Any
    row: Any
    column: Any
    window: Any
    awaited: Any
    result: Any


class SummedUnit(NamedTuple):
    """A unit to be summed.

    Attributes:
        index: of its tile.
        unit: which of the tile's.
        exists: whether it has partials.
        lane: the calling lane's part.
    """

    index: Any
    unit: Any
    exists: Any
    lane: Lane


def _last_again(lane: Lane, source: Any) -> Any:
    """Beyond the last rank the last one's is loaded again, and not added."""
    return cutlass.min(source, lane.world - 1)


@dataclass(frozen=True)
class Sums:
    """Sums of the own tiles: see the module (a ``receive.Part``).

    Attributes:
        config: the kernel's configuration.
        order: the op's order.
        op: for failure records.
        transport: how partials arrive.
        results: how sums go on to the other ranks, or None. With it the output is that of all owners.
    """

    config: GemmConfig
    order: Any
    op: Op
    transport: Transport
    results: Any = None

    @cute.jit
    def tiles(self, given: ReceiveContext) -> Int32:
        """The tiles that this rank owns."""
        work = given.work
        own = Int32(shard_tiles(self.config, work.whole))
        if work.whole.rank >= work.whole.owners:
            own = Int32(0)
        return own

    @cute.jit
    def await_tile(self, given: ReceiveContext, index: Int32) -> None:
        """Each lane waits for a source's flag; then the warp may read every slot of the tile.

        Also through the multicast address: what the ranks have stored, and read, through their own ones lies
        before each lane's fence.
        """
        call = given.call
        if cutlass.const_expr(not self.transport.words):
            for source in cutlass.range(cute.arch.lane_idx(), call.exchange.world, LANES, unroll=1):
                flag = index * call.exchange.world + source
                site = call.site(self.op, Role.RECEIVE_PARTIAL, index, source, flag)
                address = call.flag(call.base, index, source)
                wait_flag(address, call.epoch, call.bound, site)
            cute.arch.sync_warp()
        if cutlass.const_expr(self.transport.multicast):
            alias_fence()

    def locate(self, given: ReceiveContext, index: Any, unit: Any) -> SummedUnit:
        """Where its partials are, and where its sums go."""
        call, work, out, _ = given
        tile = CtaTile.numbered(self.config, self.order, work.whole, index)
        window = Window.whole(out)
        if self.results is not None:
            window = Window.shard(out, work, call.exchange.rank)
        exists = unit_exists(self.config, unit, tile, window)
        (peers, rank, world, *_), base, place = call.exchange, call.base, 0
        if self.transport.multicast:
            base, place, world = peers[world], rank, Int32(1)
        source_bytes = Int64(work.slots) * self.config.tile_bytes
        first = unit * (self.config.lane_chunks * LANES) + cute.arch.lane_idx()
        address = base + place_of(self.config, call, work.slots, index, place) + first * CHUNK_BYTES
        result = None if self.results is None else self.results.lane(call, work, index, first)
        awaited = None
        if self.transport.words:
            awaited = Awaited.of(call, self.op, Role.RECEIVE_PARTIAL, index, call.bound)
        lane = Lane(address, source_bytes, world, first, tile.row, tile.column, window, awaited, result)
        return SummedUnit(index, unit, exists, lane)

    @cute.jit
    def finish(self, given: ReceiveContext, place: SummedUnit) -> None:
        """Sums one unit; one that does not exist has no partials, but peers may wait for its flag."""
        call, work, _, extras = given
        if place.exists:
            self._sum(place.lane, extras)
            if cutlass.const_expr(self.results is not None):
                self.results.publish(call, work, place.index, place.unit)
        if cutlass.const_expr(self.results is not None and self.results.every_unit):  # noqa: SIM102
            if not place.exists:
                self.results.publish(call, work, place.index, place.unit, exists=False)

    @cute.jit
    def _sum(self, lane: Lane, extras: Any) -> None:
        world = lane.world
        if cutlass.const_expr(self.transport.multicast):
            self._sum_few(lane, extras, 1)
        elif world <= 2:
            self._sum_few(lane, extras, 2)
        elif world <= 4:
            self._sum_few(lane, extras, 4)
        elif world <= self._in_flight:
            self._sum_few(lane, extras, self._in_flight)
        else:
            self._sum_many(lane, extras)

    @cute.jit
    def _sum_few(self, lane: Lane, extras: Any, sources: cutlass.Constexpr) -> None:
        """Up to ``sources`` ranks: a window of chunks is under way; a summed one makes room for another."""
        chunks = self.config.lane_chunks
        window = min(self._in_flight // sources, chunks)
        loaded = self._registers(sources, window)
        for c in cutlass.range_constexpr(window):
            self._load(lane, c, 0, loaded[(None, None, c)])
        for i in cutlass.range(0, chunks, window, unroll=1):
            for c in cutlass.range_constexpr(window):
                total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
                total.fill(0.0)
                self._add(total, lane, i + c, 0, loaded[(None, None, c)])
                if i + window < chunks:
                    self._load(lane, i + window + c, 0, loaded[(None, None, c)])
                self._store(lane, i + c, total, extras)

    @cute.jit
    def _sum_many(self, lane: Lane, extras: Any) -> None:
        """Any number of ranks, as many of them at a time as loads are under way."""
        for i in cutlass.range(self.config.lane_chunks, unroll=1):
            total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
            total.fill(0.0)
            for first in cutlass.range(0, lane.world, self._in_flight, unroll=1):
                loaded = self._registers(self._in_flight, 1)[(None, None, 0)]
                self._load(lane, i, first, loaded)
                self._add(total, lane, i, first, loaded)
            self._store(lane, i, total, extras)

    @property
    def _in_flight(self) -> int:
        return LOADS_BESIDE_A_RELAY if self.transport.puts and self.results else LOADS_IN_FLIGHT

    def _registers(self, sources: int, window: int) -> Any:
        return cute.make_rmem_tensor((self.chunks.elements, sources, window), DTYPES[self.config.slot_dtype])

    def _load(self, lane: Lane, chunk: Any, first: Any, loaded: Any) -> None:
        """Starts the loads of a chunk from as many sources after ``first`` as ``loaded`` has room for."""
        dtype, values = DTYPES[self.config.slot_dtype], self.chunks.elements
        for s in range(cute.size(loaded, mode=[1])):
            at = self._at(lane, chunk, _last_again(lane, first + s))
            if self.transport.multicast:
                load_sum(at, loaded[(None, s)])
            elif lane.awaited is not None:
                lane.awaited.load(at, loaded[(None, s)])
            else:
                slot = global_pointer(dtype, at, CHUNK_BYTES)
                cute.autovec_copy(cute.make_tensor(slot, cute.make_layout(values)), loaded[(None, s)])

    def _at(self, lane: Lane, chunk: Any, source: Any) -> Any:
        return lane.address + chunk * (LANES * CHUNK_BYTES) + lane.source_bytes * source

    @cute.jit
    def _add(self, total: cute.Tensor, lane: Lane, chunk: Int32, first: Int32, loaded: cute.Tensor) -> None:
        """Adds a chunk's partials in rank order."""
        sources = [_last_again(lane, first + s) for s in range(cute.size(loaded, mode=[1]))]
        if cutlass.const_expr(lane.awaited is not None):
            lane.awaited.take([self._at(lane, chunk, source) for source in sources], loaded, sources)
        for s in cutlass.range_constexpr(len(sources)):
            if first + s < lane.world:
                total.store(total.load() + loaded[(None, s)].load().to(cutlass.Float32))

    @cute.jit
    def _store(self, lane: Lane, chunk: Int32, values: cute.Tensor, extras: Any) -> None:
        """Applies the epilogue to neighbouring sums of a row, rounds once, stores what is not clipped."""
        row, column = self.chunks.locate(lane.first + chunk * LANES)
        row, column = lane.row + row, lane.column + column
        dtype = DTYPES[self.config.out_dtype]
        rounded = cute.make_rmem_tensor(values.shape, dtype)
        if row < lane.window.rows and column < lane.window.columns:
            visits = Visits(self.config, ("complete",))
            visits.on_chunk(values, lane.window.row + row, lane.window.column + column, extras)
            rounded.store(values.load().to(dtype))
            lane.window.store(row, column, rounded)
            if cutlass.const_expr(self.results is not None):
                self.results.send(lane.result, chunk * LANES, rounded)
        elif cutlass.const_expr(self.results is not None and self.transport.words):
            rounded.fill(0.0)  # a unit is waited for as a whole
            self.results.send(lane.result, chunk * LANES, rounded)

    @property
    def chunks(self) -> StageChunks:
        """The wire format of partials."""
        return StageChunks(self.config)
