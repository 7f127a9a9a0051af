"""Values of rows that warps of all CTAs compute together: parts, their reduction, and counts of stored parts.

A *part* is the reduction of one subtile's columns of a row. The warp that finishes a unit stores the parts of
its rows, then adds one to the rows' count. Rows are complete when the count is the number of subtiles along
the columns. Then either

- the warp that counted last reduces the parts and stores the values (`finish_rows`); or
- every warp waits for the count and reduces the parts for itself: `count_unit`, `await_rows`,
  `leave_rows`, `reset_count`.

Both reduce in the same fixed order, so values do not depend on which warp was the last.
"""

from __future__ import annotations

from math import inf
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from overlap_gemm.device.failure import FailureSite
from overlap_gemm.device.flags import WaitBound, wait_flag
from overlap_gemm.device.memory import LANES
from overlap_gemm.device.traced import Predicate, Scalar
from overlap_gemm.device.values import Register, raw
from overlap_gemm.epilogues import maximum

REDUCTIONS: dict[str, Any] = {
    "row_sum": lambda a, b: a + b,
    "row_mean": lambda a, b: a + b,
    "row_max": maximum,
}

NEUTRAL = {"row_sum": 0.0, "row_mean": 0.0, "row_max": -inf}


@cute.jit
def store_by_first(
    output: cute.Tensor,
    value: cutlass.Float32,
    row: Scalar,
    subtile: Scalar,
    width: cutlass.Constexpr,
    exists: Predicate,
) -> None:
    """Stores a row's value, if the row exists; the first of every ``width`` lanes."""
    if exists and cute.arch.lane_idx() % width == 0:
        output[(subtile, row)] = value


@cute.jit
def finish_rows(
    reductions: Any,
    word: Any,
    unit_rows: cutlass.Constexpr,
    row: Scalar,
    rows: Scalar,
    columns: Scalar,
    subtiles: Scalar,
    in_flight: cutlass.Constexpr,
) -> None:
    """Counts a unit of ``unit_rows`` rows; with the last of its ``subtiles`` a lane finishes each row.

    All lanes. Each warp: stores of parts, warp barrier, count by lane 0 (acquire and release, device scope),
    warp barrier. So the lanes of the last warp read what all warps stored before they counted. The last warp
    resets the count, ``Int64`` at ``word``, for the next call, which begins after this one.
    """
    is_last = Int32(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(word, Int64(1), sem="acq_rel", scope="gpu")
        if before == Int64(subtiles - 1):
            cute.arch.store(word, Int64(0))
            is_last = Int32(1)
    is_last = Int32(cute.arch.shuffle_sync(is_last, 0))
    cute.arch.sync_warp()
    if is_last != 0:
        for kind, values, parts in reductions:
            totals = reduced(kind, parts, unit_rows, row, columns, subtiles, in_flight)
            _store_rows(values, totals, unit_rows, row, rows)


@cute.jit
def count_unit(word: Any) -> None:
    """Adds one to the count of the unit's rows at ``word`` (release, device scope).

    All lanes, after their stores.
    """
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.atomic_add(word, Int64(1), sem="release", scope="gpu")


@cute.jit
def await_rows(word: Any, subtiles: Int32, bound: WaitBound, site: FailureSite) -> None:
    """Waits until all units of the rows are counted (acquire); all lanes. `leave_rows` follows.

    After the warp barrier all lanes may read what the lanes of all warps stored before `count_unit`. Counts
    are compared as epochs: up to twice ``subtiles``.
    """
    if cute.arch.lane_idx() == 0:
        wait_flag(word.toint(), Int64(subtiles), bound, site)
    cute.arch.sync_warp()


@cute.jit
def leave_rows(word: Any) -> Int64:
    """Counts a warp that has waited for the rows; returns the count before, which `reset_count` takes.

    All lanes. A count is ``subtiles`` when the first warp leaves, since each one has waited. Accesses are
    relaxed: they have one address, and the next call begins after this one.
    """
    before = Int64(-1)
    if cute.arch.lane_idx() == 0:
        before = Int64(cute.arch.atomic_add(word, Int64(1), sem="relaxed", scope="gpu"))
    return before


@cute.jit
def reset_count(word: Any, before: Int64, all_counts: Int32) -> None:
    """Resets the count for the next call, if this warp is the last one that has left the rows.

    ``all_counts``: Number of the call's additions to the count.

    It follows `leave_rows` after other work, because the count takes as long as a load to arrive.
    """
    if before == Int64(all_counts - 1):
        cute.arch.store(word, Int64(0), sem="relaxed", scope="gpu")


ROWS_OF_LANE = 4
"""Adjacent rows whose parts a lane reduces: 16 bytes of each load."""


@cute.jit
def reduced(
    kind: cutlass.Constexpr,
    parts: cute.Tensor,
    unit_rows: cutlass.Constexpr,
    first: Int32,
    columns: Int32,
    subtiles: Int32,
    in_flight: cutlass.Constexpr,
) -> cute.Tensor:
    """Returns the values of four of the ``unit_rows`` rows from ``first``: lane ``l`` has those of `row_in`.

    All lanes, in the same order for every warp. A lane reduces every ``step``-th part of its rows in order,
    with ``in_flight`` loads in flight. A tree of lanes reduces the ``step`` results.
    """
    groups = unit_rows // ROWS_OF_LANE
    lane, step = cute.arch.lane_idx(), LANES // groups
    place = cutlass.min(first + row_in(unit_rows), cute.size(parts, mode=[1]) - ROWS_OF_LANE)
    totals = cute.make_rmem_tensor(ROWS_OF_LANE, Float32)
    totals.fill(NEUTRAL[kind])
    loaded = cute.make_rmem_tensor((ROWS_OF_LANE, in_flight), Float32)
    for begin in cutlass.range(lane // groups, subtiles, step * in_flight, unroll=1):
        for i in cutlass.range_constexpr(in_flight):
            vector = row_of(parts, cutlass.min(begin + i * step, subtiles - 1))
            cute.autovec_copy(run_of(vector, place, ROWS_OF_LANE), loaded[(None, i)])
        for i in cutlass.range_constexpr(in_flight):
            if begin + i * step < subtiles:
                for r in cutlass.range_constexpr(ROWS_OF_LANE):
                    totals[r] = raw(REDUCTIONS[kind](Register(totals[r]), Register(loaded[r, i])))
    for level in cutlass.range_constexpr(step.bit_length() - 1):
        for r in cutlass.range_constexpr(ROWS_OF_LANE):
            other = cute.arch.shuffle_sync_bfly(totals[r], groups << level)
            totals[r] = raw(REDUCTIONS[kind](Register(totals[r]), Register(other)))
    if cutlass.const_expr(kind == "row_mean"):
        for r in cutlass.range_constexpr(ROWS_OF_LANE):
            totals[r] = raw(Register(totals[r]) / Register(Float32(columns)))
    return totals


def row_in(unit_rows: int) -> Any:
    """Returns the first of the calling lane's four rows of a unit in `reduced`."""
    return cute.arch.lane_idx() % (unit_rows // ROWS_OF_LANE) * ROWS_OF_LANE


def value_of(totals: Any, row: Scalar) -> Any:
    """Returns the value of a row of the unit, each lane its own, from the lane that has it; all lanes."""
    value = cute.arch.shuffle_sync(totals[0], row // ROWS_OF_LANE)
    for r in range(1, ROWS_OF_LANE):
        other = cute.arch.shuffle_sync(totals[r], row // ROWS_OF_LANE)
        value = cutlass.select_(row % ROWS_OF_LANE == r, other, value)
    return value


@cute.jit
def _store_rows(
    values: cute.Tensor, totals: cute.Tensor, unit_rows: cutlass.Constexpr, first: Int32, rows: Int32
) -> None:
    row = first + row_in(unit_rows)
    for r in cutlass.range_constexpr(ROWS_OF_LANE):
        if cute.arch.lane_idx() < unit_rows // ROWS_OF_LANE and row + r < rows:
            values[row + r] = totals[r]


def row_of(matrix: Any, row: Scalar) -> Any:
    """Returns a row of a matrix whose rows begin at multiples of 16 bytes."""
    divisor = 128 // matrix.element_type.width
    offset = cute.assume(Int64(row) * matrix.stride[0], divby=divisor)
    return cute.make_tensor(matrix.iterator + offset, cute.make_layout(cute.size(matrix, mode=[1])))


def load_aligned(vector: Any, first: Scalar, run: int) -> Any:
    """Returns ``run`` adjacent elements; ``first`` is a multiple of ``run``."""
    loaded = cute.make_rmem_tensor(run, vector.element_type)
    cute.autovec_copy(run_of(vector, first, run), loaded)
    return loaded


def run_of(vector: Any, first: Scalar, run: int) -> Any:
    """Returns a view of ``run`` adjacent elements; ``first`` is a multiple of ``run``."""
    return cute.make_tensor(vector.iterator + cute.assume(first, divby=run), cute.make_layout(run))
