"""The async engine: when TMA, bulk copies, tensor-core and cp.async operations take effect.

An operation is a chain of events. In mode `immediate` each happens when it is issued, except that a product
waits for the next other event or the end of the warp's turn, so that a run of products can be one. In
`random` they happen at random later times. In `lazy` an event happens only when no warp can go on: as late as
the specification allows, and the global writes of bulk stores last of all, when nothing else is pending.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlap_gemm.emulator.machine.errors import EmulatorError

if TYPE_CHECKING:
    from overlap_gemm.emulator.trace import Trace

MODES = ("immediate", "random", "lazy")
# What `lazy` lets happen first when it must let something happen; by seed, because a late load hides what a
# late product shows, and the other way round. Global writes are always last.
_ORDERS = (
    ("tensor", "load", "read", "write"),
    ("load", "tensor", "read", "write"),
    ("read", "load", "tensor", "write"),
    ("tensor", "read", "load", "write"),
)


@dataclass(eq=False, slots=True)
class Event:
    """One thing an operation does.

    Attributes:
        run: Does it.
        grid: The launch that issued it.
        owner: The CTA whose memory it reads or writes, for the exit check; None for none.
        what: For messages.
        kind: `load` (into shared memory), `tensor` (core operation), `read` or `write` (the two halves of a
            bulk store); `lazy` mode goes by it.
        after: Events that must have happened before.
        line: PTX line of the instruction.
    """

    run: Callable[[], None]
    grid: Any
    owner: Any
    what: str
    kind: str = "load"
    after: tuple[Event, ...] = ()
    line: int = 0
    done: bool = field(default=False, init=False)


class AsyncEngine:
    """Pending events, unordered ones and in-order queues (tensor-core pipes)."""

    def __init__(self, mode: str, seed: int) -> None:
        if mode not in MODES:
            raise ValueError(f"{mode=} must be one of {', '.join(MODES)}")
        self.mode = mode
        self.rng = random.Random(seed ^ 0x5EED)
        self.pending: list[Event] = []
        self.queues: dict[Any, deque[Event]] = {}
        self._order = _ORDERS[seed % len(_ORDERS)]
        self.held: Event | None = None
        self.moved: Callable[[], None] = lambda: None
        self.trace: Trace | None = None

    def submit(self, event: Event) -> Event:
        """Adds an unordered event."""
        self.settle()
        if self.trace is not None:
            self.trace.issued(event)
        if self.mode == "immediate" and all(e.done for e in event.after):
            self._do(event)
        else:
            self.pending.append(event)
            self._count(event, 1)
        return event

    def enqueue(self, queue: Any, event: Event) -> Event:
        """Adds an event that happens after the earlier ones of its queue."""
        self.settle()
        if self.trace is not None:
            self.trace.issued(event)
        if self.mode == "immediate":
            self._do(event)
        else:
            self.queues.setdefault(queue, deque()).append(event)
            self._count(event, 1)
        return event

    def hold(self, queue: Any, event: Event) -> None:
        """Like `enqueue`, but what `immediate` mode would do now waits for `settle` and may grow."""
        if self.mode == "immediate" and self.trace is None:
            self.settle()
            self.held = event
        else:
            self.enqueue(queue, event)

    def settle(self) -> None:
        """Does the event that `hold` put off."""
        if self.held is not None:
            event, self.held = self.held, None
            self._do(event)

    def step(self) -> None:
        """Called between turns of warps: in `random` mode something may happen."""
        self.settle()
        if self.mode == "random" and (self.pending or self.queues) and self.rng.random() < 0.3:
            self._one(self._ready())

    def idle_step(self) -> bool:
        """Called when no warp can go on; returns whether something happened."""
        if not self.pending and not self.queues:
            return False
        ready = self._ready()
        if self.mode == "lazy" and ready:
            rank = [self._order.index(self._head(r).kind) for r in ready]
            ready = [r for r, place in zip(ready, rank, strict=True) if place == min(rank)]
        return self._one(ready)

    def _head(self, ready: Any) -> Event:
        return ready if isinstance(ready, Event) else self.queues[ready][0]

    def _ready(self) -> list[Any]:
        ready: list[Any] = [e for e in self.pending if all(a.done for a in e.after)]
        ready.extend(self.queues)
        return ready

    def _one(self, ready: list[Any]) -> bool:
        if not ready:
            return False
        chosen = ready[self.rng.randrange(len(ready))]
        if isinstance(chosen, Event):
            self.pending.remove(chosen)
            event = chosen
        else:
            queue = self.queues[chosen]
            event = queue.popleft()
            if not queue:
                del self.queues[chosen]
        self._count(event, -1)
        self._do(event)
        return True

    def _do(self, event: Event) -> None:
        try:
            event.run()
        except EmulatorError as error:
            error.line = error.line or event.line
            error.show(event.grid.program.module.text)
            raise
        event.done = True
        if self.trace is not None:
            self.trace.happened(event)
        self.moved()

    @staticmethod
    def _count(event: Event, step: int) -> None:
        if event.owner is not None:
            pending = event.owner.pending
            if step > 0:
                pending[id(event)] = event
            else:
                pending.pop(id(event), None)

    def drain(self, grid: Any) -> None:
        """Carries out what a grid that has ended left behind, as the end of a kernel does."""
        while True:
            mine = [e for e in self.pending if e.grid is grid and all(a.done for a in e.after)]
            queues = [q for q, events in self.queues.items() if events[0].grid is grid]
            if not mine and not queues:
                return
            self._one([*mine, *queues])

    def reset(self) -> None:
        """Drops everything that is pending."""
        self.held = None
        self.pending.clear()
        self.queues.clear()
