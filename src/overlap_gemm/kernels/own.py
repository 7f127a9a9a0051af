"""Own tiles reduced where they are: the epilogue adds a rank's own partial to its peers', and stores the sum.

For reduce-scatters whose own tiles come last (`GemmConfig.own_last`). Such a tile goes to no slot and has no
flag: its subtiles are rounded into the ring's stage, as everybody's are, and summed from there.

waits on    the flags of all other sources of the tile, by each warp of the epilogue group, at the tile's
            first subtile (acquire, system scope, bounded)
produces    the sum of the sources' partials in rank order in fp32, the own one from the stage, the epilogue
            applied, rounded once: the same bits as the receive role makes of the slots (`kernels.sums`)
signals     nobody; the stage goes through the ring, in which the comm lane only passes it on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES
from overlap_gemm.device.traced import Extras, Scalar
from overlap_gemm.kernels.call import Call
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import StageChunks, Visits
from overlap_gemm.kernels.receive import Window
from overlap_gemm.kernels.send import place_of
from overlap_gemm.kernels.work import CtaTile, Work
from overlap_gemm.transports.base import Transport

GROUP_BARRIER = 3
"""The named barrier at which an epilogue group meets: its groups take turns at their epilogues."""


@dataclass(frozen=True)
class OwnSums:
    """How own tiles are summed: see the module.

    Attributes:
        config: the kernel's configuration.
        code: the op, for failure records.
        transport: how the others' partials arrive.
    """

    config: GemmConfig
    code: int
    transport: Transport

    @cute.jit
    def finish(
        self,
        call: Call,
        work: Work,
        out: cute.Tensor,
        extras: Extras,
        stage: cute.Tensor,
        tile: CtaTile,
        subtile: Int32,
        thread: Int32,
    ) -> None:
        """All threads of an epilogue group, each of which has written its part of the stage.

        Args:
            call: the call's run-time values.
            work: this cluster's work.
            out: the output.
            extras: what the epilogue's visitors read, or None.
            stage: the subtile, as a block.
            tile: of which rank whatever; nothing is done but for an own one.
            subtile: which of the tile's.
            thread: index in the group.
        """
        if tile.owner == call.exchange.rank:
            if subtile == 0:
                self.transport.await_partials(call, self.code, tile.index, itself=False)
            cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=self.config.epilogue_threads)
            window, chunks = Window.whole(out), StageChunks(self.config)
            row, column = chunks.locate(subtile * chunks.per_subtile)
            if tile.row + row < window.rows and tile.column + column < window.columns:
                self._sum(call, work, window, extras, stage, tile, subtile, thread)

    @cute.jit
    def _sum(
        self,
        call: Call,
        work: Work,
        window: Window,
        extras: Extras,
        stage: cute.Tensor,
        tile: CtaTile,
        subtile: Int32,
        thread: Int32,
    ) -> None:
        """A subtile of which some is in the output: the others have sent its first chunk, and all in it."""
        cfg, chunks, (rank, world) = self.config, StageChunks(self.config), call.exchange[1:3]
        number, first = chunks.per_subtile // cfg.epilogue_threads, subtile * chunks.per_subtile
        slots = call.base + place_of(cfg, call, work.slots, tile.index, 0) + first * CHUNK_BYTES
        own = cute.zipped_divide(stage, (chunks.elements,))
        totals = cute.make_rmem_tensor((chunks.elements, number), Float32)
        totals.fill(0.0)
        for source in cutlass.range(world, unroll=1):
            loaded = cute.make_rmem_tensor((chunks.elements, number), DTYPES[cfg.slot_dtype])
            slot = slots + Int64(source) * (Int64(work.slots) * cfg.tile_bytes)
            for c in cutlass.range_constexpr(number):
                chunk = Int32(c * cfg.epilogue_threads) + thread
                if source == rank:
                    cute.autovec_copy(own[(None, chunk)], loaded[(None, c)])
                else:
                    row, column = self._place(tile, first + chunk)
                    exists = (row < window.rows) & (column < window.columns)
                    sent = cutlass.select_(exists, chunk, Int32(0))
                    self.transport.load(slot + sent * CHUNK_BYTES, loaded[(None, c)])
            totals.store(totals.load() + loaded.load().to(Float32))
        for c in cutlass.range_constexpr(number):
            row, column = self._place(tile, first + c * cfg.epilogue_threads + thread)
            if row < window.rows and column < window.columns:
                values, dtype = totals[(None, c)], DTYPES[cfg.out_dtype]
                Visits(cfg, ("complete",)).on_chunk(values, row, column, extras)
                rounded = cute.make_rmem_tensor(values.shape, dtype)
                rounded.store(values.load().to(dtype))
                window.store(row, column, rounded)

    def _place(self, tile: CtaTile, chunk: Scalar) -> tuple[Any, Any]:
        row, column = StageChunks(self.config).locate(chunk)
        return tile.row + row, tile.column + column


@dataclass(frozen=True)
class OwnTile:
    """A tile that may be an own one, and what it is finished with: arguments of `OwnSums.finish`."""

    sums: OwnSums
    call: Any
    work: Any
    out: Any
    extras: Extras
    tile: Scalar

    def finish(self, stage: Any, subtile: Scalar, thread: Scalar) -> None:
        """See `OwnSums.finish`."""
        given = (self.call, self.work, self.out, self.extras)
        self.sums.finish(*given, stage, self.tile, Int32(subtile), Int32(thread))
