"""Own tiles reduced where they are: the epilogue adds a rank's own partial to its peers', and stores the sum.

For reduce-scatters, and the first half of two-shot all-reduces, whose own tiles come last
(`GemmConfig.own_last`). Such a tile goes to no slot and has no flag: its subtiles are rounded into the ring's
stage, as everybody's are, and summed from there.

waits on    the flags of all other sources of the tile, by each warp of the epilogue group, at the tile's
            first subtile (acquire, system scope, bounded)
produces    the sum of the sources' partials in rank order in fp32, the own one from the stage, the epilogue
            applied, rounded once: the same bits as the receive role makes of the slots (`kernels.sums`)
signals     nobody; the stage goes through the ring. Of a reduce-scatter the sum is stored in the output, and
            the comm lane only passes the stage on; else the sum is in the stage, from which the comm lane
            sends it (`exchanging.TileExchange.own_sender`): the fence of the ring's commit is after it
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
from overlap_gemm.kernels.orders import DealtShards, OwnTilesLast
from overlap_gemm.kernels.receive import Window
from overlap_gemm.kernels.send import place_of
from overlap_gemm.kernels.work import CtaTile, Work
from overlap_gemm.transports.base import Transport

GROUP_BARRIER = 3
"""The named barrier at which an epilogue group meets: its groups take turns at their epilogues."""


def check_own_last(config: GemmConfig, transport: Transport) -> None:
    """Raises ValueError for own tiles that the transport wants in their slots."""
    if config.own_last and not transport.takes_own_sums():
        way = type(transport).__name__
        raise ValueError(f"own_last is for tiles sent by peer_bulk to everybody; they go by {way}")


def dealt_to_owners(config: GemmConfig) -> DealtShards | OwnTilesLast:
    """The order of partials: owners in turn, the own tiles among the others or last."""
    return (OwnTilesLast if config.own_last else DealtShards)(config.raster_group)


@dataclass(frozen=True)
class OwnSums:
    """How own tiles are summed: see the module.

    Attributes:
        config: the kernel's configuration.
        code: the op, for failure records.
        transport: how the others' partials arrive.
        go_on: whether sums stay in the stage, in the output's type, which is then the slots', and the
            output is that of all owners; else they are stored in it, which is this rank's alone.
    """

    config: GemmConfig
    code: int
    transport: Transport
    go_on: bool = False

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
            chunks, window = StageChunks(self.config), Window.whole(out)
            if cutlass.const_expr(self.go_on):
                window = Window.shard(out, work, tile.owner)
            row, column = chunks.locate(subtile * chunks.per_subtile)
            if tile.row + row < window.rows and tile.column + column < window.columns:
                number = chunks.per_subtile // self.config.epilogue_threads
                together = 1 if self.config.receives_with_few else number  # else kernels spill
                for c in cutlass.range(0, number, together, unroll=1):
                    at = c * self.config.epilogue_threads + thread
                    self._sum(call, work, window, extras, stage, tile, subtile, at, together)

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
        number: cutlass.Constexpr,
    ) -> None:
        """``number`` chunks a thread, ``thread`` the first, of a subtile of which some is in the output.

        The others have sent the subtile's first chunk, and all that are in the output.
        """
        cfg, chunks, (rank, world) = self.config, StageChunks(self.config), call.exchange[1:3]
        first = subtile * chunks.per_subtile
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
            chunk = Int32(c * cfg.epilogue_threads) + thread
            row, column = self._place(tile, first + chunk)
            if row < window.rows and column < window.columns:
                values, dtype = totals[(None, c)], DTYPES[cfg.out_dtype]
                visits = Visits(cfg, ("complete",))
                visits.on_chunk(values, window.row + row, window.column + column, extras)
                rounded = cute.make_rmem_tensor(values.shape, dtype)
                rounded.store(values.load().to(dtype))
                if cutlass.const_expr(self.go_on):
                    cute.autovec_copy(rounded, own[(None, chunk)])
                else:
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
