"""The receive role: finishes what has arrived, beside the mainloop.

What there is to finish is one *part* or several, one behind the other (:mod:`overlap_gemm.kernels.sums`,
:mod:`overlap_gemm.kernels.copies`). A part is a list of CTA tiles, dealt to the CTAs in the order in which
they come, whoever computes them, and cut into units of at most 4 KiB of a slot. The warps of a CTA take its
units one by one: the receive warps from the start, and the epilogue warps once they have written their last
tile, since what is left then is the tail of the call.

Protocol of a unit, by one warp:

    waits on    the flags of those who send what it needs (acquire, system scope, bounded)
    produces    complete values in the caller's output, clipped
    signals     nobody; but sums that go on to other ranks release a flag in each of them
    freed by    the call's end: `kernels.call`

A warp takes no unit of a part before all of the parts before it are taken. So a unit may wait for units of
earlier parts, of any rank: whoever took those waits for no later part.

Whoever takes a unit, what it produces is the same: results are bitwise repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.device.failure import Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, global_pointer, store_run
from overlap_gemm.kernels.call import Call, Tally, count
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import StageChunks
from overlap_gemm.kernels.work import CtaTile, Work, cta_number, num_ctas

LANES = 32


class Given(NamedTuple):
    """What every unit of a call is finished with.

    Attributes:
        call: the call's run-time values.
        work: this cluster's work.
        out: the output.
        bias: the bias, or None.
    """

    call: Any
    work: Any
    out: Any
    bias: Any


class Part(Protocol):
    """One kind of units; each method is called by all lanes of a warp."""

    def tiles(self, given: Given) -> Any:
        """CTA tiles of the part, of all CTAs together."""

    def await_tile(self, given: Given, index: Any) -> None:
        """Waits for what all units of the part's tile ``index`` need."""

    def finish(self, given: Given, index: Any, unit: Any) -> None:
        """Finishes one unit of the tile."""


@dataclass(frozen=True)
class Receiver:
    """The receive role of an op: see the module.

    Attributes:
        config: the kernel's configuration.
        parts: what there is to finish.
    """

    config: GemmConfig
    parts: tuple[Part, ...]

    with_epilogue = True

    @cute.jit
    def __call__(self, call: Call, work: Work, tally: Tally, out: cute.Tensor, bias: Any) -> None:
        """One warp's loop over the units that it takes."""
        given, unit, first = Given(call, work, out, bias), count(tally.taken), Int32(0)
        for part in self.parts:
            unit, first = self._finish(part, given, tally, unit, first)

    @cute.jit
    def _finish(
        self,
        part: cutlass.Constexpr,
        given: Given,
        tally: Tally,
        unit: Int32,
        first: Int32,
    ) -> tuple[Int32, Int32]:
        """The units of one part, numbered from ``first``; returns the one taken last and the end of these."""
        cfg = self.config
        cta, ctas = cta_number(), num_ctas()
        end = first + (part.tiles(given) - cta + ctas - 1) // ctas * cfg.units
        arrived = Int32(-1)
        while unit < end:
            index = cta + (unit - first) // cfg.units * ctas
            if index != arrived:
                part.await_tile(given, index)
                arrived = index
            part.finish(given, index, (unit - first) % cfg.units)
            unit = count(tally.taken)
        return unit, end


class Window(NamedTuple):
    """What the tiles of one source fill in the output.

    Attributes:
        address: ``Int64``: of its first element.
        rows: its rows.
        columns: its columns, a multiple of a chunk's.
        pitch: elements from row to row.
    """

    address: Any
    rows: Any
    columns: Any
    pitch: Any

    @staticmethod
    def of(out: cute.Tensor, row: Any, column: Any, rows: Any, columns: Any) -> Window:
        """``rows`` x ``columns`` of ``out`` from ``(row, column)``."""
        offset = (Int64(row) * out.stride[0] + column) * (out.element_type.width // 8)
        return Window(out.iterator.toint() + offset, rows, columns, out.stride[0])

    @staticmethod
    def whole(out: cute.Tensor) -> Window:
        """All of ``out``."""
        return Window.of(out, 0, 0, cute.size(out, mode=[0]), cute.size(out, mode=[1]))

    @staticmethod
    def shard(out: cute.Tensor, work: Work, rank: Any) -> Window:
        """The rows of ``out`` that ``rank`` owns; it owns some."""
        first = rank * work.shard_rows
        rows = cutlass.min(work.shard_rows, cute.size(out, mode=[0]) - first)
        return Window.of(out, first, 0, rows, cute.size(out, mode=[1]))

    def store(self, row: Any, column: Any, values: cute.Tensor) -> None:
        """Stores neighbouring values of a row, inside."""
        width = values.element_type.width // 8
        store_run(self.address + (Int64(row) * self.pitch + column) * width, values)


def unit_exists(config: GemmConfig, unit: Any, tile: CtaTile, window: Window) -> Any:
    """Whether some row of the unit lies in the window: no other unit is sent (`send.Parcel`)."""
    row, _ = StageChunks(config).locate(unit * (config.lane_chunks * LANES))
    return tile.row + row < window.rows


@cute.jit
def await_result(
    call: Call,
    op: cutlass.Constexpr,
    flag: Int32,
    tile: Int32,
    source: Int32,
    word: cutlass.Constexpr,
    waits: cutlass.Constexpr = 1,
) -> None:
    """All lanes: waits for flag number ``flag`` of ``source``, a ``word``; a failure record says ``tile``.

    ``waits`` bounds in a row, since ``source`` itself may wait for others first: so the rank that is named is
    the one that is missing, not one that waits for it.
    """
    if cute.arch.lane_idx() == 0:
        bound = call.bound._replace(timeout_ns=call.bound.timeout_ns * waits)
        site = call.site(op, Role.RECEIVE_RESULT, tile, source, flag * call.exchange.world + source)
        wait_flag(call.flag(call.base, flag, source), call.epoch, bound, site, word)
    cute.arch.sync_warp()


@cute.jit
def copy_unit(config: cutlass.Constexpr, address: Int64, unit: Int32, tile: CtaTile, window: Window) -> None:
    """All lanes: stores a unit of complete values, which has arrived, into the output.

    Args:
        config: the kernel's configuration.
        address: of the tile's slot: chunks of the output's type where `StageChunks` has them.
        unit: which of the tile's.
        tile: where it lies in ``window``.
        window: of the output.
    """
    chunks, dtype = StageChunks(config), DTYPES[config.out_dtype]
    first = unit * (config.lane_chunks * LANES) + cute.arch.lane_idx()
    loaded = cute.make_rmem_tensor((chunks.elements, config.lane_chunks), dtype)
    for c in cutlass.range_constexpr(config.lane_chunks):
        at = address + (first + c * LANES) * (chunks.elements * dtype.width // 8)
        source = global_pointer(dtype, at, min(CHUNK_BYTES, chunks.elements * dtype.width // 8))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(chunks.elements)), loaded[(None, c)])
    for c in cutlass.range_constexpr(config.lane_chunks):
        row, column = chunks.locate(first + c * LANES)
        row, column = tile.row + row, tile.column + column
        if row < window.rows and column < window.columns:
            window.store(row, column, loaded[(None, c)])
