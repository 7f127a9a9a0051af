"""Scales of blocks of an 8-bit result: the rule of `quantize_rows`, on values in registers."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float32, cute

from overlap_gemm.device.traced import Fragment, Scalar
from overlap_gemm.device.values import Register, raw
from overlap_gemm.epilogues import BLOCK, maximum
from overlap_gemm.epilogues.library import scale_e4m3


def scale_blocks(
    fragments: Sequence[Fragment],
    rows: Sequence[int],
    row: Scalar,
    block: Scalar,
    scales: cute.Tensor,
    end: Scalar,
) -> None:
    """Divides a thread's values of a block of columns by the scale of their row, and stores the scales.

    A row's values are in a thread, or in adjacent lanes of a warp. All lanes call it.

    Args:
        fragments: Values of the subtiles along the block, fp32; all of the same places in their subtiles.
        rows: Rows from the first value of a fragment to each one, known when the kernel is traced.
        row: Row of the first value.
        block: Number of the block.
        scales: Scales, (blocks, rows).
        end: Row after the last one that is stored.
    """
    for offset in sorted(set(rows)):
        places = [i for i, one in enumerate(rows) if one == offset]
        values = [(fragment, i) for fragment in fragments for i in places]
        lanes, most, distance = BLOCK // len(values), Register(Float32(0.0)), 1
        for fragment, i in values:
            most = maximum(most, abs(Register(fragment[i])))
        while distance < lanes:
            most = maximum(most, Register(cute.arch.shuffle_sync_bfly(raw(most), distance)))
            distance *= 2
        scale = scale_e4m3(most)
        factor = 1.0 / scale
        for fragment, i in values:
            fragment[i] = raw(Register(fragment[i]) * factor)
        _store(scales, raw(scale), block, row + offset, lanes, end)


@cute.jit
def _store(
    scales: cute.Tensor,
    scale: Float32,
    block: Scalar,
    row: Scalar,
    lanes: cutlass.Constexpr,
    end: Scalar,
) -> None:
    """Stores a row's scale by the first of every ``lanes`` lanes, if the row exists."""
    if row < end and cute.arch.lane_idx() % lanes == 0:
        scales[(block, row)] = scale
