"""Accesses of launches to an allocation, as the order of streams takes them."""

import tracemalloc
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cute_emulator.machine.shadow import Shadow, footprints

BASE, GRANULE, AGENTS_OF_WARP = 4096, 4, 4


class Grid(NamedTuple):
    launch: Any
    number: int

    def __hash__(self):
        return self.number


def written_by(numbers):
    """Returns a shadow whose granules were last written by these warps, 0: by none."""
    shadow = Shadow(len(numbers) * GRANULE, GRANULE)
    epochs, marks = shadow.writes
    epochs[:] = np.where(numbers > 0, numbers * AGENTS_OF_WARP << 32 | 1, 0)
    marks[:] = 0  # ordinary accesses of line 0
    return shadow


def launches_of(numbers, grids):
    """Returns agents by number, of warps of launches of rank 0 in turn."""
    made = [Grid(SimpleNamespace(rank=0), number) for number in range(grids)]
    return {
        number * AGENTS_OF_WARP: SimpleNamespace(warp=SimpleNamespace(grid=made[number % grids]))
        for number in numbers
    }


def spans_of(numbers, agents):
    shadow = written_by(numbers)
    memory = SimpleNamespace(lookup=lambda base: SimpleNamespace(rank=0, end=BASE + shadow.nbytes))
    every = footprints({BASE: shadow}, memory, agents)
    return {it.grid.number: list(zip(*(at.tolist() for at in it.spans), strict=True)) for it in every}


def test_ranges_of_each_launch_are_joined():
    """Compares ranges of two launches; warp 9 is of none that is known, and two granules are untouched."""
    numbers = np.array([2, 4, 1, 0, 0, 2, 9, 3, 1, 1])
    granules = {0: [(0, 2), (5, 6)], 1: [(2, 3), (7, 10)]}
    expected = {
        grid: [(BASE + GRANULE * begin, BASE + GRANULE * end) for begin, end in ranges]
        for grid, ranges in granules.items()
    }
    assert spans_of(numbers, launches_of([1, 2, 3, 4], 2)) == expected


def test_memory_does_not_grow_with_the_number_of_warps():
    """Checks 4096 warps, of which masks would take 1 GiB."""
    numbers = np.arange(1 << 18) % 4096 + 1
    agents = launches_of(range(1, 4097), 1)
    tracemalloc.start()
    try:
        assert spans_of(numbers, agents) == {0: [(BASE, BASE + (GRANULE << 18))]}
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
