"""What the race detector for shared and tensor memory remembers of each of its cells.

An entry is one access in one integer: party, clock, PTX line, whether it was strong; zero for none.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine.lane_plan import parts

Where = slice | NDArray[np.int64]
"""Numbers of chunks of shared memory: a slice where they follow each other, which copies fastest."""

PARTY, CLOCK, CLOCK_MASK, LINE_MASK = 44, 21, (1 << 23) - 1, (1 << 20) - 1
"""Of an entry: where party and clock begin, and what a clock and a line may be."""
WRITE, READS = 0, 2
"""Of a cell: which of its entries is the last write, and how many last reads follow."""
CELL = np.dtype("V24")
PACK = struct.Struct("<3q")


def entry_of(party: int, clock: int, line: int, strong: bool) -> int:
    """The entry of an access."""
    return party << PARTY | (clock & CLOCK_MASK) << CLOCK | (line & LINE_MASK) << 1 | strong


class Cells:
    """Last write and two last reads of each cell.

    Attributes:
        raw: One opaque element a cell, which NumPy gathers, compares and fills fastest.
        entries: The same, as `int64 [..., 3]`.
        reads: Of these the last reads, by slot.
    """

    def __init__(self, *shape: int) -> None:
        self.raw = np.zeros(shape, CELL)
        self.entries = self.raw.view(np.int64).reshape(*shape, 1 + READS)
        self.reads = tuple(self.entries[..., 1 + slot] for slot in range(READS))


class SharedCells(Cells):
    """Those of a CTA's shared memory.

    Attributes:
        shift: Binary logarithm of a cell's bytes.
        words: Last write and reads of single words, by byte offset.
        low: Lowest offset of such a word.
        high: End of the highest.
        bounds: The first chunk of all regions, and the end of the last, at least.
        regions: Stages: chunks that a copy wrote together and others read together, by the first: the end,
            and the last write and reads. What `raw` says of them is out of date.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(-(-nbytes // 16))
        self.shift = 4
        self.words: dict[int, list[int]] = {}
        self.low, self.high = nbytes, 0
        self.regions: dict[int, list[int]] = {}
        self.bounds = (nbytes, 0)

    def keep_region(self, chunks: slice, mine: int) -> None:
        """Chunks that one copy has written become a region."""
        self.regions[chunks.start] = [chunks.stop, mine, 0, 0]
        low, high = self.bounds
        self.bounds = min(low, chunks.start), max(high, chunks.stop)

    def exactly(self, chunks: Where) -> list[tuple[int, list[int]]] | None:
        """The regions that make up some chunks, each with its first; None where others are among them.

        Regions are divided where the chunks begin and end.
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
        """A new region: the rest, from some chunk on, of the one that it lies in."""
        for start, region in self.regions.items():
            if start < at < region[0]:
                return self._divide(region, at)
        return None

    def _divide(self, region: list[int], at: int) -> list[int]:
        self.regions[at] = rest = region.copy()
        region[0] = at
        return rest

    def dissolve(self, first: int, end: int) -> None:
        """Puts the regions that some chunks lie in, between two offsets, down as cells."""
        if first >= 16 * self.bounds[1] or end <= 16 * self.bounds[0]:
            return
        for start, (stop, *found) in list(self.regions.items()):
            if 16 * start < end and first < 16 * stop:
                self.raw[self.of_chunks(slice(start, stop))] = PACK.pack(*found)
                del self.regions[start]

    def of_lanes(self, offsets: NDArray[np.int64], low: int, high: int, size: int) -> NDArray[np.int64]:
        """The cells of lanes that access `size` bytes each from `low` to `high`, refined if need be."""
        if self.regions:
            self.dissolve(low, high + size)
        if size < 1 << self.shift:
            self.refine(size.bit_length() - 1)
        cells = offsets >> self.shift
        if size == 1 << self.shift:
            return cells
        return parts(cells, size >> self.shift)

    def refine(self, shift: int) -> None:
        """Goes over to smaller cells."""
        factor = 1 << self.shift - shift
        old, self.shift = self.raw, shift
        super().__init__(len(old) * factor)
        used = np.flatnonzero(old.view(np.int64).reshape(-1, 1 + READS).any(1))
        self.raw.reshape(-1, factor)[used] = old[used, None]

    def of_chunks(self, chunks: Where) -> Where:
        """The cells of some chunks of 16 bytes."""
        if self.shift == 4:
            return chunks
        factor = 1 << 4 - self.shift
        if isinstance(chunks, slice):
            return slice(chunks.start * factor, chunks.stop * factor)
        return parts(chunks * factor, factor)


class TensorCells(Cells):
    """Those of a CTA's tensor memory."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self._late: tuple[Any, int] | None = None  # cells and entry of a write that is not in `raw` yet

    def rewrites(self, cells: Any, mine: int) -> bool:
        """Whether a pipe only writes again what it has written last, as the K steps of a product do."""
        late = self._late
        if late is None or late[0] != cells or late[1] >> PARTY != mine >> PARTY:
            return False
        self._late = cells, mine
        return True

    def write_late(self, cells: Any, mine: int) -> None:
        """A pipe writes cells; `settle` puts it down."""
        self._late = cells, mine

    def settle(self) -> None:
        """Brings `raw` up to date."""
        if self._late is not None:
            cells, mine = self._late
            self.raw[cells] = PACK.pack(mine, 0, 0)
            self._late = None
