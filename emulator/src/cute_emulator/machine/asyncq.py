"""Async engine: when TMA, bulk copies, tensor-core and cp.async operations take effect.

An operation is a chain of events. In mode `immediate` each event happens when it is issued. Only a product
waits for the next other event or the end of the warp's turn, so that several products can be joined. In
`random` events happen at random later times: after each turn of a warp one event with probability 0.3. In
`lazy` an event happens only when no warp can continue: as late as the specification allows. The seed modulo 4
selects the order of kinds, for example tensor, load, read, write. The event is random among those of a kind.
Global writes of bulk stores happen last, when no other event is pending.

Events of one queue happen in order: the tcgen05 operations of a CTA, and the wgmmas of a warpgroup. Other
events are ordered only by `Event.after`.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from cute_emulator.errors import EmulatorError

if TYPE_CHECKING:
    from cute_emulator.machine.clocks import Clocks

Mode = Literal["immediate", "random", "lazy"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Order in which `lazy` executes events when no warp can continue; by seed, because a late load hides errors
# that a late product shows, and vice versa. Global writes are always last.
_ORDERS = (
    ("tensor", "load", "read", "write"),
    ("load", "tensor", "read", "write"),
    ("read", "load", "tensor", "write"),
    ("tensor", "read", "load", "write"),
)


@dataclass(eq=False, slots=True)
class Event:
    """One effect of an asynchronous operation.

    Attributes:
        run: Function that executes the event.
        grid: Launch that issued the operation.
        owner: CTA whose memory the event reads or writes, for the exit check; None for none.
        what: Description, for messages.
        kind: `load` (into shared memory), `tensor` (core operation), `read` or `write` (the two halves of a
            bulk store); selects the order in `lazy` mode.
        after: Events that must have happened before.
        line: PTX line of the instruction.
        size: Amount for the model of time (`clocks`): bytes, or products of 16 bits; 0 for an event that
            only signals the end of others.
        begin: Cycle of the model at which it was issued.
        end: Cycle at which it is done; 0 without a model.
        issuer: CTA that issued it, if any.
        done: Whether it has happened.
        order: Number in the order of submission, from 1; 0 for an event of a queue.
        waits: Number of events of `after` that have not happened.
        followers: Events that wait for this one.
    """

    run: Callable[[], None]
    grid: Any
    owner: Any
    what: str
    kind: str = "load"
    after: tuple[Event, ...] = ()
    line: int = 0
    size: int = 0
    begin: int = field(default=0, init=False)
    end: int = field(default=0, init=False)
    issuer: Any = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    order: int = field(default=0, init=False)
    waits: int = field(default=0, init=False)
    followers: list[Event] = field(default_factory=list, init=False)


_number = attrgetter("order")


def _remove(events: list[Event], event: Event) -> None:
    del events[bisect_left(events, event.order, key=_number)]


class AsyncEngine:
    """Pending events: unordered ones and in-order queues (tensor-core pipes)."""

    def __init__(self, mode: str, seed: int) -> None:
        if mode not in MODES:
            raise ValueError(f"{mode=} must be one of {', '.join(MODES)}")
        self.mode = mode
        self.rng = random.Random(seed ^ 0x5EED)
        self._free: list[Event] = []  # unordered events that may happen now, in order of submission
        self._of_kind: dict[str, list[Event]] = {kind: [] for kind in _ORDERS[0]}  # the same by kind
        self._submitted = 0
        self.queues: dict[Any, deque[Event]] = {}
        self._order = _ORDERS[seed % len(_ORDERS)]
        self.held: Event | None = None
        self.moved: Callable[[], None] = lambda: None
        self.clocks: Clocks | None = None

    def submit(self, event: Event) -> Event:
        """Adds an unordered event."""
        self.settle()
        if self.clocks is not None:
            self.clocks.issued(event)
        if self.mode == "immediate" and all(e.done for e in event.after):
            self._do(event)
        else:
            self._submitted += 1
            event.order = self._submitted
            before = [e for e in event.after if not e.done]
            event.waits = len(before)
            for other in before:
                other.followers.append(event)
            if not before:
                self._release(event)
            self._count(event, 1)
        return event

    def _release(self, event: Event) -> None:
        """Marks an unordered event as ready to happen."""
        insort(self._free, event, key=_number)
        insort(self._of_kind[event.kind], event, key=_number)

    def enqueue(self, queue: Any, event: Event) -> Event:
        """Adds an event that happens after the earlier ones of its queue."""
        self.settle()
        if self.clocks is not None:
            self.clocks.issued(event)
        if self.mode == "immediate":
            self._do(event)
        else:
            self.queues.setdefault(queue, deque()).append(event)
            self._count(event, 1)
        return event

    def hold(self, queue: Any, event: Event) -> None:
        """Adds an event as `enqueue` does; in `immediate` mode it waits for `settle` and may be extended."""
        if self.mode == "immediate" and self.clocks is None:
            self.settle()
            self.held = event
        else:
            self.enqueue(queue, event)

    def settle(self) -> None:
        """Executes the event that `hold` has delayed."""
        if self.held is not None:
            event, self.held = self.held, None
            self._do(event)

    def step(self) -> None:
        """Executes an event at random in `random` mode; called between turns of warps."""
        self.settle()
        if self.mode == "random" and (self._free or self.queues) and self.rng.random() < 0.3:
            self._one(self._free, list(self.queues))

    def idle_step(self) -> bool:
        """Executes an event if no warp can continue; returns whether there was one."""
        free, queues = self._free, list(self.queues)
        if self.mode == "lazy" and (free or queues):
            heads = {queue: self.queues[queue][0].kind for queue in queues}
            kind = next(k for k in self._order if self._of_kind[k] or k in heads.values())
            free, queues = self._of_kind[kind], [queue for queue in queues if heads[queue] == kind]
        return self._one(free, queues) is not None

    def _one(self, free: list[Event], queues: list[Any]) -> Event | None:
        """Executes one of some unordered events, or the first event of one of some queues; returns it."""
        if not free and not queues:
            return None
        number = self.rng.randrange(len(free) + len(queues))
        if number < len(free):
            event = free[number]
            for events in (self._free, self._of_kind[event.kind]):
                _remove(events, event)
        else:
            chosen = queues[number - len(free)]
            queue = self.queues[chosen]
            event = queue.popleft()
            if not queue:
                del self.queues[chosen]
        self._count(event, -1)
        self._do(event)
        return event

    def _do(self, event: Event) -> None:
        clocks = self.clocks
        back = clocks.happens(event) if clocks is not None else 0
        try:
            event.run()
        except EmulatorError as error:
            error.line = error.line or event.line
            error.show(event.grid.program.module.text)
            raise
        finally:
            if clocks is not None:
                clocks.now = back
        event.done = True
        for follower in event.followers:
            follower.waits -= 1
            if not follower.waits:
                self._release(follower)
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
        """Executes the pending events of a grid that has ended, as the end of a kernel does."""
        mine = [e for e in self._free if e.grid is grid]
        while True:
            queues = [q for q, events in self.queues.items() if events[0].grid is grid]
            event = self._one(mine, queues)
            if event is None:
                return
            if event.order:  # of no queue
                _remove(mine, event)
            for follower in event.followers:
                if not follower.waits and follower.grid is grid:
                    insort(mine, follower, key=_number)

    def reset(self) -> None:
        """Drops everything that is pending."""
        self.held = None
        self._free.clear()
        for events in self._of_kind.values():
            events.clear()
        self.queues.clear()
