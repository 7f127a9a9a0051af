"""Where the lanes of an access to memory go: the arithmetic of their addresses, done once for those alike.

In shared memory a loop has few different addresses, so that the plan of an access is that of its addresses.
In global memory a loop moves on, but its lanes lie the same way each time: the plan is of their distances.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers.lanes import lane_list

_COUNT = np.arange(32)
Places = slice | NDArray[np.int64]


def parts(first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Numbers of the `count` parts of each of some things, in order, by the number of its first part."""
    return (first[:, None] + _COUNT[:count]).reshape(-1)


class Lanes(NamedTuple):
    """The lanes of an access that is being judged, for messages.

    Attributes:
        mask: Which.
        offsets: Where each begins, or one for all.
        size: Bytes of each.
    """

    mask: int
    offsets: NDArray[np.int64]
    size: int

    def at(self, low: int, end: int) -> str:
        """The first of them that touches some bytes: ` lane 3`."""
        hit = (self.offsets < end) & (self.offsets + self.size > low)
        lanes = lane_list(self.mask)
        number = int(hit.argmax()) if len(self.offsets) == len(lanes) else 0
        return f" lane {lanes[number]}"


class LanePlan(NamedTuple):
    """Where the lanes of an access to shared memory go, from the CTA's start.

    Attributes:
        offsets: In bytes.
        rows: In accesses.
        chunks: In chunks of 16 bytes.
        lowest: Lowest byte address.
        highest: Highest byte address that a lane's access begins at.
        aligned: Whether all are multiples of the access' size.
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    chunks: NDArray[np.int64]
    lowest: int
    highest: int
    aligned: bool


@lru_cache(maxsize=4096)
def lane_plan(addresses: bytes, base: int, row_shift: int) -> LanePlan:
    """The plan of 32-bit addresses. A loop has few different ones, and each takes several reductions."""
    # What lies below the CTA's memory wraps around and becomes an index beyond its end.
    offsets = (np.frombuffer(addresses, np.uint32) - np.uint32(base)).astype(np.int64)
    aligned = not int(np.bitwise_or.reduce(offsets)) & ((1 << row_shift) - 1)
    return LanePlan(
        offsets, offsets >> row_shift, offsets >> 4, int(offsets.min()), int(offsets.max()), aligned
    )


class Spread:
    """How the lanes of an access to global memory lie, wherever that is.

    Attributes:
        size: Bytes a lane.
        offsets: Of the lanes from the lowest, in bytes.
        below: How far the lowest is below the first lane.
        extent: From the lowest address to the end of the highest access.
        together: Whether each lane's access begins where that of the lane before ends.
        grain: What has a power of two in common with `size` and all offsets has it in common with this.
    """

    __slots__ = ("_units", "below", "extent", "grain", "offsets", "size", "together")

    def __init__(self, distances: NDArray[np.int64], size: int) -> None:
        lowest = int(distances.min())
        self.size, self.below = size, -lowest
        self.offsets = distances - lowest
        self.extent = int(self.offsets.max()) + size
        self.together = bool((np.diff(distances) == size).all())
        self.grain = int(np.bitwise_or.reduce(self.offsets)) | size
        self._units: dict[int, NDArray[np.int64]] = {}

    def units(self, start: int, shift: int) -> Places:
        """Numbers of the `2**shift` bytes that the lanes access, lane by lane, with the lowest at `start`.

        They must divide `start` and `grain`, unless the lanes lie together: then the parts of one count, too.
        """
        if self.together:
            return slice(start >> shift, -(-(start + self.extent) >> shift))
        found = self._units.get(shift)
        if found is None:
            found = self.offsets >> shift
            if self.size >> shift > 1:
                found = parts(found, self.size >> shift)
            self._units[shift] = found
        return found + (start >> shift)

    def granules(self, low: int) -> Iterable[int]:
        """Numbers of the 16 bytes that the lanes access, in their order, with the lowest at `low`."""
        if self.together and (self.size <= 16 or len(self.offsets) == 1):
            return range(low >> 4, (low + self.extent + 15) >> 4)
        return granules_of(self.offsets + low, self.size)


def granules_of(addresses: NDArray[np.integer], size: int) -> Iterable[int]:
    """Numbers of the 16 bytes that lanes access, in their order.

    No set: its order, and so whom a store wakes first, would depend on where the host puts the memory.
    """
    lanes = addresses >> 4
    return dict.fromkeys(
        (lanes if size <= 16 else np.concatenate((lanes, lanes + lanes.dtype.type(1)))).tolist()
    )


@lru_cache(maxsize=4096)
def _spread(distances: bytes, size: int) -> Spread:
    return Spread(np.frombuffer(distances, np.int64), size)


@lru_cache
def one_place(size: int) -> Spread:
    """That of a single lane, or of lanes at one place."""
    return Spread(np.zeros(1, np.int64), size)


def spread(addresses: NDArray[np.uint64], size: int) -> tuple[int, Spread]:
    """The lowest of 64-bit addresses of lanes, and how they lie."""
    found = _spread((addresses - addresses[:1]).tobytes(), size)
    return int(addresses[0]) - found.below, found
