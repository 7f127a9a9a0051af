"""An adversarial store model: ordinary stores reach another rank's memory late and out of order.

In modes `random` and `lazy` a weak store to memory of another rank is held back until a release or fence of
system scope by a warp that knows of it, until the storing rank itself reads or writes there, or until nothing
else can go on (`random`: or at any time before). The end of a kernel alone shows nothing to a peer that does
not wait for it. A flag at `.gpu` scope thus overtakes its data, as the ISA allows.
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
    """A store that others cannot see yet: `low` to `high` are the addresses that it spans."""

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
        """The storing rank."""
        return self.agent.warp.grid.launch.rank


class HeldStores:
    """The stores that are held back, found by the warp that made them and by where they go.

    `_of_grid` has them by launch and warp, in their order; `_in_page` by storing rank and page. What has been
    made is taken out of the latter, and of `_all`, when it is come across.
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
        """A warp released at system scope: what it knows of becomes visible."""
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
        """A rank accesses memory of another: it sees its own stores, and keeps their order."""
        pages = self._in_page.get(rank)
        if not pages:
            return
        first, last = low >> _PAGE, high - 1 >> _PAGE
        near: Iterable[int] = range(first, last + 1)
        if last - first >= len(pages):
            near = [page for page in pages if first <= page <= last]
        due = []
        for page in near:
            stores = pages.get(page)
            if stores is None:
                continue
            stores[:] = [s for s in stores if not s.made]
            if not stores:
                del pages[page]
            due += [s for s in stores if s.allocation is allocation and s.low < high and low < s.high]
        self._make(due)

    def step(self) -> None:
        """Between turns of warps: in `random` mode something may become visible."""
        if self._random and self._all and self._rng.random() < 0.1:
            number = self._rng.randrange(len(self._all))
            chosen, self._all[number] = self._all[number], self._all[-1]
            self._all.pop()
            if not chosen.made:
                self.touch(chosen.rank, chosen.allocation, chosen.low, chosen.high)

    def idle_step(self) -> bool:
        """Nothing else can go on: everything becomes visible."""
        held = [s for s in self._all if not s.made]
        for of_agent in self._of_grid.values():
            held += [store for stores in of_agent.values() for store in stores if not store.made]
        self._make(held)
        self._forget()
        return bool(held)

    def clear(self) -> None:
        """Forgets what a broken-off run left."""
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
