"""The load and epilogue roles of all fused GEMMs. Each has a separate loop and separate pipeline states.

A pipeline state is a value: if a callee advances it, the caller has the old one. So functions that advance a
state return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import cutlass
from cutlass import Int32, cute, pipeline

from overlap_gemm.config.visitors import block_of
from overlap_gemm.device.registers import rematerialize
from overlap_gemm.device.result_scales import scale_blocks
from overlap_gemm.device.traced import Extras, Scalar, Stages
from overlap_gemm.epilogues import BLOCK
from overlap_gemm.kernel.loads import load_k_tiles, load_of_weight
from overlap_gemm.kernel.protocols import KernelOp, Mainloop
from overlap_gemm.kernel.split import num_early
from overlap_gemm.kernel.work import CtaTile, Work


@cute.jit
def load_role(mainloop: Mainloop, op: KernelOp, res: Any, ops: Any, more: Any, work: Work, call: Any) -> None:
    """Loads this cluster's tiles of A and B; run by the load warp.

    - waits on: ``ab`` empty, which the MMA releases; with a gate also on flags of peers, before a tile of A
      that they send.
    - signals: ``ab`` full, by TMA's transaction bytes.
    """
    tile_m, tile_n = mainloop.config.cluster_tile
    gate: Any = op.gate
    state, opened, early = mainloop.load_state(), Int32(-1), None
    if cutlass.const_expr(mainloop.config.loads_weights_early):
        early = num_early(mainloop.config, ops.b)
    for j in cutlass.range(work.num_tiles, unroll=1):
        place = work.place(op.order, j)
        if cutlass.const_expr(gate is not None):
            state, opened = gate.load(mainloop, res, ops, more, state, place, call, opened, early)
        else:
            row = place.shard * work.shards.row_step + place.m * tile_m
            col = place.shard * work.shards.col_step + place.n * tile_n
            operands = ops.of_shard(place.shard, work)
            if cutlass.const_expr(ops.others is not None):
                at = place.shard, row, place.n * tile_n
                state = load_of_weight(mainloop, res, ops, state, work.shards.weights, at, early)
            else:
                state = load_parts(mainloop, res, operands, state, row, col, early)
        if cutlass.const_expr(early is not None):
            early = Int32(0)
    mainloop.load_tail(res, state)
    if cutlass.const_expr(gate is not None):
        gate.end(call)


@cute.jit
def load_parts(
    mainloop: Mainloop,
    res: Any,
    ops: Any,
    state: pipeline.PipelineState,
    row: Int32,
    col: Int32,
    early: Any,
) -> pipeline.PipelineState:
    """Loads the cluster tile at ``row`` of A and ``col`` of B, of one matrix along K after the other.

    B's first ``early`` k tiles, which are in flight as in `load_k_tiles`, are of the first matrix.
    """
    parts = ops.parts_of_k
    for i in cutlass.range_constexpr(len(parts)):
        state = load_k_tiles(res.ab, state, *mainloop.loads(res, parts[i], row, col), early)
        early = None
    return state


@cute.jit
def epilogue_role(
    mainloop: Mainloop,
    op: KernelOp,
    res: Any,
    ops: Any,
    ring: Any,
    stages: Stages,
    work: Work,
    extras: Extras,
    group: Int32,
    call: Any,
) -> None:
    """Fills the ring with this cluster's subtiles; run by all threads of an epilogue group.

    - waits on: the accumulator, and the ring's empty stages, which the comm warp releases. If the epilogue
      reads scales gathered with A (``gate.open``), also on the flag of their shard; else on no peer.
    - signals: full stages of the ring.

    With two groups (ping-pong), each has every second tile. The mainloop lets them use the ring alternately,
    and each group's ring state skips the subtiles of the other.
    """
    cfg, gate = mainloop.config, cast(Any, op.gate)
    thread, _, _ = cute.arch.thread_idx()
    thread = (thread - 32 * mainloop.first_epilogue_warp) % cfg.epilogue_threads
    state = mainloop.epilogue_state(res, ops, group)
    ring_state, opened = ring.producer_state(), Int32(-1)
    if cutlass.const_expr(cfg.epilogue_groups > 1):
        ring_state.advance(group * cfg.stored_subtiles)
    for j in cutlass.range(group, work.num_tiles, cfg.epilogue_groups, unroll=1):
        tile = CtaTile.at(cfg, work.place(op.order, j))
        acc, state = mainloop.accumulate(res, ops, state)
        row = tile.owner * work.shards.row_step + tile.row
        column = tile.owner * work.shards.col_step + tile.column
        end: Any = None
        if cutlass.const_expr(block_of(cfg.epilogue) is not None):
            end = row + work.left(tile)[0]
        read: Any = extras
        if cutlass.const_expr(gate is not None and cfg.visits_rows):
            opened = gate.open(call, tile.owner, opened)
            read = gate.with_rows(tile, row - tile.row, extras, call)
        place = thread
        if cutlass.const_expr(cfg.sum_parts > 1):  # else values derived from it take the sums' registers
            place = rematerialize(thread)
        writer = SubtileWriter(mainloop, op, res, ops, ring, stages, read, place, row, column, end)
        state, ring_state = mainloop.drain(res, acc, state, writer, ring_state)
        if cutlass.const_expr(cfg.epilogue_groups > 1):
            ring_state.advance((cfg.epilogue_groups - 1) * cfg.stored_subtiles)


@dataclass(frozen=True)
class SubtileWriter:
    """Writer of subtiles from registers to the ring: applies the epilogue, acquires a stage, writes, commits.

    Attributes:
        mainloop: Mainloop, which defines the layout of fragments.
        op: Op, which defines the visitors.
        res: Resources of the mainloop.
        ops: Operands.
        ring: Ring that is filled.
        stages: Stages of the ring.
        extras: Operands of the epilogue's visitors, or None.
        thread: Index in the epilogue group.
        row: First row of the CTA tile in the rank's product.
        column: First column of the CTA tile in the rank's product.
        end: Row after the last one of the tile's shard; None if the result has no scales of blocks.
    """

    mainloop: Mainloop
    op: KernelOp
    res: Any
    ops: Any
    ring: Any
    stages: Stages
    extras: Extras
    thread: Scalar
    row: Scalar
    column: Scalar
    end: Any = None

    @property
    def at_once(self) -> int:
        """Returns the subtiles of the product that are visited before one is written: those of a scale."""
        cfg = self.mainloop.config
        block = block_of(cfg.epilogue)
        return cfg.subtile_step * (block // cfg.epi_tile[1] if block else 1)

    def write_all(self, joined: Sequence[Any], subtile: Scalar, state: pipeline.PipelineState) -> Any:
        """Writes the subtiles of the output that `joined` returned for a row of them, scaled by blocks.

        Args:
            joined: Values of adjacent subtiles: all of a block of columns, or of several blocks.
            subtile: First of their subtiles of the product.
            state: State of the ring.

        Returns:
            The ring state after them.
        """
        cfg, number = self.mainloop.config, self.at_once // self.mainloop.config.subtile_step
        for first in range(0, len(joined), number):
            index = subtile + first * cfg.subtile_step
            if block_of(cfg.epilogue):
                self._scale(joined[first : first + number], index)
            for i, fragment in enumerate(joined[first : first + number]):
                state = self.write(fragment, index + i * cfg.subtile_step, state)
        return state

    def _scale(self, fragments: Sequence[Any], subtile: Scalar) -> None:
        """Divides the values of a block of columns by their scales, and stores these."""
        cfg = self.mainloop.config
        row = self.row + subtile // cfg.epi_columns * cfg.epi_tile[0]
        column = (self.column + subtile % cfg.epi_columns * cfg.epi_tile[1]) // cfg.subtile_step
        places = self.op.visits.places(self._partition, cute.size(fragments[0]))
        # The scales are the kernel's last operand.
        scale_blocks(
            fragments, places.rows, row + places.first[0], column // BLOCK, self.extras[-1], self.end
        )

    def visit(self, fragment: cute.Tensor, subtile: Scalar) -> None:
        """Applies the op's visitors to this thread's fp32 values of ``subtile``."""
        cfg = self.mainloop.config
        row = self.row + subtile // cfg.epi_columns * cfg.epi_tile[0]
        column = self.column + subtile % cfg.epi_columns * cfg.epi_tile[1]
        self.op.visits.on_fragment(fragment, self._partition, row, column, self.extras)

    def joined(self, fragments: Sequence[Any], subtile: Scalar) -> Any:
        """Returns a subtile of the output, from a visited subtile of the product, or from a pair of them."""
        cfg = self.mainloop.config
        if not cfg.has_pairs:
            return fragments[0]
        row = self.row + subtile // cfg.epi_columns * cfg.epi_tile[0]
        column = (self.column + subtile % cfg.epi_columns * cfg.epi_tile[1]) // cfg.subtile_step
        first, second = fragments
        self.op.visits.on_pair(first, second, self._partition, row, column, self.extras, self.ops.is_swapped)
        return first

    @cute.jit
    def write(
        self, fragment: cute.Tensor, subtile: Scalar, state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Writes this thread's visited values of ``subtile``; returns the ring state after it."""
        self.ring.acquire(state)
        stage = self.stages.tiled[(None, None, state.index)]
        self.mainloop.store_to_stage(self.res, self.ops, self.thread, fragment, stage)
        self.ring.commit(state)
        state.advance()
        return state

    def _partition(self, subtile: Scalar) -> Any:
        return self.mainloop.fragment_part(self.res, self.ops, self.thread, subtile)
