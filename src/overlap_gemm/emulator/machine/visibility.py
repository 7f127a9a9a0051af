"""An adversarial store model: ordinary stores reach another rank's memory late and out of order.

In modes `random` and `lazy` a weak store to memory of another rank is held back until a release or fence of
system scope by a warp that knows of it, until the storing rank itself reads or writes there, or until nothing
else can go on (`random`: or at any time before). The end of a kernel alone shows nothing to a peer that does
not wait for it. A flag at `.gpu` scope thus overtakes its data, as the ISA allows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_gemm.emulator.machine.memory import Allocation
    from overlap_gemm.emulator.machine.order import Agent


@dataclass(frozen=True)
class HeldStore:
    """A store that others cannot see yet: `low` to `high` are the addresses that it spans."""

    agent: Agent
    epoch: int
    allocation: Allocation
    low: int
    high: int
    put: Callable[[], None]


class HeldStores:
    """The stores that are held back, oldest first."""

    def __init__(self, mode: str, seed: int) -> None:
        self.active = mode != "immediate"
        self._random = mode == "random"
        self._rng = random.Random(seed ^ 0x57033)
        self._held: list[HeldStore] = []

    def hold(self, store: HeldStore) -> None:
        """Holds a store back, behind an overlapping one of the same rank if there is one."""
        self._held.append(store)

    def release(self, agent: Agent) -> None:
        """A warp released at system scope: what it knows of becomes visible."""
        if self._held:
            self._let_go(lambda s: s.agent is agent or agent.knows(s.epoch, s.agent))

    def touch(self, rank: int, allocation: Allocation, low: int, high: int) -> None:
        """A rank accesses memory of another: it sees its own stores, and keeps their order."""
        if self._held:
            self._let_go(
                lambda s: (
                    s.allocation is allocation
                    and s.low < high
                    and low < s.high
                    and s.agent.warp.grid.launch.rank == rank
                )
            )

    def step(self) -> None:
        """Between turns of warps: in `random` mode something may become visible."""
        if self._random and self._held and self._rng.random() < 0.1:
            chosen = self._held[self._rng.randrange(len(self._held))]
            self.touch(chosen.agent.warp.grid.launch.rank, chosen.allocation, chosen.low, chosen.high)

    def idle_step(self) -> bool:
        """Nothing else can go on: everything becomes visible."""
        some = bool(self._held)
        self._let_go(lambda s: True)
        return some

    def clear(self) -> None:
        """Forgets what a broken-off run left."""
        self._held.clear()

    def _let_go(self, which: Callable[[HeldStore], bool]) -> None:
        going = [s for s in self._held if which(s)]
        if going:
            self._held = [s for s in self._held if not which(s)]
            for store in going:
                store.put()
