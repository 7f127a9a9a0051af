"""Injected faults: stores and copies that are lost, late or repeated, and ranks that stop.

They apply to any kernel, and are set in Python (`Emulator.faults`) or on the command line
(`Faults.by_words`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_emulator.execution.scheduler import Scheduler
    from cute_emulator.machine.memory import Allocation
    from cute_emulator.machine.warp import Group, Warp

ACTIONS = ("drop", "delay", "duplicate")
KINDS = ("store", "flag", "copy", "load")
WORDS = "drop|delay|duplicate[:store|flag|copy|load][:source=R,target=R,line=N,begin=N,end=N,skip=N,count=N,\
instructions=N], kill:rank=R,after=N or stall:rank=R,begin=N,end=N"


@dataclass(frozen=True)
class StoreFault:
    """Fault of selected stores into another rank's memory, or into the rank's memory if `target` selects it.

    Attributes:
        action: `drop`, `delay` (executed when nothing else can continue, or after `instructions`), or
            `duplicate` (executed, and executed again then).
        source: Storing rank, or None for any.
        target: Rank that owns the memory, or None for any but the storing one.
        line: PTX line, or None for any.
        begin: First matching byte of the target's allocation, compared with the lowest byte of a store.
        end: One past the last matching byte, or None for the allocation's end.
        skip: Number of matching stores to leave unchanged first.
        count: Number of stores to change after that; None for all.
        instructions: Warp instructions until a late store is executed.
        kind: `store` (ordinary), `flag` (release, relaxed, volatile, atomics, reductions), `copy` (bulk and
            TMA stores), or None for all of these. `load` is no store: bulk and TMA copies into shared memory
            of the rank, each CTA's separately, with the completion of their mbarrier; a repeated one
            completes it once.
    """

    action: str
    source: int | None = None
    target: int | None = None
    line: int | None = None
    begin: int = 0
    end: int | None = None
    skip: int = 0
    count: int | None = None
    instructions: int = 1 << 62
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action={self.action!r} must be one of {', '.join(ACTIONS)}")
        if self.kind not in (None, *KINDS):
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")


class Faults:
    """Faults of a machine.

    Attributes:
        active: Whether there are any.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.active = False
        self._scheduler = scheduler
        self._stores: list[StoreFault] = []
        self._matched: dict[int, int] = {}
        self._hit: dict[int, int] = {}
        self._killed: dict[int, int] = {}
        self._stalled: dict[int, tuple[int, int]] = {}
        self._held: list[Warp] = []
        self._late: list[tuple[int, Callable[[], None]]] = []

    def add(self, fault: StoreFault) -> None:
        """Adds a fault of stores."""
        self._stores.append(fault)
        self.active = True

    def by_words(self, text: str) -> None:
        """Adds a fault in the syntax of the command line, such as ``drop:flag:source=0,target=1,count=1``.

        Raises:
            ValueError: The syntax is wrong.
        """
        stops: dict[str, Callable[..., None]] = {"kill": self.kill, "stall": self.stall}
        action, *rest = text.split(":")
        kind = rest.pop(0) if rest and "=" not in rest[0] else None
        try:
            pairs = [pair.split("=") for pair in rest.pop().split(",")] if rest else []
            values = {name: int(value) for name, value in pairs}
            if rest:
                raise ValueError
            if action in stops and kind is None:
                stops[action](**values)
            else:
                self.add(StoreFault(action, kind=kind, **values))
        except (TypeError, ValueError) as why:
            raise ValueError(f"fault {text!r} must read {WORDS}" + (f": {why}" if str(why) else "")) from None

    def hits(self) -> list[tuple[StoreFault, int]]:
        """Returns each fault of stores with the number of stores that it has changed."""
        return [(fault, self._hit.get(n, 0)) for n, fault in enumerate(self._stores)]

    def kill(self, rank: int, after: int = 0) -> None:
        """Stops a rank for good once the machine has run `after` warp instructions."""
        self._killed[rank] = after
        self.active = True

    def stall(self, rank: int, begin: int, end: int) -> None:
        """Stops a rank while the count of warp instructions is in `[begin, end)`, if others can go on."""
        self._stalled[rank] = begin, end
        self.active = True

    def catches(
        self,
        group: Group,
        line: int,
        kind: str,
        allocation: Allocation,
        low: int,
        write: Callable[[], None],
    ) -> bool:
        """Returns whether a store, `low` its lowest address, is withheld now; a late one is kept."""
        return self._catches(group, line, kind, allocation.rank, low - allocation.base, write, write)

    def catches_load(
        self, group: Group, line: int, arrive: Callable[[], None], write: Callable[[], None]
    ) -> bool:
        """Returns whether a copy into shared memory must not `arrive` now.

        A repeated one only calls `write`.
        """
        return self._catches(group, line, "load", group.warp.grid.launch.rank, 0, arrive, write)

    def _catches(
        self,
        group: Group,
        line: int,
        kind: str,
        target: int,
        offset: int,
        late: Callable[[], None],
        again: Callable[[], None],
    ) -> bool:
        source = group.warp.grid.launch.rank
        for n, fault in enumerate(self._stores):
            wanted, have = (fault.source, fault.target, fault.line), (source, target, line)
            if any(want not in (None, is_) for want, is_ in zip(wanted, have, strict=True)):
                continue
            if offset < fault.begin or (fault.end is not None and offset >= fault.end):
                continue
            if fault.kind != kind and (fault.kind is not None or kind == "load"):
                continue
            if source == target and fault.target is None and kind != "load":
                continue
            seen = self._matched[n] = self._matched.get(n, 0) + 1
            if seen <= fault.skip or (fault.count is not None and seen > fault.skip + fault.count):
                continue
            self._hit[n] = self._hit.get(n, 0) + 1
            if fault.action != "drop":
                kept = late if fault.action == "delay" else again
                self._late.append((self._scheduler.executed + fault.instructions, kept))
            return fault.action != "duplicate"
        return False

    def let_go(self) -> None:
        """Ends a run: its late stores and stalled ranks do not affect the next run."""
        self._late.clear()
        self._held.clear()

    def is_dead(self, rank: int) -> bool:
        """Returns whether a rank has been killed."""
        after = self._killed.get(rank)
        return after is not None and self._scheduler.executed >= after

    def holds(self, warp: Warp) -> bool:
        """Returns whether a warp may not run now."""
        rank = warp.grid.launch.rank
        if self.is_dead(rank):
            return True
        begin, end = self._stalled.get(rank, (0, 0))
        if begin <= self._scheduler.executed < end:
            self._held.append(warp)
            return True
        return False

    def step(self, idle: bool) -> bool:
        """Executes late stores that are due and resumes stalled ranks.

        If nothing else can continue, it does so for all of them.
        """
        now = self._scheduler.executed
        due = [w for at, w in self._late if idle or at <= now]
        self._late = [] if idle else [x for x in self._late if x[0] > now]
        for write in due:
            write()
        free = self._held if idle else [w for w in self._held if now >= self._stalled[w.grid.launch.rank][1]]
        if free:
            self._held = [w for w in self._held if w not in free]
            if idle:
                self._stalled.clear()
            for warp in free:
                self._scheduler.ready(warp)
        return bool(due or free)
