"""The receive role: finishes what has arrived, alongside the mainloop.

Its work is one *part* or several, one after the other (:mod:`overlap_gemm.exchange.sums`,
:mod:`overlap_gemm.exchange.copies`). A part is a list of CTA tiles, cut into units of at most 4 KiB of a
slot. A part's tiles are numbered in the order in which they arrive. CTA ``c`` of ``C`` finishes tiles ``c,
c + C, c + 2C, ...``, whichever CTA computed them. The warps of a CTA take its units one by one, by a counter
in shared memory (`CtaCounters.taken`). The receive warps take units from the start. The epilogue warps take
units after they have written their last tile: the remaining units are the tail of the call.

Protocol of a unit, by one warp:

- waits on: the flags of the ranks that send its data (acquire, system scope, bounded). With LL packets
  (:mod:`overlap_gemm.device.ll_words`), each lane waits for its data.
- produces: complete values in the caller's output, clipped.
- signals: nothing; but sums that are sent on to other ranks release a flag in each of them.
- freed by: the call's end, see `exchange.call`.

A warp takes no unit of a part before all units of earlier parts of its CTA are taken. So a unit may wait for
units of an earlier part, on any rank: a warp that took such a unit finishes it before it takes another.

The result of a unit does not depend on the warp that takes it: results are bitwise repeatable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.memory import DTYPES, LANES, load_run, store_run
from overlap_gemm.device.traced import Address, Extras, Scalar
from overlap_gemm.exchange.call import Call
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.shared_words import CtaCounters, count
from overlap_gemm.kernel.stages import StageChunks, has_empty_subtiles
from overlap_gemm.kernel.work import CtaTile, Work, cta_number, num_ctas


class ReceiveContext(NamedTuple):
    """Values that all units of a call share.

    Attributes:
        call: Run-time values of the call.
        work: Work of this cluster.
        out: Output.
        extras: Operands of the epilogue's visitors, or None.
    """

    call: Any
    work: Any
    out: Any
    extras: Extras


class Part(ABC):
    """Base of the parts: one kind of units. Each method is called by all lanes of a warp."""

    def units(self, config: GemmConfig) -> int:
        """Returns the number of units of a tile: those of its slot."""
        return config.units

    @abstractmethod
    def tiles(self, context: ReceiveContext) -> Any:
        """Returns the number of CTA tiles of the part, of all CTAs together."""

    @abstractmethod
    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> Any:
        """Returns the argument of `finish` for a unit of the part's tile ``index``, before it arrives."""

    def await_tile(self, context: ReceiveContext, index: Scalar) -> None:  # noqa: B027
        """Waits for what all units of the part's tile ``index`` need."""

    @abstractmethod
    def finish(self, context: ReceiveContext, place: Any) -> None:
        """Finishes the unit that was located, as soon after the wait as possible."""

    def end(self, context: ReceiveContext, number: Scalar) -> None:  # noqa: B027
        """Ends this warp's part, of which it finished so many units; it takes no more."""


@dataclass(frozen=True)
class Receiver:
    """The receive role of an op, see the module.

    Attributes:
        config: The kernel's configuration.
        parts: Parts to finish, in order.
    """

    config: GemmConfig
    parts: tuple[Part, ...]

    with_epilogue = True

    @cute.jit
    def __call__(
        self, call: Call, work: Work, counters: CtaCounters, out: cute.Tensor, extras: Extras
    ) -> None:
        """Runs one warp's loop over the units that it takes."""
        if cutlass.const_expr(len(self.parts) > 1):
            call = Call.begin(call.exchange)  # epilogue warps lack the registers to keep it meanwhile
        context = ReceiveContext(call, work, out, extras)
        unit, first = count(counters.taken), Int32(0)
        for part in self.parts:
            unit, first = self._finish(part, context, counters, unit, first)

    @cute.jit
    def _finish(
        self,
        part: cutlass.Constexpr,
        context: ReceiveContext,
        counters: CtaCounters,
        unit: Int32,
        first: Int32,
    ) -> tuple[Int32, Int32]:
        """Finishes units of a part, numbered from ``first``; returns the last one taken and the end."""
        units = cutlass.const_expr(part.units(self.config))
        cta, ctas = cta_number(), num_ctas()
        end = first + (part.tiles(context) - cta + ctas - 1) // ctas * units
        arrived, number = Int32(-1), Int32(0)
        while unit < end:
            index = cta + (unit - first) // units * ctas
            place = part.locate(context, index, (unit - first) % units)
            if index != arrived:
                part.await_tile(context, index)
                arrived = index
            part.finish(context, place)
            unit, number = count(counters.taken), number + 1
        part.end(context, number)
        return unit, end


class Window(NamedTuple):
    """Part of the output that the tiles of one source fill.

    Attributes:
        address: ``Int64``: address of its first element.
        rows: Number of rows.
        columns: Number of columns, a multiple of a chunk's.
        pitch: Elements from row to row.
        row: Row of the output that is its first one.
        column: Column of the output that is its first one.
    """

    address: Address
    rows: Scalar
    columns: Scalar
    pitch: Any
    row: Scalar
    column: Scalar

    @staticmethod
    def of(out: cute.Tensor, row: Scalar, column: Scalar, rows: Scalar, columns: Scalar) -> Window:
        """Returns ``rows`` x ``columns`` of ``out`` from ``(row, column)``."""
        offset = (Int64(row) * out.stride[0] + column) * (out.element_type.width // 8)
        return Window(out.iterator.toint() + offset, rows, columns, out.stride[0], row, column)

    @staticmethod
    def either(condition: Any, one: Window, other: Window) -> Window:
        """Returns ``one`` if the condition holds, else ``other``; they have equal rows and first columns."""

        def select(of: Any, field: str) -> Any:
            return cutlass.select_(condition, of(getattr(one, field)), of(getattr(other, field)))

        address, pitch = select(Int64, "address"), select(Int64, "pitch")
        return other._replace(address=address, columns=select(Int32, "columns"), pitch=pitch)

    @staticmethod
    def unsharded(out: cute.Tensor) -> Window:
        """Returns all of ``out``."""
        return Window.of(out, 0, 0, cute.size(out, mode=[0]), cute.size(out, mode=[1]))

    @staticmethod
    def shard(out: cute.Tensor, work: Work, rank: Scalar) -> Window:
        """Returns the shard of ``out`` that ``rank`` owns, which is not empty."""
        shards = work.shards
        row, column = rank * shards.row_step, rank * shards.col_step
        rows = cutlass.min(shards.rows, cute.size(out, mode=[0]) - row)
        return Window.of(out, row, column, rows, cutlass.min(shards.cols, cute.size(out, mode=[1]) - column))

    def store(self, row: Scalar, column: Scalar, values: cute.Tensor) -> None:
        """Stores adjacent values of a row inside the window."""
        store_run(self._at(row, column, values), values)

    def load(self, row: Scalar, column: Scalar, values: cute.Tensor) -> None:
        """Loads adjacent values of a row inside the window."""
        load_run(self._at(row, column, values), values)

    def _at(self, row: Scalar, column: Scalar, values: cute.Tensor) -> Any:
        return self.address + (Int64(row) * self.pitch + column) * (values.element_type.width // 8)


def unit_exists(config: GemmConfig, unit: Scalar, tile: CtaTile, window: Window) -> Any:
    """Returns whether the unit has a row and its subtile a column in the window.

    Other units are not sent (`Destination`).
    """
    chunks, first = StageChunks(config), unit * (config.lane_chunks * LANES)
    row, _ = chunks.locate(first)
    exists = tile.row + row < window.rows
    if has_empty_subtiles(config):
        exists = exists & (chunks.first_column(first) < window.columns - tile.column)
    return exists


@cute.jit
def copy_unit(
    config: cutlass.Constexpr,
    transport: cutlass.Constexpr,
    arrival: Any,
    address: Int64,
    unit: Int32,
    tile: CtaTile,
    window: Window,
    source: Int32,
) -> None:
    """Stores a unit of complete values into the output; all lanes.

    Args:
        config: The kernel's configuration.
        transport: Transport by which the values have arrived.
        arrival: Arrival of the tile, as in `Transport.arrival`.
        address: Address of the tile's slot: chunks of the output's type in the places of `StageChunks`.
        unit: Number of the unit in the tile.
        tile: Place of the tile in ``window``.
        window: Window of the output.
        source: Rank that sent the values.
    """
    chunks, dtype = StageChunks(config), DTYPES[config.out_dtype]
    chunk_bytes = chunks.elements * dtype.width // 8
    number = config.lane_chunks
    first = unit * (number * LANES) + cute.arch.lane_idx()
    loaded = cute.make_rmem_tensor((chunks.elements, number), dtype)
    for c in cutlass.range_constexpr(number):
        transport.load(address + (first + c * LANES) * chunk_bytes, loaded[(None, c)])
    places = partial(_chunks, address, first, chunk_bytes, number)
    transport.take(arrival, places, loaded, [source] * number)
    for c in cutlass.range_constexpr(number):
        row, column = _place(chunks, tile, first + c * LANES)
        if row < window.rows and column < window.columns:
            window.store(row, column, loaded[(None, c)])


LOADS_IN_FLIGHT = 8
"""Loads of 16 bytes, of values and of the epilogue's inputs, that a lane has in flight in `visit_unit`."""


@cute.jit
def visit_unit(
    config: cutlass.Constexpr,
    transport: cutlass.Constexpr,
    visits: cutlass.Constexpr,
    arrival: Any,
    address: Int64,
    unit: Int32,
    tile: CtaTile,
    window: Window,
    source: Int32,
    extras: Extras,
) -> None:
    """Visits a unit of complete sums and stores it into the output; all lanes.

    Args:
        config: The kernel's configuration.
        transport: Transport by which the values have arrived.
        visits: Visits of complete sums, without outputs.
        arrival: Arrival of the tile, as in `Transport.arrival`.
        address: Address of the tile's slot, as in `copy_unit`.
        unit: Number of the unit in the tile.
        tile: Place of the tile in ``window``.
        window: Window of the output.
        source: Rank that sent the values.
        extras: Operands of the epilogue's visitors.
    """
    chunks, dtype = StageChunks(config), DTYPES[config.out_dtype]
    chunk_bytes, number = chunks.elements * dtype.width // 8, config.lane_chunks
    step = _chunks_in_flight(number, visits)
    for i in cutlass.range(0, number, step, unroll=1):
        first = (unit * number + i) * LANES + cute.arch.lane_idx()
        loaded = cute.make_rmem_tensor((chunks.elements, step), dtype)
        inputs = visits.input_registers(chunks.elements, step)
        for c in cutlass.range_constexpr(step):
            transport.load(address + (first + c * LANES) * chunk_bytes, loaded[(None, c)])
            row, column = _place(chunks, tile, first + c * LANES)
            visits.load_chunk(of_chunk(inputs, c), window.row + row, window.column + column, extras)
        places = partial(_chunks, address, first, chunk_bytes, step)
        transport.take(arrival, places, loaded, [source] * step)
        for c in cutlass.range_constexpr(step):
            row, column = _place(chunks, tile, first + c * LANES)
            if row < window.rows and column < window.columns:
                values = cute.make_rmem_tensor(chunks.elements, cutlass.Float32)
                values.store(loaded[(None, c)].load().to(cutlass.Float32))
                at = window.row + row, window.column + column
                visits.on_chunk(values, *at, extras, of_chunk(inputs, c))
                rounded = cute.make_rmem_tensor(chunks.elements, dtype)
                rounded.store(values.load().to(dtype))
                window.store(row, column, rounded)


def _chunks_in_flight(number: int, visits: Visits) -> int:
    """Returns the number of chunks, a divisor of ``number``, whose loads are in flight in `visit_unit`."""
    most = max(LOADS_IN_FLIGHT // (1 + visits.num_loads), 1)
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)


def of_chunk(inputs: Sequence[Any], chunk: int) -> tuple[Any, ...]:
    """Returns the registers of one chunk of each input of the epilogue."""
    return tuple([one[(None, chunk)] for one in inputs])


def _place(chunks: StageChunks, tile: CtaTile, chunk: Scalar) -> tuple[Any, Any]:
    """Returns (row, first column) in the tile's window of a chunk."""
    row, column = chunks.locate(chunk)
    return tile.row + row, tile.column + column


def _chunks(address: Address, first: Scalar, chunk_bytes: int, number: int) -> list[Any]:
    """Returns the addresses of a lane's chunks of a unit."""
    return [address + (first + c * LANES) * chunk_bytes for c in range(number)]
