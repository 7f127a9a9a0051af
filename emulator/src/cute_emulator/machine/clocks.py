"""A model of time, for traces: a clock for each warp, and for async work a latency and a rate.

A warp's clock advances with its instructions. An async operation begins when its warp issues it, waits until
its unit of the SM is free, keeps that busy for its bytes or products, and ends a latency later. Who waits
goes on at the latest of what it waited for: an mbarrier's phase at its last arrival, a group when its
operations have ended, a flag when it was stored. A launch begins when the one before it in its stream has
ended, a CTA when an SM has room for it.

What is left out: warps of an SM share no issue slots, SMs no bandwidth, peers are as near as the rank's own
memory, loads and stores of lanes take as long as any instruction, and an atomic waits for no other one. So
the numbers say which work overlaps and who waits for whom; they do not predict a GPU's time.
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
"""Cycles of a warp instruction: the latency of arithmetic, as most need the result of the one before."""
CYCLES_PER_NS = 1.8
LATENCY = {"load": 700, "read": 50, "write": 700, "tensor": 60}
"""Cycles from when an operation of a kind has left its unit to when it is done."""
BYTES = {"load": 32, "read": 128, "write": 32}
"""Per cycle and SM: what L2 gives or takes, and what shared memory gives."""
PRODUCTS = {"sm_90a": 2048, "sm_100a": 4096, "sm_103a": 4096, "sm_120a": 1024}
"""Multiply-adds of 16-bit numbers per cycle and SM; of 8-bit numbers twice as many, of 32-bit half."""


@dataclass(frozen=True)
class Span:
    """One interval of one row.

    Attributes:
        place: launch, rank and CTA it belongs to.
        row: warp number, or the kind of an asynchronous operation (`load`, `tensor`, `store`).
        begin: cycle of the model.
        end: cycle, not before `begin`.
        kind: `active`, `wait`, or as `row`.
        what: what the warp waits for, or the operation.
        instructions: warp instructions executed in it.
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
    """Where a warp's clock stands, and since when it has been active, with so many instructions."""

    now: int
    since: int
    instructions: int = 0


class Clocks:
    """Told of what takes time, by whoever acts: a warp in its turn, or an operation that takes effect.

    Attributes:
        now: The clock of who acts.
        spans: What was recorded, in the order it ended.
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
        """These, at the rates of an architecture."""
        self._products = PRODUCTS[arch]
        return self

    # -- warps -----------------------------------------------------------------------------------

    def started(self, warp: Warp) -> None:
        """A warp's CTA has become resident."""
        begin = max(self.now, self._starts.get(warp.grid, 0))
        self._warps[warp] = _Warp(begin, begin)

    def turn(self, warp: Warp) -> None:
        """A warp's turn begins; one that has exited may still be queued, and runs nothing in it."""
        state = self._warps.get(warp)
        self._acting = None if state is None else warp
        if state is not None:
            self.now = state.now

    def turn_ended(self, warp: Warp, instructions: int) -> None:
        """It has ended, after so many instructions."""
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
        """The warp that runs has waited for something that was there at a time."""
        if time > self.now and self._acting is not None:
            state = self._warps[self._acting]
            state.now = self.now
            self._close(self._acting, state)
            self._wait(self._acting, self.now, time, what)
            self.now = state.now = state.since = time

    def exited(self, warp: Warp) -> None:
        """A warp has exited: its launch has not ended before."""
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
        """A strong store or a read-modify-write."""
        self._flags.update(dict.fromkeys(places, self.now))

    def seen(self, places: Iterable[Any]) -> None:
        """A strong load: what it reads was stored before."""
        for place in places:
            self.join(self._flags.get(place, 0), "a flag")

    # -- asynchronous work -----------------------------------------------------------------------

    def issued(self, event: Event) -> None:
        """An operation was issued."""
        warp, kind = self._acting, event.kind
        begin = max([self.now, *(e.end for e in event.after)])
        key = (0, 0, kind) if warp is None else (warp.grid.launch.rank, warp.cta.sm, kind)
        if event.size:
            begin = max(begin, self._free.get(key, 0))
            busy = -(-event.size // (self._products if kind == "tensor" else BYTES[kind]))
            self._free[key] = begin + busy
            event.end = self._last[key] = max(begin + busy + LATENCY[kind], self._last.get(key, 0))
        else:  # it tells of others, those of the tensor cores in order
            event.end = max(begin, self._last.get(key, 0) if kind == "tensor" else 0)
        event.begin, event.issuer = self.now, None if warp is None else warp.cta

    def happens(self, event: Event) -> int:
        """An operation takes effect, at its end; returns the clock to go back to."""
        before, self.now = self.now, event.end
        self._latest = max(self._latest, event.end)
        self._ends[event.grid] = max(self._ends.get(event.grid, 0), event.end)
        row = "store" if event.kind in ("read", "write") else event.kind
        place = _place(event.grid, event.owner or event.issuer)
        self.spans.append(Span(place, row, event.begin, event.end, row, event.what))
        return before

    # -- launches --------------------------------------------------------------------------------

    def begin(self) -> None:
        """A run begins: the host has waited for all before it."""
        self.now = self._latest

    def launched(self, grid: Grid, beside: Grid | None) -> None:
        """A launch begins: after what its stream had, or when the one before it lets it."""
        stream = grid.launch.rank, grid.launch.stream
        self._starts[grid] = self.now if beside is not None else self._streams.get(stream, 0)

    def ended(self, grid: Grid) -> None:
        """A launch has ended, what it left behind included."""
        self.passed((grid.launch.rank, grid.launch.stream), self.end(grid))

    def end(self, grid: Grid) -> int:
        """When a launch ended, as far as it came."""
        return self._ends.get(grid, 0)

    def stream(self, stream: tuple[int, int]) -> int:
        """When what a stream was given has ended."""
        return self._streams.get(stream, 0)

    def passed(self, stream: tuple[int, int], time: int) -> None:
        """What a stream is given next begins no earlier."""
        self._streams[stream] = max(self._streams.get(stream, 0), time)

    def finish(self) -> None:
        """A run is over: who has not ended, as where it broke off, is shown as far as it came."""
        for warp, state in self._warps.items():
            self._close(warp, state)
            whys = sorted({group.why for group in warp.groups if group.why})
            if whys:
                self._wait(warp, state.now, max(self._latest, state.now + 1), "; ".join(whys))
        for kept in (self._warps, self._starts, self._ends, self._flags, self._free, self._last):
            kept.clear()  # type: ignore[attr-defined]
        self._acting = None


class Items(dict[int, Any]):
    """A program's items as a run comes to them: its keys ran. With clocks, each takes its time."""

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
        if group.why:  # it waits, and runs again when it is woken
            clocks.now -= cycles
        return following

    return run


def _place(grid: Any, cta: Any) -> Place:
    return grid.number, grid.launch.rank, cta.ctaid if cta is not None else (0, 0, 0)
