"""Model of time, for traces: a clock for each warp, and for async work a latency and a rate.

A warp's clock advances with its instructions. An async operation begins when its warp issues it. It waits
until its unit of the SM is free, occupies the unit for its bytes or products, and ends a latency later. A
waiting warp continues at the latest time of what it waited for: the last arrival of an mbarrier's phase, the
end of a group's operations, the store of a flag. A launch begins when the one before it in its stream has
ended, a CTA when an SM has room for it.

The model omits:

- competition: warps of an SM share no issue slots, SMs share no bandwidth, atomics do not wait for each other
- distance: peers are as near as the rank's memory
- the latency of lanes' loads and stores, which take as long as any instruction

So the numbers show which work overlaps and which waits for which; they do not predict a GPU's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cute_emulator.execution.grid import Grid
    from cute_emulator.machine.asyncq import Event
    from cute_emulator.machine.warp import Warp

Place = tuple[int, int, tuple[int, int, int]]  # launch number, rank, CTA

ISSUE = 4
"""Cycles of a warp instruction: the latency of arithmetic, as most depend on the one before."""
CYCLES_PER_NS = 1.8
LATENCY = {"load": 700, "read": 50, "write": 700, "tensor": 60}
"""Cycles from the time at which an operation leaves its unit to its end, by kind."""
BYTES = {"load": 32, "read": 128, "write": 32}
"""Bytes per cycle and SM: bandwidth of L2 (loads, writes) and of shared memory (reads)."""
PRODUCTS = {"sm_90a": 2048, "sm_100a": 4096, "sm_103a": 4096, "sm_120a": 1024}
"""Multiply-adds of 16-bit numbers per cycle and SM; of 8-bit numbers twice as many, of 32-bit ones half."""


@dataclass(frozen=True)
class Span:
    """One interval of one row.

    Attributes:
        place: Launch, rank and CTA of the row.
        row: Warp number, or the kind of an asynchronous operation (`load`, `tensor`, `store`).
        begin: First cycle of the model.
        end: Last cycle, not before `begin`.
        kind: `active`, `wait`, or as `row`.
        what: Event that the warp waits for, or the operation.
        instructions: Warp instructions executed in it.
    """

    place: Place
    row: int | str
    begin: int
    end: int
    kind: str
    what: str
    instructions: int = 0


@dataclass
class _Warp:
    """Clock of a warp, the time since which it has been active, and its instructions since then."""

    now: int
    since: int
    instructions: int = 0


class Clocks:
    """Clocks of warps and operations; the acting warp or operation reports what takes time.

    Attributes:
        now: Clock of the acting warp or operation.
        spans: Recorded spans, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.now = 0
        self.spans: list[Span] = []
        self._products = 0
        self._latest = 0
        self._warps: dict[Warp, _Warp] = {}
        self._acting: Warp | None = None
        self._free: dict[tuple[int, int, str], int] = {}
        self._last: dict[tuple[int, int, str], int] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._starts: dict[Grid, int] = {}
        self._ends: dict[Grid, int] = {}
        self._flags: dict[Any, int] = {}

    def of(self, arch: str) -> Clocks:
        """Sets the rates of an architecture; returns the clocks."""
        self._products = PRODUCTS[arch]
        return self

    # -- warps -----------------------------------------------------------------------------------

    def started(self, warp: Warp) -> None:
        """Starts the clock of a warp whose CTA has become resident."""
        begin = max(self.now, self._starts.get(warp.grid, 0))
        self._warps[warp] = _Warp(begin, begin)

    def turn(self, warp: Warp) -> None:
        """Begins a warp's turn; a warp that has exited may still be queued, and runs nothing in it."""
        state = self._warps.get(warp)
        self._acting = None if state is None else warp
        if state is not None:
            self.now = state.now

    def turn_ended(self, warp: Warp, instructions: int) -> None:
        """Ends a warp's turn, after a number of instructions."""
        self._latest, self._acting = max(self._latest, self.now), None
        if warp not in self._warps:
            return
        state = self._warps[warp]
        state.now = self.now
        state.instructions += instructions
        if not warp.groups:
            self._close(warp, state)
            del self._warps[warp]

    def join(self, time: int, what: str) -> None:
        """Advances the running warp to the time of the event that it has waited for."""
        if time > self.now and self._acting is not None:
            state = self._warps[self._acting]
            state.now = self.now
            self._close(self._acting, state)
            self._wait(self._acting, self.now, time, what)
            self.now = state.now = state.since = time

    def exited(self, warp: Warp) -> None:
        """Records the exit of a warp: its launch ends no earlier."""
        self._ends[warp.grid] = max(self._ends.get(warp.grid, 0), self.now)

    def _close(self, warp: Warp, state: _Warp) -> None:
        if state.now > state.since or state.instructions:
            row = _place(warp.grid, warp.cta), int(warp.index)
            self.spans.append(Span(*row, state.since, state.now, "active", "", state.instructions))
        state.instructions = 0

    def _wait(self, warp: Warp, begin: int, end: int, what: str) -> None:
        self.spans.append(Span(_place(warp.grid, warp.cta), int(warp.index), begin, end, "wait", what))

    # -- flags -----------------------------------------------------------------------------------

    def stored(self, places: Iterable[Any]) -> None:
        """Records the time of a strong store or a read-modify-write."""
        self._flags.update(dict.fromkeys(places, self.now))

    def seen(self, places: Iterable[Any]) -> None:
        """Advances a strong load to the time of the store that it reads."""
        for place in places:
            self.join(self._flags.get(place, 0), "a flag")

    # -- asynchronous work -----------------------------------------------------------------------

    def issued(self, event: Event) -> None:
        """Records an issued operation."""
        warp, kind = self._acting, event.kind
        begin = max([self.now, *(e.end for e in event.after)])
        key = (0, 0, kind) if warp is None else (warp.grid.launch.rank, warp.cta.sm, kind)
        if event.size:
            begin = max(begin, self._free.get(key, 0))
            busy = -(-event.size // (self._products if kind == "tensor" else BYTES[kind]))
            self._free[key] = begin + busy
            event.end = self._last[key] = max(begin + busy + LATENCY[kind], self._last.get(key, 0))
        else:  # it signals the end of others, in order for the tensor cores
            event.end = max(begin, self._last.get(key, 0) if kind == "tensor" else 0)
        event.begin, event.issuer = self.now, None if warp is None else warp.cta

    def happens(self, event: Event) -> int:
        """Records an operation that takes effect, at its end; returns the clock to restore."""
        before, self.now = self.now, event.end
        self._latest = max(self._latest, event.end)
        self._ends[event.grid] = max(self._ends.get(event.grid, 0), event.end)
        row = "store" if event.kind in ("read", "write") else event.kind
        place = _place(event.grid, event.owner or event.issuer)
        self.spans.append(Span(place, row, event.begin, event.end, row, event.what))
        return before

    # -- launches --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a run: the host has waited for all before it."""
        self.now = self._latest

    def launched(self, grid: Grid, concurrent: Grid | None) -> None:
        """Begins a launch: after its stream's work, or when the launch before it triggers it."""
        stream = grid.launch.rank, grid.launch.stream
        self._starts[grid] = self.now if concurrent is not None else self._streams.get(stream, 0)

    def ended(self, grid: Grid) -> None:
        """Ends a launch, with its pending operations."""
        self.passed((grid.launch.rank, grid.launch.stream), self.end(grid))

    def end(self, grid: Grid) -> int:
        """Returns the end of a launch, as far as it has run."""
        return self._ends.get(grid, 0)

    def stream(self, stream: tuple[int, int]) -> int:
        """Returns the end of a stream's work."""
        return self._streams.get(stream, 0)

    def passed(self, stream: tuple[int, int], time: int) -> None:
        """Delays the next work of a stream to a time."""
        self._streams[stream] = max(self._streams.get(stream, 0), time)

    def finish(self) -> None:
        """Ends a run: warps that have not ended, as after an error, are shown as far as they ran."""
        for warp, state in self._warps.items():
            self._close(warp, state)
            whys = sorted({group.why for group in warp.groups if group.why})
            if whys:
                self._wait(warp, state.now, max(self._latest, state.now + 1), "; ".join(whys))
        for kept in (self._warps, self._starts, self._ends, self._flags, self._free, self._last):
            kept.clear()  # type: ignore[attr-defined]
        self._acting = None


class Items(dict[int, Any]):
    """Items of a program that a run has executed, as keys. With clocks, each item advances the time."""

    def __init__(self, program: Any, clocks: Clocks | None) -> None:
        super().__init__()
        self._program, self._clocks = program, clocks

    def __missing__(self, number: int) -> Any:
        item = self._program.code[number]
        if self._clocks is not None:
            item = _timed(item, ISSUE * self._program.cost[number], self._clocks)
        self[number] = item
        return item


def _timed(item: Any, cycles: int, clocks: Clocks) -> Any:
    def run(group: Any) -> int:
        clocks.now += cycles
        following: int = item(group)
        if group.why:  # the group waits, and runs the item again when it is woken
            clocks.now -= cycles
        return following

    return run


def _place(grid: Any, cta: Any) -> Place:
    return grid.number, grid.launch.rank, cta.ctaid if cta is not None else (0, 0, 0)
