"""Streams of the ranks: launches one after the other, and waits of one stream for events of another.

A programmatic dependent launch begins when every CTA of the launch before it has executed
`griddepcontrol.launch_dependents` or ended. It overlaps the rest of that launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cute_emulator.machine.order import History

if TYPE_CHECKING:
    from cute_emulator.execution.grid import Grid
    from cute_emulator.execution.launch import Launch
    from cute_emulator.machine.checks import Checks

Stream = tuple[int, int]  # rank, handle


@dataclass(eq=False)
class StreamEvent:
    """Position in a stream, as `cudaEventRecord` marks it.

    Attributes:
        done: Whether everything before it has ended.
        history: Accesses that are then ordered before a stream that waits for the event.
        time: Time at which the event was done, by the model of time.
        before: Rank and order of the work that the host has issued before it, if the host is recorded.
    """

    done: bool = False
    history: History = field(default_factory=History)
    time: int = 0
    before: tuple[int, Any] | None = None


NOWHERE = StreamEvent(done=True)
"""Position of an event that was not recorded: a wait for it returns at once."""


@dataclass(frozen=True)
class _Wait:
    event: StreamEvent


class Streams:
    """Queued work of all streams.

    Args:
        checks: Checks that record the order of events.
        begin: Function that starts a launch, which ends with `ended`. Its arguments are the launch, its
            number and, for a programmatic one, the grid that it may overlap.
    """

    def __init__(self, checks: Checks, begin: Callable[[Launch, int, Grid | None], Grid]) -> None:
        self._checks, self._begin = checks, begin
        self._queues: dict[Stream, deque[tuple[int, Launch | StreamEvent | _Wait]]] = {}
        self._running: dict[Stream, list[Grid]] = {}
        self._last: dict[Stream, Grid | None] = {}  # predecessor of a programmatic launch
        self._submitted = 0

    def launch(self, launch: Launch) -> None:
        """Queues a launch after the earlier work of its stream."""
        self._queue((launch.rank, launch.stream), launch)

    def record(self, stream: Stream) -> StreamEvent:
        """Returns an event after the present work of a stream."""
        event = StreamEvent(done=not self._queues.get(stream) and not self._running.get(stream))
        if not event.done:
            self._queue(stream, event)
        return event

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Delays later work of a stream until an event is done."""
        if not event.done:
            self._queue(stream, _Wait(event))

    def start(self) -> None:
        """Begins the first launch of every stream that need not wait."""
        for stream in list(self._queues):
            self._advance(stream)

    def triggered(self, grid: Grid) -> None:
        """Records that all CTAs of a grid have let its dependents begin."""
        self._advance((grid.launch.rank, grid.launch.stream))

    def ended(self, grid: Grid) -> None:
        """Records that a launch has ended."""
        stream = grid.launch.rank, grid.launch.stream
        self._running[stream].remove(grid)
        self._advance(stream)

    def clear(self) -> None:
        """Drops all work; its events count as done."""
        for queue in self._queues.values():
            for _, item in queue:
                if isinstance(item, StreamEvent):
                    item.done = True
        self._queues.clear()
        self._running.clear()
        self._last.clear()

    def _queue(self, stream: Stream, item: Launch | StreamEvent | _Wait) -> None:
        self._submitted += 1
        self._queues.setdefault(stream, deque()).append((self._submitted, item))

    def _advance(self, stream: Stream) -> None:
        """Processes a stream up to its next launch.

        An event may let another stream continue, and that one this stream again: so launches can begin within
        the call.
        """
        queue, running = self._queues[stream], self._running.setdefault(stream, [])
        while queue:
            number, item = queue[0]
            last = self._last.get(stream)
            if running and (
                isinstance(item, StreamEvent | _Wait)
                or not item.programmatic
                or last is None
                or not last.lets_dependents_begin
            ):
                return
            if isinstance(item, StreamEvent):
                queue.popleft()
                self._last[stream] = None
                item.done, item.history = True, self._checks.history(*stream)
                if self._checks.clocks is not None:
                    item.time = self._checks.clocks.stream(stream)
                for other, waiting in self._queues.items():
                    if waiting and isinstance(waiting[0][1], _Wait) and waiting[0][1].event is item:
                        self._advance(other)
            elif isinstance(item, _Wait):
                if not item.event.done:
                    return
                queue.popleft()
                self._last[stream] = None
                self._checks.stream_waited(*stream, item.event.history)
                if self._checks.clocks is not None:
                    self._checks.clocks.passed(stream, item.event.time)
            else:
                queue.popleft()
                concurrent = last if item.programmatic and last is not None and last.triggers else None
                grid = self._last[stream] = self._begin(item, number, concurrent)
                running.append(grid)
