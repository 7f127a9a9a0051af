"""Loads that return a value which a store has replaced, if no order puts the store before them.

The memory model lets a load return an older value than the last one. It must return the last one only if the
last store happens before the load, or if its party has observed that store. A reader that does not acquire
may read old data after a new flag. A poll may read the previous value again. Polled data must therefore
distinguish old from new: a sentinel that was not restored after the last use does not. The elements of a
vector access (`.v2`, `.v4`) are separate accesses, so a poll may read some new and some old ones; a `.b128`
access is single. Single words that are polled separately become new like the elements of a vector of 16
bytes.

Replaced values are kept for symmetric memory and other ranks' memory, for stores of at least 4 bytes. In
`lazy` mode the first load of a place returns the old value, and each further one returns one more new
element. In `random` mode the first load begins anywhere between. There a `.b128` load may read parts of a
vector store, whose elements are separate stores. In `immediate` mode this applies only to strong accesses: to
vectors, and to words without acquire and release. LL protocols, in which the data is its own flag, use such
accesses.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cute_emulator.machine.access import Access
    from cute_emulator.machine.lane_plan import Places, Spread
    from cute_emulator.machine.memory import Allocation
    from cute_emulator.machine.warp import Group

WORD, WORD_SHIFT = 4, 2
VECTOR = 16
"""Bytes of the longest vector that is polled."""


class Replaced:
    """Values that stores to an allocation replaced, with the epochs and element sizes of the last stores."""

    def __init__(self, allocation: Allocation) -> None:
        self.raw = np.zeros(allocation.nbytes, np.uint8)
        self.epochs = np.zeros(allocation.nbytes // WORD + 1, np.int64)
        self.widths = np.zeros(allocation.nbytes // WORD + 1, np.uint8)


class OldValues:
    """Record of replaced values, updated by stores to global memory and read by unordered loads."""

    def __init__(self, mode: str, seed: int) -> None:
        self._all = mode != "immediate"
        self._seed = seed
        self._random = random.Random(seed ^ 0x01D) if mode == "random" else None
        self._replaced: dict[int, Replaced] = {}
        self._looks: dict[tuple[int, int], tuple[bytes, int]] = {}

    def clear(self) -> None:
        """Drops all values: everything stored is ordered before what follows."""
        self._replaced.clear()
        self._looks.clear()

    def wants(self, access: Access, allocation: Allocation, group: Group) -> bool:
        """Returns whether the values that an access replaces or reads may matter."""
        return (
            access.size >= WORD
            and (self._all or access.polls or (access.strong and access.count > 1))
            and (allocation.kind == "symmetric" or allocation.rank != group.warp.grid.launch.rank)
        )

    def replace(self, access: Access, allocation: Allocation, low: int, spread: Spread, epoch: int) -> None:
        """Records the values that a store is about to replace."""
        kept = self._replaced.get(allocation.base)
        if kept is None:
            kept = self._replaced[allocation.base] = Replaced(allocation)
        cells, words = spread.units(low - allocation.base, 0), _words(allocation, low, spread)
        kept.raw[cells] = allocation.raw[cells]
        kept.epochs[words] = epoch
        kept.widths[words] = access.size if access.is_single else access.width

    def loaded(
        self,
        access: Access,
        group: Group,
        allocation: Allocation,
        low: int,
        spread: Spread,
        unknown: list[int],
        now: Any,
    ) -> Any:
        """Returns the value of a load; for a strong one the agent records where it is old.

        Args:
            access: Load instruction.
            group: Group that loads.
            allocation: Allocation that is read.
            low: Lowest address.
            spread: Distances of the lanes from the lowest address.
            unknown: Epochs of stores that are not ordered before it.
            now: Current contents, `[lanes, elements]` or, for one address, bytes.
        """
        kept = self._replaced.get(allocation.base)
        if kept is None or access.publishes or not self.wants(access, allocation, group):
            return now
        epochs = kept.epochs[_words(allocation, low, spread)].reshape(len(spread.offsets), -1)
        late = epochs == unknown[0]
        for epoch in unknown[1:]:
            late |= epochs == epoch
        if not np.logical_or.reduce(late, None):
            return now
        cells = (spread.offsets + (low - allocation.base))[:, None] + np.arange(access.size)
        widths = kept.widths[_words(allocation, low, spread)].reshape(late.shape)
        starts, masks = cells[:, 0].tolist(), dict.fromkeys(cells[:, 0].tolist(), bytes(access.size))
        late_lanes = np.logical_or.reduce(late, 1).tolist()
        for start, at in dict(zip(starts, range(len(starts)), strict=True)).items():  # once for each address
            if late_lanes[at]:
                width = access.size if access.is_single else access.width
                if self._random is not None:
                    width = min(width, int(widths[at][late[at]].min()))
                place = allocation.base, start
                masks[start] = self._hidden(access, place, epochs[at].tobytes(), access.size // width)
        hide = np.frombuffer(b"".join([masks[start] for start in starts]), np.bool_).reshape(cells.shape)
        hide = hide & np.repeat(late, WORD, axis=1)
        new = np.where(hide, kept.raw[cells], np.array(now).view(np.uint8).reshape(cells.shape))
        if access.strong:
            is_old = np.logical_or.reduce(hide, 1).tolist()
            old = [allocation.base + start for start, hidden in zip(starts, is_old, strict=True) if hidden]
            group.warp.agent.stale = frozenset(old)
        return new.view(now.dtype).reshape(now.shape)

    def _hidden(self, access: Access, place: tuple[int, int], epochs: bytes, parts: int) -> bytes:
        """Returns for each byte of a load whether it is still old.

        Neighbouring places become new in different orders.
        """
        polled = access.polls and access.count == 1 and access.size < VECTOR  # a part of the polled vector
        size = VECTOR if polled else access.size
        of = size // (access.size // parts)
        stored, looks = self._looks.get(place, (b"", 0))
        if stored != epochs:
            looks = self._random.randint(0, of) if self._random is not None else 0
        self._looks[place] = epochs, looks + 1
        first = place[1] % size * of // size if polled else 0
        number = (place[1] // size + self._seed) % len(_orders(of))
        return _mask(of, number, first, parts, min(looks, of), access.size // parts)


@lru_cache(maxsize=4096)
def _mask(of: int, number: int, first: int, parts: int, looks: int, nbytes: int) -> bytes:
    """Returns for each byte whether its part is new later than after `looks` loads.

    Args:
        of: Number of parts that become new one after the other.
        number: Number of their order.
        first: First part of the load.
        parts: Number of parts of the load.
        looks: Number of loads before this one, at most `of`.
        nbytes: Bytes of a part.
    """
    order = _orders(of)[number][first : first + parts]
    return b"".join([bytes([n >= looks]) * nbytes for n in order])


@lru_cache
def _orders(parts: int) -> list[tuple[int, ...]]:
    """Returns orders in which elements become new."""
    first = tuple(range(parts))
    return list(permutations(first)) if parts <= 4 else [first[n:] + first[:n] for n in first]


def _words(allocation: Allocation, low: int, spread: Spread) -> Places:
    """Returns numbers of an access's words in an allocation."""
    return spread.units(low - (allocation.base & -WORD), WORD_SHIFT)
