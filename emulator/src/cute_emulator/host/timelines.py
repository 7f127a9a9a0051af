"""The timelines of an emulator's ranks, and what ties them to the machine and to torch's memory."""

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
    """Which ranks' hosts are parties: those that are opened, none at first.

    Args:
        machine: Tells what launches did.
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
        """A rank's, if its host is a party."""
        return self._of.get(rank)

    def open(self, rank: int, current: Callable[[], int]) -> Timeline:
        """The host of a rank is a party from now on; `current` tells the stream of torch's operations."""
        machine = self._machine
        self._of[rank] = Timeline(rank, machine.memory, machine.checks.tell, current)
        machine.ended = self._run_over
        return self._of[rank]

    def concurrent(self) -> None:
        """There is a stream beside the default one, or pinned memory: from now on it matters who reads.

        To record it costs kernels of little but loads a third of their speed.
        """
        if self._of and self._machine.races is not None:
            self._machine.races.always_keeps_reads = self._machine.races.keeps_reads = True

    def close(self) -> None:
        """No host is a party any more."""
        self._of.clear()
        self._machine.ended = lambda: None
        if self._machine.races is not None:
            self._machine.races.always_keeps_reads = False

    def work(
        self, rank: int, stream: int, what: str, wait_stream: Callable[[int, int, int], None]
    ) -> Work | None:
        """A launch of a rank whose host is a party, which waits for what CUDA's default stream waits for."""
        timeline = self._of.get(rank)
        if timeline is None:
            return None
        if stream > LEGACY:
            self.concurrent()
        for other in timeline.before(stream):
            wait_stream(rank, stream, other)
        return timeline.issue(what, stream)

    def recorded(self, rank: int, stream: int, event: StreamEvent) -> StreamEvent:
        """An event was recorded in a stream; returns it."""
        if rank in self._of:
            event.before = rank, self._of[rank].snapshot(stream)
        return event

    def waited(self, rank: int, stream: int, event: StreamEvent) -> None:
        """A stream waits for an event; one of another rank tells nothing of this one's streams."""
        if rank in self._of and event.before is not None and event.before[0] == rank:
            self._of[rank].wait(stream, event.before[1])

    # --- memory

    def keep(self, room: np.ndarray) -> None:
        """An array holds a tensor's memory: launches need keep no more than that (`kept`)."""
        base = room.ctypes.data
        self._rooms[base] = room
        insort(self._bases, base)
        if len(self._bases) > 2 * len(self._rooms) + 64:
            self._bases = sorted(self._rooms)

    def kept(self, owner: Any) -> object:
        """What keeps a launch's memory until it has run: not its tensor, whose end may be what matters."""
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
        """See `Timeline.allocated`."""
        if rank in self._of:
            self._of[rank].allocated(base, nbytes, pinned, pooled)

    def freed(self, rank: int, base: int) -> None:
        """See `Timeline.freed`."""
        if rank in self._of:
            self._of[rank].freed(base)

    # --- runs

    def _run_over(self) -> None:
        """Tells each rank what its launches of the run did, and which of them know of each other."""
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
