"""`Sums`: the part of a receive role that sums the partial tiles of all ranks for local tiles.

- waits on: every source's flag of the tile, or, with LL packets, each partial.
- produces: the sum of the sources' partials in rank order in fp32, or by a binary tree if K has leaves
  (`GemmConfig.leaves`), with the epilogue applied, rounded once.
- signals: nothing; or, if results are sent on to other ranks (`copies.Results`), a flag per unit and peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.rules import LEAVES
from overlap_gemm.device.failure import Role
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, LANES
from overlap_gemm.device.row_parts import count_units
from overlap_gemm.device.traced import Address, Extras, Fragment, Predicate, Scalar
from overlap_gemm.exchange.receive import Part, ReceiveContext, Window, of_chunk, unit_exists
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.stages import StageChunks
from overlap_gemm.kernel.work import CtaTile, shard_tiles
from overlap_gemm.transports.interface import Transport

MOST_LEAVES = max(LEAVES)
"""Most ranks whose sums a tree adds."""


class Lane(NamedTuple):
    """One lane's part of a unit.

    Attributes:
        address: Address of its first chunk in the first source's slot; the next is 32 chunks further on.
        source_bytes: Bytes from one source's slots to the next one's.
        world: Number of sources.
        first: Number of the first chunk in the tile.
        row: First row of the tile in the window.
        column: First column of the tile in the window.
        window: Window of the output.
        arrival: Arrival of the tile, as in `Transport.take`.
        result: Destination of the sums at peers, see `copies.Results.lane`; None if they are not sent on.
    """

    address: Address
    source_bytes: Any
    world: Scalar
    first: Scalar
    row: Scalar
    column: Scalar
    window: Any
    arrival: Any
    result: Any


class SummedUnit(NamedTuple):
    """A unit to be summed.

    Attributes:
        index: Index of its tile.
        unit: Number of the unit in the tile.
        exists: Whether it has partials.
        lane: The calling lane's part.
    """

    index: Scalar
    unit: Scalar
    exists: Predicate
    lane: Lane


def _last_again(lane: Lane, source: Scalar) -> Any:
    """Returns the source, or the last rank if there are fewer; its repeated values are not added."""
    return cutlass.min(source, lane.world - 1)


@dataclass(frozen=True)
class Sums(Part):
    """Sums of the local tiles, see the module (a ``receive.Part``).

    Attributes:
        config: The kernel's configuration.
        order: Order of the op.
        op: Code of the op, for failure records.
        transport: Transport by which partials arrive.
        results: Transport of sums to the other ranks, or None. With it the output is that of all owners.
    """

    config: GemmConfig
    order: Any
    op: int
    transport: Transport
    results: Any = None

    @cute.jit
    def tiles(self, context: ReceiveContext) -> Int32:
        """Returns the number of tiles that this rank owns."""
        work = context.work
        num_tiles = Int32(shard_tiles(self.config, work.all_tiles))
        if work.all_tiles.rank >= work.all_tiles.owners:
            num_tiles = Int32(0)
        return num_tiles

    @cute.jit
    def await_tile(self, context: ReceiveContext, index: Int32) -> None:
        """Waits until the warp may read every slot of the tile."""
        self.transport.await_partials(context.call, self.op, index)

    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> SummedUnit:
        """Returns the addresses of a unit's partials, and the destination of its sums."""
        call, work, out, _ = context
        tile = CtaTile.numbered(self.config, self.order, work.all_tiles, index)
        window = Window.unsharded(out)
        if self.results is not None:
            window = Window.shard(out, work, call.exchange.rank)
        exists = unit_exists(self.config, unit, tile, window)
        source_bytes = Int64(work.slots) * self.config.tile_bytes
        first = unit * (self.config.lane_chunks * LANES) + cute.arch.lane_idx()
        slot = call.slots(self.config, work.slots)[Int64(0), index]
        address = call.memory.local.at[slot].at[first * CHUNK_BYTES].address
        result = None if self.results is None else self.results.lane(call, work, index, first)
        arrival = self.transport.arrival(call, self.op, Role.RECEIVE_PARTIAL, index)
        lane = Lane(
            address, source_bytes, call.exchange.world, first, tile.row, tile.column, window, arrival, result
        )
        return SummedUnit(index, unit, exists, lane)

    @cute.jit
    def finish(self, context: ReceiveContext, place: SummedUnit) -> None:
        """Sums one unit; one that does not exist has no partials, but peers may wait for its flag."""
        if place.exists:
            self._sum(place.lane, context.extras)
            if cutlass.const_expr(self.visits.has_rows):
                row, _ = self.chunks.locate(place.unit * (self.config.lane_chunks * LANES))
                count_units(self.visits.count(context.extras, place.lane.row + row), 1)
            if cutlass.const_expr(self.results is not None):
                self.transport.publish_unit(partial(self._publish, context, place))
        if cutlass.const_expr(self.results is not None):
            self.transport.if_absent(place.exists, partial(self._publish, context, place, exists=False))

    def end(self, context: ReceiveContext, number: Scalar) -> None:
        """Counts the warp's units if `complete_rows.RowValues` follows; `CompleteRows` needs each at once."""
        if self.visits.reduces and not self.visits.has_rows:
            count_units(self.visits.count(context.extras), number)

    def units_of_all(self, context: ReceiveContext) -> Any:
        """Returns the number of units that the warps of all CTAs count."""
        return self.tiles(context) * self.units(self.config)

    def _publish(self, context: ReceiveContext, place: SummedUnit, exists: bool = True) -> None:
        self.results.publish(context.call, context.work, place.index, place.unit, exists)

    @cute.jit
    def _sum(self, lane: Lane, extras: Extras) -> None:
        """Selects the summation by number of ranks, so that loads in flight fit the registers."""
        world = lane.world
        if cutlass.const_expr(self.config.leaves > 0):
            if world <= 2:
                self._sum_few(lane, extras, 2)
            else:
                self._sum_in_tree(lane, extras)
        elif cutlass.const_expr(self.config.receive_role_is_register_limited and self.results is not None):
            self._sum_many(lane, extras)  # with a loop for each number of ranks it spills
        elif world <= 2:
            self._sum_few(lane, extras, 2)
        elif world <= min(4, self._in_flight):
            self._sum_few(lane, extras, min(4, self._in_flight))
        elif world <= self._in_flight:
            self._sum_few(lane, extras, self._in_flight)
        else:
            self._sum_many(lane, extras)

    @cute.jit
    def _sum_few(self, lane: Lane, extras: Extras, sources: cutlass.Constexpr) -> None:
        """Sums up to ``sources`` ranks: a window of chunks is in flight; each sum frees its registers."""
        chunks = self.config.lane_chunks
        window, ahead = self._window(sources), sources + self.visits.num_loads <= self._in_flight
        loaded, inputs = self._registers(sources, window), self._input_registers(window)
        for c in cutlass.range_constexpr(window):
            self._load(lane, c, 0, loaded[(None, None, c)])
            if cutlass.const_expr(ahead):  # else there are no registers
                self._load_inputs(lane, c, of_chunk(inputs, c), extras)
        for i in cutlass.range(0, chunks, window, unroll=1):
            parts, together = [self.visits.row_parts() for _ in range(window)], min(window, self._together)
            for c in cutlass.range_constexpr(window):
                total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
                if cutlass.const_expr(self.config.leaves > 0):
                    self._add_in_tree(total, lane, i + c, 0, loaded[(None, None, c)])
                else:
                    total.fill(0.0)
                    self._add(total, lane, i + c, 0, loaded[(None, None, c)])
                if i + window < chunks:
                    self._load(lane, i + window + c, 0, loaded[(None, None, c)])
                if cutlass.const_expr(not ahead):
                    self._load_inputs(lane, i + c, of_chunk(inputs, c), extras)
                self._store(lane, i + c, total, of_chunk(inputs, c), extras, parts[c])
                if cutlass.const_expr(ahead):  # noqa: SIM102 - one is evaluated while the kernel is traced
                    if i + window < chunks:
                        self._load_inputs(lane, i + window + c, of_chunk(inputs, c), extras)
                if cutlass.const_expr((c + 1) % together == 0):
                    first = c + 1 - together
                    self._store_parts(lane, i + first, parts[first : c + 1], extras)

    @cute.jit
    def _sum_many(self, lane: Lane, extras: Extras) -> None:
        """Sums any number of ranks, at a time as many as loads are in flight."""
        inputs = of_chunk(self._input_registers(1), 0)
        for i in cutlass.range(self.config.lane_chunks, unroll=1):
            total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
            total.fill(0.0)
            for first in cutlass.range(0, lane.world, self._in_flight, unroll=1):
                loaded = self._registers(self._in_flight, 1)[(None, None, 0)]
                self._load(lane, i, first, loaded)
                self._add(total, lane, i, first, loaded)
            self._load_inputs(lane, i, inputs, extras)
            parts = self.visits.row_parts()
            self._store(lane, i, total, inputs, extras, parts)
            self._store_parts(lane, i, [parts], extras)

    @cute.jit
    def _sum_in_tree(self, lane: Lane, extras: Extras) -> None:
        """Sums up to `MOST_LEAVES` ranks, a power of two: first as many as loads are in flight."""
        inputs = of_chunk(self._input_registers(1), 0)
        for i in cutlass.range(self.config.lane_chunks, unroll=1):
            total = self._subtree(lane, i, 0, MOST_LEAVES)
            self._load_inputs(lane, i, inputs, extras)
            parts = self.visits.row_parts()
            self._store(lane, i, total, inputs, extras, parts)
            self._store_parts(lane, i, [parts], extras)

    def _subtree(self, lane: Lane, chunk: Scalar, first: int, ranks: int) -> Any:
        """Returns the sum of a chunk's partials of ``ranks`` ranks from ``first``, of those that exist."""
        total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
        if ranks <= self._in_flight:
            loaded = self._registers(ranks, 1)[(None, None, 0)]
            self._load(lane, chunk, first, loaded)
            self._add_in_tree(total, lane, chunk, first, loaded)
            return total
        half = ranks // 2
        total.store(self._subtree(lane, chunk, first, half).load())
        self._add_other_half(total, lane, chunk, first + half, half)
        return total

    @cute.jit
    def _add_other_half(
        self, total: cute.Tensor, lane: Lane, chunk: Int32, first: cutlass.Constexpr, ranks: cutlass.Constexpr
    ) -> None:
        """Adds the subtree that begins at rank ``first``, if that rank exists."""
        if first < lane.world:
            total.store(total.load() + self._subtree(lane, chunk, first, ranks).load())

    @cute.jit
    def _add_in_tree(
        self, total: cute.Tensor, lane: Lane, chunk: Int32, first: cutlass.Constexpr, loaded: cute.Tensor
    ) -> None:
        """Sums a chunk's partials of the ranks from ``first`` by a binary tree; overwrites ``total``.

        The number of ranks is a power of two, so a right half exists completely or not at all.
        """
        number = cutlass.const_expr(cute.size(loaded, mode=[1]))
        sources = [_last_again(lane, first + s) for s in range(number)]
        self.transport.take(lane.arrival, partial(self._places, lane, chunk, sources), loaded, sources)
        sums = [cute.make_rmem_tensor(total.shape, cutlass.Float32) for _ in range(number)]
        for s in cutlass.range_constexpr(number):
            sums[s].store(loaded[(None, s)].load().to(cutlass.Float32))
        for level in cutlass.range_constexpr(number.bit_length() - 1):
            half = 1 << level
            for s in cutlass.range_constexpr(0, number, 2 * half):
                if first + s + half < lane.world:
                    sums[s].store(sums[s].load() + sums[s + half].load())
        total.store(sums[0].load())

    @property
    def _in_flight(self) -> int:
        """Returns the number of loads in flight.

        With as many 32-bit partials, or with few registers, kernels spill on sm_90a.
        """
        loads = self.transport.loads_in_flight(returns=self.results is not None)
        share = 2 if self.config.receive_role_is_register_limited else 1
        return loads * 16 // DTYPES[self.config.slot_dtype].width // share

    def _window(self, sources: int) -> int:
        """Returns the number of chunks whose loads, of partials and of inputs, are in flight.

        With inputs half as many loads more are, so that at P = 2 one input costs no chunk in flight. Kernels
        spill with so many where sums are sent on, and with outputs for each row where roles have equal
        registers.
        """
        chunks, visits, most = self.config.lane_chunks, self.visits, self._in_flight
        inputs, are_equal = visits.num_loads, self.config.on.calls_keep_registers  # registers of roles
        if inputs and self.results is None and not (visits.reduces and are_equal):
            most += most // 2
        window = min(max(most // (sources + inputs), 1), chunks)
        while chunks % window:
            window -= 1
        return window

    @property
    def _together(self) -> int:
        """Returns the number of chunks whose parts of rows are reduced at once.

        With 4 instead of 2, or with 2 where roles have equal registers, kernels spill.
        """
        return 1 if self.config.on.calls_keep_registers else 2

    @property
    def visits(self) -> Visits:
        """Returns the visits of complete sums."""
        return Visits(self.config, ("complete",))

    def _input_registers(self, window: int) -> list[Any]:
        return self.visits.input_registers(self.chunks.elements, window)

    def _load_inputs(self, lane: Lane, chunk: Scalar, loaded: Sequence[Any], extras: Extras) -> None:
        """Starts the loads of a chunk's inputs of the epilogue."""
        if loaded:
            row, column = self._place(lane, chunk)
            self.visits.load_chunk(loaded, lane.window.row + row, lane.window.column + column, extras)

    def _place(self, lane: Lane, chunk: Scalar) -> tuple[Any, Any]:
        """Returns (row, first column) in the window of a lane's chunk."""
        row, column = self.chunks.locate(lane.first + chunk * LANES)
        return lane.row + row, lane.column + column

    def _registers(self, sources: int, window: int) -> Any:
        return cute.make_rmem_tensor((self.chunks.elements, sources, window), DTYPES[self.config.slot_dtype])

    def _load(self, lane: Lane, chunk: Scalar, first: Scalar, loaded: Fragment) -> None:
        """Starts the loads of a chunk from as many sources after ``first`` as ``loaded`` has room for."""
        for s in range(cute.size(loaded, mode=[1])):
            at = self._at(lane, chunk, _last_again(lane, first + s))
            self.transport.load(at, loaded[(None, s)])

    def _at(self, lane: Lane, chunk: Scalar, source: Scalar) -> Any:
        return lane.address + chunk * (LANES * CHUNK_BYTES) + lane.source_bytes * source

    def _places(self, lane: Lane, chunk: Scalar, sources: Sequence[Any]) -> list[Any]:
        return [self._at(lane, chunk, source) for source in sources]

    @cute.jit
    def _add(self, total: cute.Tensor, lane: Lane, chunk: Int32, first: Int32, loaded: cute.Tensor) -> None:
        """Adds a chunk's partials in rank order."""
        sources = [_last_again(lane, first + s) for s in range(cute.size(loaded, mode=[1]))]
        places = partial(self._places, lane, chunk, sources)
        self.transport.take(lane.arrival, places, loaded, sources)
        for s in cutlass.range_constexpr(len(sources)):
            if first + s < lane.world:
                total.store(total.load() + loaded[(None, s)].load().to(cutlass.Float32))

    @cute.jit
    def _store(
        self,
        lane: Lane,
        chunk: Int32,
        values: cute.Tensor,
        inputs: Sequence[Any],
        extras: Extras,
        parts: Sequence[Any],
    ) -> None:
        """Applies the epilogue to adjacent sums of a row, rounds once, stores what is not clipped."""
        row, column = self._place(lane, chunk)
        dtype = DTYPES[self.config.out_dtype]
        rounded = cute.make_rmem_tensor(values.shape, dtype)
        if row < lane.window.rows and column < lane.window.columns:
            place = lane.window.row + row, lane.window.column + column
            self.visits.on_chunk(values, *place, extras, inputs, parts)
            rounded.store(values.load().to(dtype))
            lane.window.store(row, column, rounded)
            if cutlass.const_expr(self.results is not None):
                self.results.send(lane.result, chunk * LANES, rounded)
        elif cutlass.const_expr(self.results is not None):
            self.transport.pad(partial(self.results.pad, lane.result, chunk * LANES, rounded))

    def _store_parts(self, lane: Lane, chunk: Scalar, parts: Sequence[Any], extras: Extras) -> None:
        """Stores the parts of the rows of adjacent chunks from ``chunk`` on; see `Visits.store_row_parts`."""
        if self.visits.reduces:
            row, column = self._place(lane, chunk + cute.arch.lane_idx() % len(parts))
            place, exists = (lane.window.row + row, lane.window.column + column), row < lane.window.rows
            self.visits.store_row_parts(parts, *place, self.chunks.per_row, extras, exists)

    @property
    def chunks(self) -> StageChunks:
        """Returns the wire format of partials."""
        return StageChunks(self.config)
