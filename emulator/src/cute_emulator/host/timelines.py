"""Timelines of an emulator's ranks, and their connection to the machine and to torch's memory."""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from cute_emulator.execution.launch import Machine
from cute_emulator.host.timeline import LEGACY, Timeline, Work
from cute_emulator.machine.order import OWN
from cute_emulator.machine.streams import StreamEvent


class Timelines:
    """Timelines of the ranks whose host is recorded; none at first.

    Args:
        machine: Machine whose launches are recorded.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._of: dict[int, Timeline] = {}
        self._runs = 0
        self._rooms: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self._bases: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._of)

    def get(self, rank: int) -> Timeline | None:
        """Returns a rank's timeline, or None if its host is not recorded."""
        return self._of.get(rank)

    def open(self, rank: int, current: Callable[[], int]) -> Timeline:
        """Starts to record the host of a rank; `current` returns the stream of torch's operations."""
        machine = self._machine
        self._of[rank] = Timeline(rank, machine.memory, machine.checks.emit, current)
        machine.ended = self._run_over
        return self._of[rank]

    def concurrent(self) -> None:
        """Starts to record reads, because there is a second stream or pinned memory.

        Kernels that do little but load then run at two thirds of their speed.
        """
        if self._of and self._machine.races is not None:
            self._machine.races.always_keeps_reads = self._machine.races.keeps_reads = True

    def close(self) -> None:
        """Ends the recording of all hosts."""
        self._of.clear()
        self._machine.ended = lambda: None
        if self._machine.races is not None:
            self._machine.races.always_keeps_reads = False

    def work(
        self, rank: int, stream: int, what: str, wait_stream: Callable[[int, int, int], None]
    ) -> Work | None:
        """Returns the work of a launch, or None if the host of the rank is not recorded.

        The launch waits for the streams that CUDA's default-stream rule names.
        """
        timeline = self._of.get(rank)
        if timeline is None:
            return None
        if stream > LEGACY:
            self.concurrent()
        for other in timeline.before(stream):
            wait_stream(rank, stream, other)
        return timeline.issue(what, stream)

    def recorded(self, rank: int, stream: int, event: StreamEvent) -> StreamEvent:
        """Records that an event was recorded in a stream; returns the event."""
        if rank in self._of:
            event.before = rank, self._of[rank].snapshot(stream)
        return event

    def waited(self, rank: int, stream: int, event: StreamEvent) -> None:
        """Records that a stream waits for an event.

        An event of another rank does not order this rank's streams.
        """
        if rank in self._of and event.before is not None and event.before[0] == rank:
            self._of[rank].wait(stream, event.before[1])

    # --- memory

    def keep(self, room: np.ndarray) -> None:
        """Records the array that contains a tensor's memory: a launch keeps only the array alive (`kept`)."""
        base = room.ctypes.data
        self._rooms[base] = room
        insort(self._bases, base)
        if len(self._bases) > 2 * len(self._rooms) + 64:
            self._bases = sorted(self._rooms)

    def kept(self, owner: Any) -> object:
        """Returns the object that keeps a launch's memory alive until it has run.

        This is not the tensor: the time at which it is freed may be the subject of a rule.
        """
        pointer = getattr(owner, "data_ptr", None)
        address = pointer() if callable(pointer) else pointer
        if not isinstance(address, int):
            return owner
        for base in reversed(self._bases[: bisect_right(self._bases, address)]):
            room = self._rooms.get(base)
            if room is not None:
                return room if address < base + room.nbytes else owner
        return owner

    def allocated(self, rank: int, base: int, nbytes: int, pinned: bool, pooled: bool) -> None:
        """Calls `Timeline.allocated` of the rank."""
        if rank in self._of:
            self._of[rank].allocated(base, nbytes, pinned, pooled)

    def freed(self, rank: int, base: int) -> None:
        """Calls `Timeline.freed` of the rank."""
        if rank in self._of:
            self._of[rank].freed(base)

    # --- runs

    def _run_over(self) -> None:
        """Passes the accesses of a run's launches, and their order by flags, to their ranks' timelines."""
        self._runs += 1
        races, agents = self._machine.races, self._machine.checks.agents
        if races is None:
            return
        touches = [
            (it.grid.launch.rank, (it.grid.launch.work, it.base, it.spans, it.write))
            for it in races.footprints()
            if it.grid.launch.work is not None
        ]
        launches = {agent.warp.grid: agent.warp.grid.launch for agent in agents.values()}
        learnt = {
            (mine.rank, mine.work, theirs.work)
            for grid, mine in launches.items()
            for number in grid.learnt
            if (theirs := launches[agents[number & OWN].warp.grid]).rank == mine.rank
        }
        for rank, timeline in self._of.items():
            timeline.run_over(
                self._runs,
                [touch for owner, touch in touches if owner == rank],
                [(mine, theirs) for owner, mine, theirs in learnt if owner == rank],
            )
