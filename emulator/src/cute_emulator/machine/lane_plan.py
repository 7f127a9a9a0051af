"""Address arithmetic of the lanes of a memory access, cached for equal accesses.

In shared memory a loop has few different addresses, so that the plan of an access is that of its addresses.
In global memory a loop advances, but its lanes have the same distances each time: the plan is of their
distances.
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
    """Returns the numbers of the `count` parts of each unit, in order.

    `first` contains the number of each unit's first part.
    """
    return (first[:, None] + _COUNT[:count]).reshape(-1)


class Lanes(NamedTuple):
    """Lanes of an access that is being judged, for messages.

    Attributes:
        mask: Mask of the lanes.
        offsets: First byte of each lane, or one for all.
        size: Bytes of each.
    """

    mask: int
    offsets: NDArray[np.int64] | int
    size: int

    def at(self, low: int, end: int) -> str:
        """Returns the first lane that accesses some bytes, as ` lane 3`."""
        offsets, lanes = np.atleast_1d(self.offsets), lane_list(self.mask)
        hit = (offsets < end) & (offsets + self.size > low)
        number = int(hit.argmax()) if len(offsets) == len(lanes) else 0
        return f" lane {lanes[number]}"


class LanePlan(NamedTuple):
    """Locations of the lanes of an access to shared memory, from the CTA's start.

    Attributes:
        offsets: Offsets in bytes.
        rows: Offsets in accesses.
        chunks: Offsets in chunks of 16 bytes.
        lowest: Lowest byte address.
        highest: Highest first byte address of a lane's access.
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
    """Returns the plan of 32-bit addresses, cached.

    A loop has few different ones, and each needs reductions.
    """
    # An address below the CTA's memory wraps around and becomes an index beyond its end.
    offsets = (np.frombuffer(addresses, np.uint32) - np.uint32(base)).astype(np.int64)
    aligned = not int(np.bitwise_or.reduce(offsets)) & ((1 << row_shift) - 1)
    return LanePlan(
        offsets, offsets >> row_shift, offsets >> 4, int(offsets.min()), int(offsets.max()), aligned
    )


class Spread:
    """Distances of the lanes of an access to global memory, for any address.

    Attributes:
        size: Bytes per lane.
        offsets: Offset of each lane from the lowest, in bytes.
        below: Distance of the lowest lane below the first.
        extent: Distance from the lowest address to the end of the highest access.
        together: Whether each lane's access begins at the end of the access of the lane before.
        grain: A power of two that divides `size` and all offsets divides it, too.
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
        """Returns numbers of the `2**shift`-byte units that the lanes access, lane by lane.

        The lowest lane is at `start`. The unit must divide `start` and `grain`, unless the lanes are
        contiguous: then partial units count, too.
        """
        if self.together:
            return slice(start >> shift, -(-(start + self.extent) >> shift))
        units = self._units.get(shift)
        if units is None:
            units = self.offsets >> shift
            if self.size >> shift > 1:
                units = parts(units, self.size >> shift)
            self._units[shift] = units
        return units + (start >> shift)

    def granules(self, low: int) -> Iterable[int]:
        """Returns numbers of the 16-byte granules that the lanes access, in their order, lowest at `low`."""
        if self.together and (self.size <= 16 or len(self.offsets) == 1):
            return range(low >> 4, (low + self.extent + 15) >> 4)
        return granules_of(self.offsets + low, self.size)


def granules_of(addresses: NDArray[np.integer], size: int) -> Iterable[int]:
    """Returns numbers of the 16-byte granules that lanes access, in their order.

    The result is no set: the order of a set, and so the order of wake-ups, would depend on host addresses.
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
    """Returns the spread of a single lane, or of lanes at one address."""
    return Spread(np.zeros(1, np.int64), size)


def spread(addresses: NDArray[np.uint64], size: int) -> tuple[int, Spread]:
    """Returns the lowest of 64-bit addresses of lanes, and their spread."""
    distances = _spread((addresses - addresses[:1]).tobytes(), size)
    return int(addresses[0]) - distances.below, distances
