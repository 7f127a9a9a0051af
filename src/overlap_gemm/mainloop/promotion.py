"""Promotion of 8-bit products on Hopper: short wgmma sums are added to fp32 registers.

wgmma keeps 14 bits in the sums of 8-bit products. So each sum covers one k tile (128 elements of K, 4
instructions), and is then added to the fp32 accumulator by ordinary additions. A sum has 64 registers per
thread, those of one instruction; the accumulator has 64 or 128 (wide tiles).

- Accumulator of 64 without block scales: sums of two k tiles are in flight. One is promoted while the tensor
  cores compute the other. The number of k tiles is even (``config.k_step`` = 2, else 1).
- Accumulator of 64 with block scales: one sum is in flight, of all columns.
- Accumulator of 128 (cooperative): one sum is in flight, of one half of the columns after the other. Tensor
  cores are busy during a promotion: they compute products of the other warp group.

With one sum a group waits for the next stage only after it has issued the k tile's last products. An earlier
wait would delay these products. A stage is released when its last products are complete, before their sum is
promoted.

With block scales a sum is multiplied by them when it is added (`mainloop.blocks`). If blocks have 32
elements of K, the sum of each instruction is promoted separately.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from overlap_gemm.mainloop import leaves
from overlap_gemm.mainloop.blocks import promote, share_of


@cute.jit
def accumulate_promoted(
    config: cutlass.Constexpr,
    mma: Any,
    acc: cute.Tensor,
    nodes: Any,
    operands: tuple[Any, Any],
    ab: Any,
    read: pipeline.PipelineState,
    first: Int32,
    k_tiles: Int32,
    scales: Any,
) -> pipeline.PipelineState:
    """Computes a tile into ``acc``; all threads of its warp groups.

    Per k tile: waits on ab.full, issues wgmma, waits for their completion, releases the stage, adds the sum.

    Args:
        config: The kernel's configuration.
        mma: ``cute.TiledMma``.
        acc: fp32 registers, overwritten; with leaves they get the last one's sums.
        nodes: Nodes of the leaves' tree (`leaves.nodes_of`), which get the other leaves' sums; or None.
        operands: Fragments of the stages of A and of B.
        ab: Pipeline of the stages.
        read: Consumer state of ``ab`` at the tile's first k tile.
        first: Number of the first k tile along K.
        k_tiles: Number of k tiles, a multiple of ``config.k_step`` (1 or 2).
        scales: Function of (stage, k tile, part of the k tile) that returns factors (`StageScales.factors`),
            or None.

    Returns:
        The consumer state after the last k tile.
    """
    of_leaf = k_tiles
    if cutlass.const_expr(nodes is not None):
        of_leaf = k_tiles // config.leaves
        for leaf in cutlass.range(config.leaves - 1, unroll=1):
            read = _accumulate(config, mma, acc, operands, ab, read, first, of_leaf, scales)
            first += of_leaf
            leaves.park(config, acc, nodes, leaf)
    return _accumulate(config, mma, acc, operands, ab, read, first, of_leaf, scales)


@cute.jit
def _accumulate(
    config: cutlass.Constexpr,
    mma: Any,
    acc: cute.Tensor,
    operands: tuple[Any, Any],
    ab: Any,
    read: pipeline.PipelineState,
    first: Int32,
    k_tiles: Int32,
    scales: Any,
) -> pipeline.PipelineState:
    """Computes the sums of one leaf, or of a tile without leaves; arguments as in `accumulate_promoted`."""
    acc.fill(0.0)
    num_blocks = cute.size(operands[0], mode=[2])
    if cutlass.const_expr(config.sums == 1):
        parts, halves = config.k_parts, config.sum_parts
        shape = mma.partition_shape_C((config.tile[0], config.tile[1] // halves))
        done = cute.make_rmem_tensor(shape, Float32)
        ab.consumer_wait(read)
        for step in cutlass.range(k_tiles, unroll=1):
            following = read.clone()
            following.advance()
            for number in cutlass.range_constexpr(parts):
                blocks = range(number * num_blocks // parts, (number + 1) * num_blocks // parts)
                factors: Any = None
                for column in cutlass.range_constexpr(halves):
                    mma = multiply(mma, done, operands, blocks, read, column=column)
                    is_last = number == parts - 1 and column == halves - 1
                    if cutlass.const_expr(is_last):  # noqa: SIM102
                        if step + 1 < k_tiles:  # this stage is held meanwhile, and there are two at least
                            ab.consumer_wait(following)
                    if cutlass.const_expr(column == 0 and scales is not None):
                        factors = scales(read.index, first + step, number)
                    warpgroup.wait_group(0)
                    if cutlass.const_expr(is_last):
                        ab.consumer_release(read)
                    promote(acc[(None, 0, column)], done, share_of(factors, column, halves))
            read.advance()
    else:
        # Both sums begin and end in one turn of the loop; else ptxas serialises wgmma (C7514).
        sums = [cute.make_rmem_tensor(acc.shape, Float32) for _ in range(config.sums)]
        freed, is_full = read.clone(), _is_full(ab, read)
        for _ in cutlass.range(k_tiles // config.sums, unroll=1):
            for number, in_flight in enumerate(sums):
                ab.consumer_wait(read, is_full if number == 0 else None)
                mma = multiply(mma, in_flight, operands, range(num_blocks), read)
                read.advance()
            is_full = _is_full(ab, read)
            for number, done in enumerate(sums):
                warpgroup.wait_group(config.sums - 1 - number)
                ab.consumer_release(freed)
                freed.advance()
                promote(acc, done, None)
    return read


def multiply(
    mma: Any,
    acc: cute.Tensor,
    operands: tuple[Any, Any],
    k_blocks: range,
    read: Any,
    adds: bool = False,
    column: int | None = None,
) -> Any:
    """Issues the products of some blocks of the stage at ``read`` as one wgmma group; does not wait.

    The group first fences the registers. The caller has waited on ab.full, and waits for the group before it
    reads ``acc`` or releases the stage.

    Args:
        mma: ``cute.TiledMma``; its ACCUMULATE field is set here.
        acc: fp32 registers of the sum.
        operands: Fragments of the stages of A and of B.
        k_blocks: Numbers of the instructions along K in the stage.
        read: State whose index is the stage.
        adds: Whether the first product is added to ``acc``; else it overwrites ``acc``.
        column: Number of the part of the tile's columns; None: all columns.

    Returns:
        ``mma``. The caller rebinds the name, so that the DSL carries the field through a loop.
    """
    a, b = operands
    warpgroup.fence()
    if not adds:
        mma.set(warpgroup.Field.ACCUMULATE, False)
    for block in k_blocks:
        at = (None, None, block, read.index)
        columns = b[at]
        if column is not None:
            columns = cute.append_ones(b[(None, column, block, read.index)], up_to_rank=2)
        cute.gemm(mma, acc, a[at], columns, acc)
        if not adds:
            mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    return mma


def _is_full(ab: Any, state: pipeline.PipelineState) -> Any:
    """Returns whether a stage is full: one test of its full barrier, without a wait."""
    return cute.arch.mbarrier_test_wait(ab.producer_get_barrier(state), state.phase)
