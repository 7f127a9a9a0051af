"""The roles every fused GEMM shares. Each owns its loop and its pipeline states.

A pipeline state advanced in a callee and not returned is silently lost, so functions that advance one return
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.work import Work


@cute.jit
def load_role(mainloop: Any, op: Any, res: Any, ops: Any, work: Work) -> None:
    """Waits on ``ab`` empty; produces the A and B tiles of this cluster's work list."""
    tile_m, tile_n = mainloop.config.cluster_tile
    state = mainloop.load_state()
    for j in cutlass.range(work.num_tiles, unroll=1):
        place = work.place(op.order, j)
        row = place.shard * work.shard_rows + place.m * tile_m
        state = mainloop.load_tile(res, ops, state, row, place.n * tile_n)
    mainloop.load_tail(res, state)


@cute.jit
def epilogue_role(
    mainloop: Any, op: Any, res: Any, ops: Any, ring: Any, stages: Any, work: Work, context: Any, group: Int32
) -> None:
    """Waits on the accumulator and on the ring's empty stages; produces the ring's stages.

    With two groups (ping-pong), each takes every other tile; the mainloop makes their turns at the ring
    alternate, and each group's ring state jumps over the other's subtiles.
    """
    cfg = mainloop.config
    thread, _, _ = cute.arch.thread_idx()
    thread = (thread - 32 * mainloop.first_epilogue_warp) % cfg.epilogue_threads
    state = mainloop.epilogue_state(res, ops, group)
    ring_state = ring.producer_state()
    if cutlass.const_expr(cfg.epilogue_groups > 1):
        ring_state.advance(group * cfg.subtiles)
    for j in cutlass.range(group, work.num_tiles, cfg.epilogue_groups, unroll=1):
        place = work.place(op.order, j)
        tile = CtaTile.at(cfg, place)
        own = j >= work.num_foreign
        acc, state = mainloop.accumulate(res, ops, state)
        op.await_partials(context, tile, own)
        writer = SubtileWriter(mainloop, op, res, ops, ring, stages, context, thread, tile, own)
        state, ring_state = mainloop.drain(res, acc, state, writer, ring_state)
        if cutlass.const_expr(cfg.epilogue_groups > 1):
            ring_state.advance((cfg.epilogue_groups - 1) * cfg.subtiles)


@dataclass(frozen=True)
class SubtileWriter:
    """Moves one subtile from registers to the ring: combine, acquire a stage, write, commit.

    Attributes:
        mainloop: knows how its fragments lie.
        op: decides what becomes of them.
        res: the mainloop's resources.
        ops: operands.
        ring: the ring.
        stages: the ring's stages.
        context: the op's run-time values.
        thread: index in the epilogue group.
        tile: the CTA tile.
        own: whether this rank owns the tile.
    """

    mainloop: Any
    op: Any
    res: Any
    ops: Any
    ring: Any
    stages: Any
    context: Any
    thread: Any
    tile: Any
    own: Any

    @cute.jit
    def write(
        self, fragment: cute.Tensor, subtile: Any, state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Writes this thread's fp32 values of ``subtile``; returns the ring state behind it."""
        self.op.combine(self, fragment, subtile)
        self.ring.acquire(state)
        self.op.store(self, fragment, state.index)
        self.ring.commit(state)
        state.advance()
        return state


class CtaTile(NamedTuple):
    """One CTA's part of a cluster tile.

    Attributes:
        index: index in the shard, counted in CTA tiles: names its slot and flag.
        row: first row in the shard.
        column: first column.
        owner: rank that owns the shard.
    """

    index: Any
    row: Any
    column: Any
    owner: Any

    @staticmethod
    def at(config: GemmConfig, place: Any) -> CtaTile:
        """The calling CTA's part of the cluster tile at ``place``."""
        x, y, _ = cute.arch.block_idx()
        x = x % config.cluster[0]
        return CtaTile(
            place.index * config.cluster_size + y * config.cluster[0] + x,
            (place.m * config.cluster[0] + x) * config.cta_tile[0],
            (place.n * config.cluster[1] + y) * config.cta_tile[1],
            place.shard,
        )


@dataclass(frozen=True)
class OwnTileSender:
    """Sends own tiles: one clipped TMA tensor store per subtile into the caller's output (a ``TileSender``).

    Attributes:
        config: the kernel's configuration.
        op: supplies the order.
        work: this cluster's work.
        first: first own position among this cluster's tiles.
        tma: TMA store atom of the output.
        output: the output's coordinate tensor (rows, cols).
        stages: the ring's stages.
    """

    config: GemmConfig
    op: Any
    work: Work
    first: Any
    tma: Any
    output: Any
    stages: Any

    def locate(self, tile: Any) -> CtaTile:
        """The CTA tile's place in the shard."""
        return CtaTile.at(self.config, self.work.place(self.op.order, self.first + tile))

    @cute.jit
    def send(self, place: CtaTile, subtile: Int32, stage: Int32) -> None:
        """One TMA tensor store; rows and columns past the output's end are clipped by the hardware."""
        epi_m, epi_n = self.config.epi_tile
        tiles = cute.zipped_divide(self.output, self.config.epi_tile)
        source, target = cpasync.tma_partition(
            self.tma, 0, cute.make_layout(1), cute.group_modes(self.stages.tiled, 0, 2), tiles
        )
        m = place.row // epi_m + subtile // self.config.epi_columns
        n = place.column // epi_n + subtile % self.config.epi_columns
        cute.copy(self.tma, source[(None, stage)], target[(None, (m, n))])

    def publish(self, tile: Any) -> None:
        """Nobody waits for own tiles but the kernel's end."""
