"""Adversarial store model: ordinary stores become visible to another rank late and out of order.

In modes `random` and `lazy` a weak store to memory of another rank is held back until one of these:

- a release or fence of system scope by a warp that is ordered after the store
- a read or write of the storing rank there
- a state in which nothing else can continue (`random`: or any time before)

The end of a kernel alone does not make a store visible to a peer that does not wait for the kernel. A flag at
`.gpu` scope may therefore overtake its data, as the ISA allows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_emulator.machine.memory import Allocation
    from cute_emulator.machine.order import Agent


_PAGE = 10  # binary logarithm of the bytes by which stores are looked up


@dataclass(eq=False, slots=True)
class HeldStore:
    """Store that is not visible to others yet; it spans the addresses from `low` to `high`."""

    agent: Agent
    epoch: int
    allocation: Allocation
    low: int
    high: int
    put: Callable[[], None]
    number: int = 0
    made: bool = False

    @property
    def rank(self) -> int:
        """Returns the storing rank."""
        return self.agent.warp.grid.launch.rank


class HeldStores:
    """Stores that are held back, indexed by the storing warp and by page.

    `_of_grid` contains them by launch and warp, in their order; `_in_page` by storing rank and page. Executed
    stores are removed from the latter, and from `_all`, when they are next encountered.
    """

    def __init__(self, mode: str, seed: int) -> None:
        self.active = mode != "immediate"
        self._random = mode == "random"
        self._rng = random.Random(seed ^ 0x57033)
        self._count = 0
        self._all: list[HeldStore] = []
        self._of_grid: dict[int, dict[int, deque[HeldStore]]] = {}
        self._in_page: dict[int, dict[int, list[HeldStore]]] = {}

    def hold(self, store: HeldStore) -> None:
        """Holds a store back, after an overlapping one of the same rank if there is one."""
        self._count += 1
        store.number = self._count
        self._all.append(store)
        of_agent = self._of_grid.setdefault(store.agent.warp.grid.number, {})
        of_agent.setdefault(store.agent.id, deque()).append(store)
        pages = self._in_page.setdefault(store.rank, {})
        for page in range(store.low >> _PAGE, (store.high - 1 >> _PAGE) + 1):
            pages.setdefault(page, []).append(store)

    def release(self, agent: Agent) -> None:
        """Makes visible all stores that are ordered before a release at system scope."""
        due = []
        for number, of_agent in list(self._of_grid.items()):
            wholly = number in agent.grids
            for key in list(of_agent) if wholly else of_agent.keys() & agent.vector.keys():
                stores = of_agent[key]
                while stores and (wholly or agent.knows(stores[0].epoch, stores[0].agent)):
                    due.append(stores.popleft())
                if not stores:
                    del of_agent[key]
            if not of_agent:
                del self._of_grid[number]
        self._make(due)

    def touch(self, rank: int, allocation: Allocation, low: int, high: int) -> None:
        """Makes visible a rank's earlier stores to memory that it accesses.

        A rank observes its stores in order.
        """
        pages = self._in_page.get(rank)
        if not pages:
            return
        first, last = low >> _PAGE, high - 1 >> _PAGE
        selected: Iterable[int] = range(first, last + 1)
        if last - first >= len(pages):
            selected = [page for page in pages if first <= page <= last]
        due = []
        for page in selected:
            stores = pages.get(page)
            if stores is None:
                continue
            stores[:] = [s for s in stores if not s.made]
            if not stores:
                del pages[page]
            due += [s for s in stores if s.allocation is allocation and s.low < high and low < s.high]
        self._make(due)

    def step(self) -> None:
        """Makes a store visible at random in `random` mode; `Scheduler.run` calls it after each turn."""
        if self._random and self._all and self._rng.random() < 0.1:
            number = self._rng.randrange(len(self._all))
            chosen, self._all[number] = self._all[number], self._all[-1]
            self._all.pop()
            if not chosen.made:
                self.touch(chosen.rank, chosen.allocation, chosen.low, chosen.high)

    def idle_step(self) -> bool:
        """Makes all stores visible if nothing else can continue; returns whether there were any.

        The scheduler calls it when no warp is ready and no async event is pending.
        """
        held = [s for s in self._all if not s.made]
        for of_agent in self._of_grid.values():
            held += [store for stores in of_agent.values() for store in stores if not store.made]
        self._make(held)
        self._forget()
        return bool(held)

    def clear(self) -> None:
        """Drops the stores of a run that ended by an error."""
        self._forget()

    def _forget(self) -> None:
        self._all.clear()
        self._of_grid.clear()
        self._in_page.clear()

    @staticmethod
    def _make(stores: list[HeldStore]) -> None:
        for store in sorted(stores, key=lambda s: s.number):
            if not store.made:
                store.made = True
                store.put()
