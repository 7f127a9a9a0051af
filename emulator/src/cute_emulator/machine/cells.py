"""Records of the race detector for each cell of shared and tensor memory.

An entry is one access in one integer: party, clock, PTX line, whether it was strong; zero for none.
"""

from __future__ import annotations

import struct
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine.lane_plan import parts

Where = slice | NDArray[np.int64]
"""Numbers of chunks of shared memory: a slice if they are contiguous, which copies fastest."""

PARTY, CLOCK, CLOCK_MASK, LINE_MASK = 44, 21, (1 << 23) - 1, (1 << 20) - 1
"""Bit positions of party and clock in an entry, and masks of clock and line."""
WRITE, READS = 0, 2
"""Index of the last write among a cell's entries, and number of last reads that follow."""
CELL = np.dtype("V24")
PACK = struct.Struct("<3q")


def entry_of(party: int, clock: int, line: int, strong: bool) -> int:
    """Returns the entry of an access."""
    return party << PARTY | (clock & CLOCK_MASK) << CLOCK | (line & LINE_MASK) << 1 | strong


class Cells:
    """Last write and two last reads of each cell.

    Attributes:
        raw: One opaque element per cell, which NumPy gathers, compares and fills fastest.
        entries: View of `raw` as `int64 [..., 3]`.
        reads: Last reads in `entries`, by slot.
    """

    def __init__(self, *shape: int) -> None:
        self.raw = np.zeros(shape, CELL)
        self.entries = self.raw.view(np.int64).reshape(*shape, 1 + READS)
        self.reads = tuple(self.entries[..., 1 + slot] for slot in range(READS))


class SharedCells(Cells):
    """Cells of a CTA's shared memory.

    Attributes:
        shift: Binary logarithm of a cell's bytes.
        words: Last write and reads of single words, by byte offset.
        unit: Bytes of such a word: those of the smallest access, at most 4.
        low: Lowest offset of such a word.
        high: End of the highest.
        bounds: First chunk of all regions, and the end of the last, as a bound.
        regions: Stages: chunks that one copy wrote together and others read together. By first chunk: the
            end, and the last write and reads; `raw` is out of date there.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(-(-nbytes // 16))
        self.shift = 4
        self.words: dict[int, list[int]] = {}
        self.unit = 4
        self.low, self.high = nbytes, 0
        self.regions: dict[int, list[int]] = {}
        self.bounds = (nbytes, 0)

    def keep_region(self, chunks: slice, mine: int) -> None:
        """Records the chunks that one copy has written as a region."""
        self.regions[chunks.start] = [chunks.stop, mine, 0, 0]
        low, high = self.bounds
        self.bounds = min(low, chunks.start), max(high, chunks.stop)

    def exactly(self, chunks: Where) -> list[tuple[int, list[int]]] | None:
        """Returns the regions that form some chunks, each with its first chunk.

        None if there are other chunks.

        Regions are divided at the beginning and the end of the chunks.
        """
        if not isinstance(chunks, slice):
            return None
        at, out = chunks.start, []
        while at < chunks.stop:
            region = self.regions.get(at) or self._divided(at)
            if region is None:
                return None
            if region[0] > chunks.stop:
                self._divide(region, chunks.stop)
            out.append((at, region))
            at = region[0]
        return out

    def _divided(self, at: int) -> list[int] | None:
        """Returns a new region: the rest, from a chunk on, of the region that contains the chunk."""
        for start, region in self.regions.items():
            if start < at < region[0]:
                return self._divide(region, at)
        return None

    def _divide(self, region: list[int], at: int) -> list[int]:
        self.regions[at] = rest = region.copy()
        region[0] = at
        return rest

    def dissolve(self, first: int, end: int) -> None:
        """Writes the regions of chunks between two offsets back to cells."""
        if first >= 16 * self.bounds[1] or end <= 16 * self.bounds[0]:
            return
        for start, (stop, *entries) in list(self.regions.items()):
            if 16 * start < end and first < 16 * stop:
                self.raw[self.of_chunks(slice(start, stop))] = PACK.pack(*entries)
                del self.regions[start]

    def of_lanes(self, offsets: NDArray[np.int64], low: int, high: int, size: int) -> NDArray[np.int64]:
        """Returns the cells of lanes that access `size` bytes each from `low` to `high`.

        Refines them if necessary.
        """
        if self.regions:
            self.dissolve(low, high + size)
        if size < 1 << self.shift:
            self.refine(size.bit_length() - 1)
        cells = offsets >> self.shift
        if size == 1 << self.shift:
            return cells
        return parts(cells, size >> self.shift)

    def refine(self, shift: int) -> None:
        """Changes to smaller cells."""
        factor = 1 << self.shift - shift
        old, self.shift = self.raw, shift
        super().__init__(len(old) * factor)
        used = np.flatnonzero(reduce(np.bitwise_or, old.view(np.int64).reshape(-1, 1 + READS).T))
        self.raw.reshape(-1, factor)[used] = old[used, None]

    def divide_words(self, size: int) -> None:
        """Records words in parts of `size` bytes, if that is less than `unit`."""
        if size < self.unit:
            self.words = {
                part: entries.copy()
                for place, entries in self.words.items()
                for part in range(place, place + self.unit, size)
            }
            self.unit = size

    def of_chunks(self, chunks: Where) -> Where:
        """Returns the cells of some chunks of 16 bytes."""
        if self.shift == 4:
            return chunks
        factor = 1 << 4 - self.shift
        if isinstance(chunks, slice):
            return slice(chunks.start * factor, chunks.stop * factor)
        return parts(chunks * factor, factor)


class TensorCells(Cells):
    """Cells of a CTA's tensor memory."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self._late: tuple[Any, int] | None = (
            None  # cells and entry of a write that `raw` does not contain yet
        )

    def rewrites(self, cells: Any, mine: int) -> bool:
        """Returns whether a pipe writes the same cells as its last write, as the K steps of a product do."""
        late = self._late
        if late is None or late[0] != cells or late[1] >> PARTY != mine >> PARTY:
            return False
        self._late = cells, mine
        return True

    def write_late(self, cells: Any, mine: int) -> None:
        """Records a pipe's write to cells, which `settle` stores."""
        self._late = cells, mine

    def settle(self) -> None:
        """Stores the last delayed write in `raw`."""
        if self._late is not None:
            cells, mine = self._late
            self.raw[cells] = PACK.pack(mine, 0, 0)
            self._late = None
