"""Loads that see what a store has replaced, as long as nothing orders the store before them.

The memory model lets a load return an older value than the last one unless the store of the last one happens
before it, or somebody has seen it before. A reader that does not acquire gets old data after a new flag; a
poll may find the place as it was once more. What is polled must therefore tell old from new: a sentinel that
was not put back after the last use does not. The elements of a vector access (`.v2`, `.v4`) are accesses of
their own, so a poll may find some of them new and others old; one of `.b128` is whole. Single words that are
polled for themselves become new like the elements of a vector of 16 bytes.

What stores replaced is kept for symmetric memory and other ranks' memory, for stores of 4 bytes and more.
In `lazy` mode the first look at a place finds it old, and each further one finds one element more new; in
`random` mode it begins anywhere between, and a `.b128` load may find parts of a vector store, whose elements
are stores of their own. In `immediate` mode that holds only for vectors, and for words without acquire and
release, that are loaded and stored by strong accesses, which is how data that is its own flag travels.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cute_emulator.machine.access import Access
    from cute_emulator.machine.lane_plan import Places, Spread
    from cute_emulator.machine.memory import Allocation
    from cute_emulator.machine.warp import Group

WORD, WORD_SHIFT = 4, 2
VECTOR = 16
"""Bytes of the longest vector that is polled."""


class Replaced:
    """What the stores to an allocation replaced: its words before, the last stores' epochs and elements."""

    def __init__(self, allocation: Allocation) -> None:
        self.raw = np.zeros(allocation.nbytes, np.uint8)
        self.epochs = np.zeros(allocation.nbytes // WORD + 1, np.int64)
        self.widths = np.zeros(allocation.nbytes // WORD + 1, np.uint8)


class OldValues:
    """Told of stores to global memory as they are made, and asked at loads that no order puts after them."""

    def __init__(self, mode: str, seed: int) -> None:
        self._all = mode != "immediate"
        self._seed = seed
        self._random = random.Random(seed ^ 0x01D) if mode == "random" else None
        self._replaced: dict[int, Replaced] = {}
        self._looks: dict[tuple[int, int], tuple[bytes, int]] = {}

    def clear(self) -> None:
        """All that was stored is ordered before what follows."""
        self._replaced.clear()
        self._looks.clear()

    def wants(self, access: Access, allocation: Allocation, group: Group) -> bool:
        """Whether what an access replaces or finds may matter."""
        return (
            access.size >= WORD
            and (self._all or access.polls or (access.strong and access.count > 1))
            and (allocation.kind == "symmetric" or allocation.rank != group.warp.grid.launch.rank)
        )

    def replace(self, access: Access, allocation: Allocation, low: int, spread: Spread, epoch: int) -> None:
        """A store is about to be made."""
        kept = self._replaced.get(allocation.base)
        if kept is None:
            kept = self._replaced[allocation.base] = Replaced(allocation)
        cells, words = spread.units(low - allocation.base, 0), _words(allocation, low, spread)
        kept.raw[cells] = allocation.raw[cells]
        kept.epochs[words] = epoch
        kept.widths[words] = access.size if access.whole else access.width

    def found(
        self,
        access: Access,
        group: Group,
        allocation: Allocation,
        low: int,
        spread: Spread,
        unknown: list[int],
        now: Any,
    ) -> Any:
        """What a load finds; of a strong one the agent keeps where something of it is old.

        Args:
            access: The load.
            group: Whose it is.
            allocation: Where.
            low: The lowest address.
            spread: How the lanes lie from there.
            unknown: Epochs of stores that are not ordered before it.
            now: What is there, `[lanes, elements]` or, for one address, bytes.
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
        new, old = np.array(now).view(np.uint8).reshape(len(cells), access.size), set()
        for at in {
            int(row[0]): n for n, row in enumerate(cells)
        }.values():  # lanes at one place look together
            if late[at].any():
                place = allocation.base, int(cells[at, 0])
                width = access.size if access.whole else access.width
                if self._random is not None:
                    width = min(width, int(widths[at][late[at]].min()))
                hidden = self._hidden(access, place, epochs[at].tobytes(), access.size // width)
                hide = np.repeat(hidden, access.size // len(hidden)) & np.repeat(late[at], WORD)
                same = cells[:, 0] == cells[at, 0]
                new[same] = np.where(hide, kept.raw[cells[at]], new[same])
                if hide.any():
                    old.add(allocation.base + int(cells[at, 0]))
        if access.strong:
            group.warp.agent.stale = frozenset(old)
        return new.view(now.dtype).reshape(now.shape)

    def _hidden(self, access: Access, place: tuple[int, int], epochs: bytes, parts: int) -> NDArray[np.bool_]:
        """Which of its parts a look still finds old; neighbouring places become new in different orders."""
        polled = access.polls and access.count == 1 and access.size < VECTOR  # a part of what is polled
        size = VECTOR if polled else access.size
        of = size // (access.size // parts)
        stored, looks = self._looks.get(place, (b"", 0))
        if stored != epochs:
            looks = self._random.randint(0, of) if self._random is not None else 0
        self._looks[place] = epochs, looks + 1
        orders = _orders(of)
        order = orders[(place[1] // size + self._seed) % len(orders)]
        first = place[1] % size * of // size if polled else 0
        return np.array(order[first : first + parts]) >= looks


@lru_cache
def _orders(parts: int) -> list[tuple[int, ...]]:
    """Orders in which elements become new."""
    first = tuple(range(parts))
    return list(permutations(first)) if parts <= 4 else [first[n:] + first[:n] for n in first]


def _words(allocation: Allocation, low: int, spread: Spread) -> Places:
    """Numbers in an allocation of the words of an access."""
    return spread.units(low - (allocation.base & -WORD), WORD_SHIFT)
