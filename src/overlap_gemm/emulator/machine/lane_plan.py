"""Where the lanes of an access to shared memory go: the arithmetic of their addresses."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
