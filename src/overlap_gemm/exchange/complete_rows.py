"""Parts of a receive role that follow `sums.Sums` and take what is known of complete rows.

Sums store the values of an epilogue's function in the output, and the parts of each row
(:mod:`overlap_gemm.device.row_parts`). Then either

- `RowValues` reduces the parts of each row and stores the value, for example a sum of squares; or
- `CompleteRows` applies `Epilogue.then`, such as an RMS norm, to what is stored.

- waits on: a count of units of `Sums` on this rank (acquire, bounded): all, or those of the piece's rows.
- produces: values of rows; or the values of complete rows, rounded once, clipped.
- signals: nothing.

No rank waits here for another one: a rank's rows are complete by its own sums.

Progress. A warp takes a unit of these parts when all sums of its CTA are taken
(:mod:`overlap_gemm.exchange.receive`). Each warp that took a sum finishes it, and counts it before it takes
anything else. A sum waits for partials only, which are sent by roles that wait for no peer. All CTAs are
resident. So the count becomes complete, whatever warps wait for it, and however late a rank sends.

Limits. The limit here is twice as long. So if a rank is missing, the wait of a sum expires first, and its
record names the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.failure import Role
from overlap_gemm.device.memory import DTYPES, LANES
from overlap_gemm.device.row_parts import await_units, leave_units, reduced, reset_count, store_rows, value_of
from overlap_gemm.device.traced import Predicate, Scalar
from overlap_gemm.exchange.copies import SHOTS
from overlap_gemm.exchange.receive import Part, ReceiveContext, Window, of_chunk, unit_exists
from overlap_gemm.exchange.sums import Sums
from overlap_gemm.kernel.stages import StageChunks
from overlap_gemm.kernel.work import CtaTile
from overlap_gemm.spec.sharding import ceil_div

PIECE_ROWS = 8
"""Rows whose values a warp reduces at once, as in a piece of `PIECE_BYTES`."""

PIECE_BYTES = 1024
"""Bytes of a piece of `CompleteRows` in a slot: 8 rows of 64 columns of 16 bits.

When a warp gets here, others of its CTA have nothing to do. So they share its unit. A row of 8192 columns has
128 parts: a lane loads 8 parts of 4 rows each, all in flight.
"""

PARTS_IN_FLIGHT = 8
"""Loads of row values' parts that a lane has in flight."""


class RowUnit(NamedTuple):
    """A piece of complete rows.

    Attributes:
        exists: Whether its unit has elements.
        tile: Its tile.
        piece: Number of the piece in the tile.
    """

    exists: Predicate
    tile: CtaTile
    piece: Scalar


@dataclass(frozen=True)
class AfterSums(Part):
    """Base of the parts of this module: the count for which they wait.

    Attributes:
        sums: Part before it.
    """

    sums: Sums

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""
        return self.sums.config

    def await_count(
        self, context: ReceiveContext, tile: Scalar, row: Scalar, number: Scalar, word: Any
    ) -> None:
        """Waits for a count of units; all lanes. Tile and row are for the failure record."""
        call = context.call
        site = call.site(self.sums.op, Role.COMPLETE_ROWS, tile, call.exchange.rank, row)
        await_units(word, number, call.bound.times(SHOTS), site)


@dataclass(frozen=True)
class RowValues(AfterSums):
    """Values of this rank's rows, see the module. A tile of this part is `PIECE_ROWS` rows, and one unit."""

    def units(self, config: GemmConfig) -> int:
        """Returns 1."""
        return 1

    @cute.jit
    def tiles(self, context: ReceiveContext) -> Int32:
        """Returns the number of pieces; 0 if this rank sums nothing."""
        pieces = ceil_div(cute.size(context.out, mode=[0]), PIECE_ROWS)
        if self.sums.tiles(context) == 0:
            pieces = Int32(0)
        return pieces

    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> Any:
        """Returns the first row of a piece."""
        return index * PIECE_ROWS

    def await_tile(self, context: ReceiveContext, index: Scalar) -> None:
        """Waits until every unit of `Sums` is counted."""
        word, units = self.sums.visits.count(context.extras), self.sums.units_of_all(context)
        self.await_count(context, index, index * PIECE_ROWS, units, word)

    def finish(self, context: ReceiveContext, place: Scalar) -> None:
        """Reduces the parts of a piece's rows."""
        out, word = Window.unsharded(context.out), self.sums.visits.count(context.extras)
        before = leave_units(word)
        for kind, values, parts in self.sums.visits.row_values(context.extras):
            subtiles = ceil_div(out.columns, self.config.epi_tile[1])
            totals = reduced(kind, parts, PIECE_ROWS, place, out.columns, subtiles, PARTS_IN_FLIGHT)
            store_rows(values, totals, PIECE_ROWS, place, out.rows)
        reset_count(word, before, self.sums.units_of_all(context) + self.tiles(context))


@dataclass(frozen=True)
class CompleteRows(AfterSums):
    """Visits of complete rows, see the module. Its units are those of `Sums`, cut into pieces."""

    def units(self, config: GemmConfig) -> int:
        """Returns the number of pieces of a tile."""
        return config.units * self.pieces

    def tiles(self, context: ReceiveContext) -> Any:
        """Returns the number of tiles that this rank sums."""
        return self.sums.tiles(context)

    def locate(self, context: ReceiveContext, index: Scalar, unit: Scalar) -> RowUnit:
        """Returns the place of a piece; all pieces of an existing unit wait, as its rows' count expects."""
        tile = CtaTile.numbered(self.config, self.sums.order, context.work.all_tiles, index)
        exists = unit_exists(self.config, unit // self.pieces, tile, Window.unsharded(context.out))
        return RowUnit(exists, tile, unit)

    @cute.jit
    def finish(self, context: ReceiveContext, place: RowUnit) -> None:
        """Waits for the piece's rows and visits its elements."""
        if place.exists:
            self._visit(context, place)

    @cute.jit
    def _visit(self, context: ReceiveContext, place: RowUnit) -> None:
        """Visits a piece; its loads of values and of row values' parts are in flight together."""
        cfg = self.config
        chunks, number = StageChunks(cfg), cfg.lane_chunks // self.pieces
        out, rows = Window.unsharded(context.out), cfg.unit_rows // self.pieces
        begin = place.tile.row + chunks.locate(place.piece * (number * LANES))[0]
        visit = self.sums.visits.of_rows(context.extras)
        first = place.piece * (number * LANES) + cute.arch.lane_idx()
        places = [self._place(place.tile, first + c * LANES) for c in range(number)]
        last = out.rows - 1, out.columns - chunks.elements
        inside = [(cutlass.min(row, last[0]), cutlass.min(column, last[1])) for row, column in places]
        read = visit.input_registers(chunks.elements, number)
        for c in cutlass.range_constexpr(number):
            visit.load(of_chunk(read, c), *inside[c])
        word, subtiles = self.sums.visits.count(context.extras, begin), ceil_div(out.columns, cfg.epi_tile[1])
        self.await_count(context, place.tile.index, begin, subtiles, word)
        stored = cute.make_rmem_tensor((chunks.elements, number), DTYPES[cfg.out_dtype])
        for c in cutlass.range_constexpr(number):
            out.load(inside[c][0], inside[c][1], stored[(None, c)])
        before = leave_units(word)
        totals = [
            reduced(kind, parts, rows, begin, out.columns, subtiles, PARTS_IN_FLIGHT // len(visit.parts))
            for kind, parts in visit.parts
        ]
        for c in cutlass.range_constexpr(number):
            row, column = places[c]
            of_row = [value_of(of_lane, row - begin) for of_lane in totals]
            exists = (row < out.rows) & (column < out.columns)
            inputs = of_chunk(read, c)
            act_if(exists, partial(visit.store, stored[(None, c)], of_row, inputs, row, column))
        reset_count(word, before, subtiles * (1 + self.pieces))

    def _place(self, tile: CtaTile, chunk: Scalar) -> tuple[Any, Any]:
        """Returns (row, first column) in the output of a chunk of a tile."""
        row, column = StageChunks(self.config).locate(chunk)
        return tile.row + row, tile.column + column

    @property
    def pieces(self) -> int:
        """Returns the number of pieces of a unit, of at most `PIECE_BYTES`."""
        return max(self.config.unit_bytes // PIECE_BYTES, 1)


@cute.jit
def act_if(condition: Predicate, act: cutlass.Constexpr) -> None:
    """Calls ``act`` if a condition holds at run time."""
    if condition:
        act()


def with_rows(sums: Sums) -> tuple[Part, ...]:
    """Returns the parts of a receive role that sums: what the epilogue does with complete rows follows."""
    if sums.visits.has_rows:
        return sums, CompleteRows(sums)
    return (sums, RowValues(sums)) if sums.visits.reduces else (sums,)
