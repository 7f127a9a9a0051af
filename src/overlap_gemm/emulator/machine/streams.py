"""Streams of the ranks: launches one after the other, and events that one stream waits for in another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlap_gemm.emulator.machine.order import History

if TYPE_CHECKING:
    from overlap_gemm.emulator.machine.checks import Checks
    from overlap_gemm.emulator.run.launch import Launch

Stream = tuple[int, int]  # rank, handle


@dataclass(eq=False)
class StreamEvent:
    """A place in a stream, as `cudaEventRecord` marks it.

    Attributes:
        done: Whether everything before it has ended.
        history: What a stream that waits for it then has behind it.
    """

    done: bool = False
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class _Wait:
    event: StreamEvent


class Streams:
    """The work that is queued.

    Args:
        checks: Keep the order of events.
        begin: Starts a launch, which ends with `ended`.
    """

    def __init__(self, checks: Checks, begin: Callable[[Launch, int], None]) -> None:
        self._checks, self._begin = checks, begin
        self._queues: dict[Stream, deque[tuple[int, Launch | StreamEvent | _Wait]]] = {}
        self._running: set[Stream] = set()
        self._submitted = 0

    def launch(self, launch: Launch) -> None:
        """Queues a launch behind the earlier work of its stream."""
        self._queue((launch.rank, launch.stream), launch)

    def record(self, stream: Stream) -> StreamEvent:
        """Marks a place behind what a stream has now."""
        event = StreamEvent(done=not self._queues.get(stream))
        if not event.done:
            self._queue(stream, event)
        return event

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """What a stream is given from now on begins when an event is done."""
        if not event.done:
            self._queue(stream, _Wait(event))

    def start(self) -> None:
        """Begins the first launch of every stream that need not wait."""
        for stream in list(self._queues):
            self._advance(stream)

    def ended(self, launch: Launch) -> None:
        """A launch that was begun has ended."""
        stream = launch.rank, launch.stream
        self._queues[stream].popleft()
        self._running.remove(stream)
        self._advance(stream)

    def clear(self) -> None:
        """Forgets all work; what it was to mark counts as done."""
        for queue in self._queues.values():
            for _, item in queue:
                if isinstance(item, StreamEvent):
                    item.done = True
        self._queues.clear()
        self._running.clear()

    def _queue(self, stream: Stream, item: Launch | StreamEvent | _Wait) -> None:
        self._submitted += 1
        self._queues.setdefault(stream, deque()).append((self._submitted, item))

    def _advance(self, stream: Stream) -> None:
        """Goes through a stream to its next launch.

        An event may let another stream go on, and that one's this stream again: so launches can begin within.
        """
        queue = self._queues[stream]
        while queue and stream not in self._running:
            number, item = queue[0]
            if isinstance(item, StreamEvent):
                queue.popleft()
                item.done, item.history = True, self._checks.history(*stream)
                for other, waiting in self._queues.items():
                    if waiting and isinstance(waiting[0][1], _Wait) and waiting[0][1].event is item:
                        self._advance(other)
            elif isinstance(item, _Wait):
                if not item.event.done:
                    return
                queue.popleft()
                self._checks.learn(*stream, item.event.history)
            else:
                self._running.add(stream)
                self._begin(item, number)
