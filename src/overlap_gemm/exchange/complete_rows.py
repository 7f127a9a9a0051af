"""`CompleteRows`: the part of a receive role that visits complete rows, such as their RMS norm.

It follows `sums.Sums` and has the same units. The first part stores the values of an epilogue's function in
the output, and the parts of each row (:mod:`overlap_gemm.device.row_parts`). This part applies
`Epilogue.then` to what is stored.

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


class RowUnit(NamedTuple):
    """A unit of complete rows.

    Attributes:
        exists: Whether it has elements.
        tile: Its tile.
        unit: Number of the unit in the tile.
    """

    exists: Predicate
    tile: CtaTile
    unit: Scalar


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
        """Returns a unit's place."""
        tile = CtaTile.numbered(self.config, self.sums.order, context.work.all_tiles, index)
        exists = unit_exists(self.config, unit, tile, Window.unsharded(context.out))
        return RowUnit(exists, tile, unit)

    @cute.jit
    def finish(self, context: ReceiveContext, place: RowUnit) -> None:
        """Waits for the unit's rows and visits its elements."""
        if place.exists:
            self._visit(context, place)

    @cute.jit
    def _visit(self, context: ReceiveContext, place: RowUnit) -> None:
        """Visits a unit by windows of chunks; the first one's loads are in flight with those of parts."""
        cfg, call = self.config, context.call
        chunks, number, window = StageChunks(cfg), cfg.lane_chunks, self._window
        out = Window.unsharded(context.out)
        subtiles = (out.columns + (cfg.epi_tile[1] - 1)) // cfg.epi_tile[1]
        begin = place.tile.row + chunks.locate(place.unit * (number * LANES))[0]
        visits = Visits(cfg, ("complete",))
        visit = visits.of_rows(begin, context.extras)
        read = visit.input_registers(chunks.elements, window)
        for c in cutlass.range_constexpr(window):
            visit.load(of_chunk(read, c), *self._inside(place, out, c))
        site = call.site(self.sums.op, Role.COMPLETE_ROWS, place.tile.index, call.exchange.rank, begin)
        await_rows(visit.count, subtiles, call.bound.times(SHOTS), site)
        stored = cute.make_rmem_tensor((chunks.elements, window), DTYPES[cfg.out_dtype])
        for c in cutlass.range_constexpr(window):
            out.load(*self._inside(place, out, c), stored[(None, c)])
        before = leave_rows(visit.count)
        totals = [
            reduced(kind, parts, cfg.unit_rows, begin, out.columns, subtiles, self._parts_in_flight)
            for kind, parts in visit.parts
        ]
        for i in cutlass.range(0, number, window, unroll=1):
            if i > 0:
                for c in cutlass.range_constexpr(window):
                    inside = self._inside(place, out, i + c)
                    visits.of_rows(begin, context.extras).load(of_chunk(read, c), *inside)
                    out.load(*inside, stored[(None, c)])
            for c in cutlass.range_constexpr(window):
                row, column = self._place(place, i + c)
                of_row = [value_of(of_lane, row - begin) for of_lane in totals]
                exists = (row < out.rows) & (column < out.columns)
                inputs = of_chunk(read, c)
                store = visits.of_rows(begin, context.extras).store  # a visit is no loop's value
                act_if(exists, partial(store, stored[(None, c)], of_row, inputs, row, column))
        reset_count(visits.of_rows(begin, context.extras).count, before, subtiles)

    def _place(self, place: RowUnit, chunk: Scalar) -> tuple[Any, Any]:
        """Returns (row, first column) in the output of a lane's chunk of a unit."""
        first = place.unit * (self.config.lane_chunks * LANES) + cute.arch.lane_idx()
        row, column = StageChunks(self.config).locate(first + chunk * LANES)
        return place.tile.row + row, place.tile.column + column

    def _inside(self, place: RowUnit, out: Window, chunk: Scalar) -> tuple[Any, Any]:
        """Returns the place of a lane's chunk, or of the output's last one in its row or column."""
        row, column = self._place(place, chunk)
        last = out.columns - StageChunks(self.config).elements
        return cutlass.min(row, out.rows - 1), cutlass.min(column, last)

    @property
    def _window(self) -> int:
        """Returns the number of chunks whose loads, of values and of inputs, are in flight."""
        return min(4 if self.config.is_swap_ab else 1, self.config.lane_chunks)

    @property
    def _parts_in_flight(self) -> int:
        """Returns the number of loads of parts in flight: swapped kernels have the most registers.

        A row of 8192 columns has 128 parts. With units of 4, 16 and 32 rows a lane loads 4, 16 and 32.
        """
        if self.config.is_swap_ab:
            return 16
        return 2 if self.config.receive_role_is_register_limited else 4

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""
        return self.sums.config


@cute.jit
def act_if(condition: Predicate, act: cutlass.Constexpr) -> None:
    """Calls ``act`` if a condition holds at run time."""
    if condition:
        act()
