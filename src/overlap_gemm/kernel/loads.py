"""The load warp's TMA loads of one tile, shared by all mainloops."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.kernel.operand_views import OperandViews
from overlap_gemm.kernel.protocols import Mainloop
from overlap_gemm.kernel.work import WeightColumns


class OperandLoads(NamedTuple):
    """The loads of one operand's k tiles into the stages, by this CTA.

    Attributes:
        atom: TMA load atom.
        source: ``(tile, k tiles)`` of the operand.
        stages: ``(tile, stages)`` in shared memory.
        mask: CTAs of the cluster that receive the loads of this one; None for itself alone.
    """

    atom: Any
    source: Scalar
    stages: Stages
    mask: Any

    @staticmethod
    def shared(
        atom: Any, sharer: Any, sharers: int, stages: Stages, tiles: Scalar, mask: Any
    ) -> OperandLoads:
        """Returns loads that ``sharers`` CTAs, of which this is number ``sharer``, share by multicast.

        Args:
            atom: TMA load atom.
            sharer: Number of this CTA.
            sharers: CTAs along the cluster dimension in which the operand's tile is the same.
            stages: Shared memory, the stage as last mode.
            tiles: Tile of the operand, the k tile as last mode.
            mask: CTAs that receive the loads, as in the attributes.
        """
        stages, source = cpasync.tma_partition(
            atom, sharer, cute.make_layout(sharers), _but_last(stages), _but_last(tiles)
        )
        return OperandLoads(atom, source, stages, mask)

    def load(self, ab: Any, state: pipeline.PipelineState, k: Scalar) -> None:
        """Starts to load k tile ``k`` into an acquired stage."""
        target, full = self.stages[(None, state.index)], ab.producer_get_barrier(state)
        cute.copy(self.atom, self.source[(None, k)], target, tma_bar_ptr=full, mcast_mask=self.mask)


class JointLoads(NamedTuple):
    """The joint loads of an operand and of its scales.

    Attributes:
        parts: `OperandLoads` of each, or `blocks.SharedBoxes`.
    """

    parts: tuple[Any, ...]

    def load(self, ab: Any, state: pipeline.PipelineState, k: Scalar) -> None:
        """Starts all loads of k tile ``k``."""
        for part in self.parts:
            part.load(ab, state, k)


def tiles_at(
    ops: OperandViews, row: Int32, col: Int32, tile: tuple[int, int], tile_k: int
) -> tuple[Any, Any]:
    """Returns k tiles ``(m or n, k, k tiles)`` of A from ``row`` on and of B from ``col`` on.

    If K has leaves, the third dimension has the k tiles of one leaf after the other.
    """
    return _k_tiles(ops.a, row, tile[0], tile_k), _k_tiles(ops.b, col, tile[1], tile_k)


def _k_tiles(operand: Any, row: Int32, rows: int, tile_k: int) -> Any:
    """Returns an operand's tiles along K, from ``row`` on; of leaves, in their order."""
    if cute.rank(operand) == 2:
        return cute.local_tile(cute.domain_offset((row, 0), operand), (rows, tile_k), (0, None))
    of_leaves = cute.domain_offset((row, 0, 0), operand)
    tiles = cute.local_tile(of_leaves, (rows, tile_k, 1), (0, None, None))
    return cute.group_modes(tiles[(None, None, 0, None, None)], 2, 4)


@cute.jit
def load_k_tiles(
    ab: Any,
    state: pipeline.PipelineState,
    a: OperandLoads,
    b: OperandLoads,
    first: Int32,
    number: Int32,
    early: Any = None,
) -> pipeline.PipelineState:
    """Loads A and B into each stage as it becomes empty, from k tile ``first`` on; zeros after K's end.

    B's loads of the first ``early`` k tiles are in flight (`load_first_weights`), to the same stages.

    Returns:
        The pipeline state after the last k tile.
    """
    begin = first
    if cutlass.const_expr(early is not None):
        begin = first + early
        for k in cutlass.range(first, begin, unroll=1):
            a.load(ab, state, k)
            state.advance()
    for k in cutlass.range(begin, first + number, unroll=1):
        ab.producer_acquire(state)
        for loads in (a, b):
            loads.load(ab, state, k)
        state.advance()
    return state


@cute.jit
def load_tile(
    mainloop: Mainloop,
    res: Any,
    ops: OperandViews,
    state: pipeline.PipelineState,
    row: Int32,
    column: Int32,
    early: Any,
) -> pipeline.PipelineState:
    """Loads the tile at ``row`` of A and ``column`` of B, or of this rank's columns of several weights.

    The other arguments are those of `load_of_weight`.
    """
    if cutlass.const_expr(ops.others is None):
        state = load_k_tiles(res.ab, state, *mainloop.loads(res, ops, row, column), early)
    else:
        weights, _ = WeightColumns.of(mainloop.config, ops.columns)
        state = load_of_weight(mainloop, res, ops, state, weights, (Int32(0), row, column), early)
    return state


@cute.jit
def load_of_weight(
    mainloop: Mainloop,
    res: Any,
    ops: Any,
    state: pipeline.PipelineState,
    weights: Any,
    at: tuple[Int32, Int32, Int32],
    early: Any,
) -> pipeline.PipelineState:
    """Loads a tile of A and of the one of several weights that has its first column.

    Args:
        mainloop: Mainloop that loads.
        res: Resources of the mainloop.
        ops: Operands.
        state: Pipeline state of the loads.
        weights: `WeightColumns` of each weight.
        at: Owner of the tile, row of A, and column in the owner's shard.
        early: Number of k tiles of B in flight, as in `load_k_tiles`.

    Returns:
        The pipeline state after the last k tile.
    """
    owner, row, column = at
    for i in cutlass.range_constexpr(len(weights)):
        begin, columns, step = weights[i]
        if (column >= begin) & (column < begin + columns):
            col = owner * step + column - begin
            state = load_k_tiles(res.ab, state, *mainloop.loads(res, ops.of_weight(i), row, col), early)
    return state


@cute.jit
def load_first_weights(
    ab: Any, state: pipeline.PipelineState, b: OperandLoads, first: Int32, number: Int32
) -> None:
    """Loads ``number`` k tiles of B from ``first`` on, into stages that still need A's."""
    for k in cutlass.range(first, first + number, unroll=1):
        ab.producer_acquire(state)
        b.load(ab, state, k)
        state.advance()


def _but_last(tensor: Any) -> Any:
    """Returns the tensor with all modes but the last grouped."""
    return cute.group_modes(tensor, 0, cute.rank(tensor) - 1)
