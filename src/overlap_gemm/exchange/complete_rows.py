"""`CompleteRows`: the part of a receive role that visits complete rows, such as their RMS norm.

It follows `sums.Sums` and has the same units, cut into pieces. The first part stores the values of an
epilogue's function in the output, and the parts of each row (:mod:`overlap_gemm.device.row_parts`). This part
applies `Epilogue.then` to what is stored.

- waits on: the count of the unit's rows on this rank (acquire, bounded): every unit of the rows is summed.
- produces: the values of complete rows, rounded once, clipped.
- signals: nothing.

Every rank sums all rows (one-shot), so no rank waits here for another one.

Progress. A warp takes a unit of this part when all sums of its CTA are taken
(:mod:`overlap_gemm.exchange.receive`). Each warp that took a sum finishes it before it takes anything else.
A sum waits for partials only, which are sent by roles that wait for no peer. All CTAs are resident. So every
count becomes complete, whatever warps wait for it, and however late a rank sends.

Limits. The limit here is twice as long. So if a rank is missing, the wait of a sum expires first, and its
record names the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.failure import Role
from overlap_gemm.device.memory import DTYPES, LANES
from overlap_gemm.device.row_parts import await_rows, leave_rows, reduced, reset_count, value_of
from overlap_gemm.device.traced import Predicate, Scalar
from overlap_gemm.exchange.copies import SHOTS
from overlap_gemm.exchange.receive import ReceiveContext, Window, of_chunk, unit_exists
from overlap_gemm.exchange.sums import Sums
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.stages import StageChunks
from overlap_gemm.kernel.work import CtaTile

PIECE_BYTES = 1024
"""Bytes of a piece in a slot: 8 rows of 64 columns of 16 bits.

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
class CompleteRows:
    """Visits of complete rows, see the module (a ``receive.Part``).

    Attributes:
        sums: Part before it.
    """

    sums: Sums

    def tiles(self, context: ReceiveContext) -> Any:
        """Returns the number of tiles that this rank sums."""
        return self.sums.tiles(context)

    def await_tile(self, context: ReceiveContext, index: Scalar) -> None:
        """Does nothing: each unit waits for its rows."""

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
        cfg, call = self.config, context.call
        chunks, number = StageChunks(cfg), cfg.lane_chunks // self.pieces
        out, rows = Window.unsharded(context.out), cfg.unit_rows // self.pieces
        subtiles = (out.columns + (cfg.epi_tile[1] - 1)) // cfg.epi_tile[1]
        begin = place.tile.row + chunks.locate(place.piece * (number * LANES))[0]
        visit = Visits(cfg, ("complete",)).of_rows(begin, context.extras)
        first = place.piece * (number * LANES) + cute.arch.lane_idx()
        places = [self._place(place.tile, first + c * LANES) for c in range(number)]
        last = out.rows - 1, out.columns - chunks.elements
        inside = [(cutlass.min(row, last[0]), cutlass.min(column, last[1])) for row, column in places]
        read = visit.input_registers(chunks.elements, number)
        for c in cutlass.range_constexpr(number):
            visit.load(of_chunk(read, c), *inside[c])
        site = call.site(self.sums.op, Role.COMPLETE_ROWS, place.tile.index, call.exchange.rank, begin)
        await_rows(visit.count, subtiles, call.bound.times(SHOTS), site)
        stored = cute.make_rmem_tensor((chunks.elements, number), DTYPES[cfg.out_dtype])
        for c in cutlass.range_constexpr(number):
            out.load(inside[c][0], inside[c][1], stored[(None, c)])
        before = leave_rows(visit.count)
        totals = [
            reduced(kind, parts, rows, begin, out.columns, subtiles, PARTS_IN_FLIGHT)
            for kind, parts in visit.parts
        ]
        for c in cutlass.range_constexpr(number):
            row, column = places[c]
            of_row = [value_of(of_lane, row - begin) for of_lane in totals]
            exists = (row < out.rows) & (column < out.columns)
            inputs = of_chunk(read, c)
            act_if(exists, partial(visit.store, stored[(None, c)], of_row, inputs, row, column))
        reset_count(visit.count, before, subtiles * (1 + self.pieces))

    def _place(self, tile: CtaTile, chunk: Scalar) -> tuple[Any, Any]:
        """Returns (row, first column) in the output of a chunk of a tile."""
        row, column = StageChunks(self.config).locate(chunk)
        return tile.row + row, tile.column + column

    @property
    def pieces(self) -> int:
        """Returns the number of pieces of a unit, of at most `PIECE_BYTES`."""
        return max(self.config.unit_bytes // PIECE_BYTES, 1)

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""
        return self.sums.config


@cute.jit
def act_if(condition: Predicate, act: cutlass.Constexpr) -> None:
    """Calls ``act`` if a condition holds at run time."""
    if condition:
        act()
