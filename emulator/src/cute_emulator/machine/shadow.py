"""Last accesses to global memory by granule, and the accesses of each launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine.order import OWN, Agent

if TYPE_CHECKING:
    from cute_emulator.execution.grid import Grid
    from cute_emulator.machine.memory import GlobalMemory

WEAK = -1
"""Strength of an ordinary access."""
History = tuple[NDArray[np.int64], ...]


class Shadow:
    """Last write of each granule, and last read by stream: epochs, and lines and strengths."""

    def __init__(self, nbytes: int, granule: int) -> None:
        self.nbytes, self.granule, self.shift = nbytes, granule, granule.bit_length() - 1
        self.writes = self._none()
        self.reads: dict[int, History] = {}

    def _none(self) -> History:
        return tuple(np.zeros((2, -(-self.nbytes // self.granule)), np.int64))

    def reads_of(self, stream: int) -> History:
        """Returns the reads by launches of a stream."""
        reads = self.reads.get(stream)
        if reads is None:
            reads = self.reads[stream] = self._none()
        return reads

    def refine(self, granule: int) -> None:
        """Changes to smaller granules."""
        factor = self.granule // granule
        self.granule, self.shift = granule, granule.bit_length() - 1
        self.writes = tuple(_repeated(self.writes, factor))
        self.reads = {stream: tuple(_repeated(reads, factor)) for stream, reads in self.reads.items()}


def _repeated(history: History, factor: int) -> np.ndarray:
    """Repeats each column `factor` times, skipping the many that are zero."""
    used = np.flatnonzero(history[0])
    out = np.zeros((2, len(history[0]) * factor), np.int64)
    for row, cells in zip(out, history, strict=True):
        row.reshape(-1, factor)[used] = cells[used, None]
    return out


class Footprint(NamedTuple):
    """Accesses of a launch to an allocation.

    Attributes:
        grid: Launch.
        base: Address of the allocation.
        spans: First addresses and ends of ranges.
        write: Whether it wrote them, or read.
    """

    grid: Grid
    base: int
    spans: tuple[NDArray[np.int64], NDArray[np.int64]]
    write: bool


def footprints(
    shadows: Mapping[int, Shadow], memory: GlobalMemory, agents: Mapping[int, Agent]
) -> Iterator[Footprint]:
    """Yields the ordinary accesses of launches to their rank's memory."""
    for base, shadow in shadows.items():
        allocation = memory.lookup(base)
        for history in (shadow.writes, *shadow.reads.values()):
            epochs, marks = history
            cells = np.flatnonzero(epochs)
            cells = cells[(marks[cells] & 7) - 1 == WEAK]
            owners = (epochs[cells] >> 32) & OWN
            numbers, places = np.unique(owners, return_inverse=True)
            grids: dict[Grid, int] = {}
            indices = [
                grids.setdefault(agents[number].warp.grid, len(grids)) if number in agents else -1
                for number in numbers.tolist()
            ]
            of_cells = np.array(indices, np.int64)[places]
            for grid, index in grids.items():
                if allocation is None or allocation.rank != grid.launch.rank:
                    continue
                accessed = cells[of_cells == index]
                gaps = np.flatnonzero(np.diff(accessed) > 1)
                begins, ends = accessed[np.r_[0, gaps + 1]], accessed[np.r_[gaps, len(accessed) - 1]] + 1
                spans = (
                    base + begins * shadow.granule,
                    np.minimum(base + ends * shadow.granule, allocation.end),
                )
                yield Footprint(grid, base, spans, history is shadow.writes)
