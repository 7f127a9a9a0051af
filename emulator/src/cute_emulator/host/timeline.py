"""The host and the streams of one rank as parties: what they do to memory, and in which order.

The host and every stream have a vector clock. A launch, an operation of torch and a copy are *works* of a
stream: each comes after the earlier works of its stream, after what the stream has waited for, and after all
that the host did or waited for before it issued the work. The host comes after a stream where it waits for
it. Two works that touch the same bytes, one of them writing, with no such order between them are a finding,
whenever the emulator happened to carry them out.

What launches of one run of the machine do to each other is judged there, access by access
(`machine.races`); a launch comes here with all that it read and wrote when its run is over.

The caching allocator is modelled by its rule: memory that is freed goes to the next allocation of the same
stream that fits, with what other streams may still do to it.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine.conflicts import FreedTouched, HostWorks, ReusedWorks, StreamWorks, Tell
from cute_emulator.machine.memory import GlobalMemory

Party = Hashable
Vector = dict[Party, int]
Bytes = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First addresses and ends of ranges, sorted and apart."""

HOST = "host"
DEFAULT = 0
LEGACY = 1
"""Stream handles: CUDA's default stream, and its other name."""
ROUND, SMALL = 512, 1 << 20
"""Torch's allocator rounds to so many bytes, and keeps blocks up to a size apart from larger ones."""
KEPT, FREE = 64, 255
"""Different accesses that are kept of one place, and places that are kept for the next allocation."""
_MACHINERY = {
    "cute_emulator", "torch", "cutlass", "nvidia_cutlass_dsl", "triton", "contextlib.py", "<frozen runpy>",
    "runpy.py",
}  # fmt: skip


Line = tuple[str, int]
"""Path and number."""


def caller() -> Line | None:
    """The line of the script that is being carried out, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = PurePath(frame.f_code.co_filename)
        if not _MACHINERY.intersection(path.parts) and not path.name.startswith("<"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def named(line: Line | None) -> str:
    """A line in words, such as `gemm.py:12`; empty where there is none."""
    return f"{PurePath(line[0]).name}:{line[1]}" if line is not None else ""


@dataclass(frozen=True, eq=False)
class Work:
    """Something that a stream, or the host, does.

    Attributes:
        party: Who.
        clock: The party's at it.
        vector: What comes before it.
        what: In words, with its place in the script.
        line: The line of the script that issued it.
    """

    party: Party
    clock: int
    vector: Vector
    what: str
    line: Line | None = None

    @property
    def issued(self) -> str:
        """The line of the script, with its text; empty where there is none."""
        return f"{named(self.line)}: {linecache.getline(*self.line).strip()}" if self.line else ""


@dataclass(frozen=True, eq=False)
class Touch:
    """What a work does to a place.

    Attributes:
        work: The work.
        write: Whether it writes.
        spans: The bytes, counted from where the place begins.
        run: The run of the machine that it was part of; None for what is no launch.
        tenant: Whose the place was.
    """

    work: Work
    write: bool
    spans: Bytes
    run: int | None
    tenant: Tenant

    @property
    def verb(self) -> str:
        """Returns `read` or `write`."""
        return "write" if self.write else "read"

    def same(self, other: Touch) -> bool:
        """Whether both are one party's, of one kind, to the same bytes."""
        return (
            (self.work.party, self.write, self.tenant) == (other.work.party, other.write, other.tenant)
        ) and all(map(np.array_equal, self.spans, other.spans))


class Place:
    """Memory as the device has it: one allocation's, then another's.

    Attributes:
        nbytes: Size.
        owner: The stream to which torch's allocator gives it, and whether it is pinned; None where it is no
            allocator's.
        touches: What was done to it, as far as that matters still.
    """

    def __init__(self, nbytes: int, owner: tuple[Party, bool] | None) -> None:
        self.nbytes, self.owner = nbytes, owner
        self.touches: list[Touch] = []


@dataclass(eq=False)
class Tenant:
    """An allocation.

    Attributes:
        place: Where it is.
        where: The line of the script that made it.
        freed: The host's clock when it was freed; 0 before.
        settled: Works of each party up to a clock that have ended before its place is handed out again.
    """

    place: Place
    where: str
    freed: int = 0
    settled: Vector = field(default_factory=dict)


def first_common(a: Bytes, b: Bytes) -> int | None:
    """The first byte that is in both."""
    at = np.searchsorted(a[1], b[0], side="right")
    inside = at < len(a[0])
    at = np.where(inside, at, 0)
    begins = np.maximum(a[0][at], b[0])
    found = np.flatnonzero(inside & (begins < np.minimum(a[1][at], b[1])))
    return int(begins[found[0]]) if len(found) else None


def united(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes:
    """Ranges in any order, sorted; those that touch are one."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.r_[True, begins[1:] > ends[:-1]])
    return begins[first], ends[np.r_[first[1:] - 1, len(ends) - 1]]


class Timeline:
    """Order and accesses of one rank.

    Args:
        rank: Whose; memory of other ranks is not judged.
        memory: Names what is touched.
        tell: Passes an event to the rules.
        current: Handle of the stream to which torch's operations go now.
    """

    def __init__(
        self,
        rank: int,
        memory: GlobalMemory,
        tell: Tell,
        current: Callable[[], int],
    ) -> None:
        self._rank, self._memory, self._tell, self._current = rank, memory, tell, current
        self._clocks: Counter[Party] = Counter()
        self._known: dict[Party, Vector] = {}
        self._blocking: set[int] = set()
        self._implied: list[tuple[Work, Vector]] = []
        self._tenants: dict[int, Tenant] = {}
        self._free: list[Place] = []
        self._by_host: set[Place] = set()
        self._replay: dict[int, Party] | None = None  # captured stream -> the party that replays its work
        self._graph: object = None
        self._base: Vector = {}
        self.on: int | None = None  # the stream of what a replay carries out now

    # --- order

    @property
    def handle(self) -> int:
        """Of the stream to which torch's operations go now."""
        return self._current() if self.on is None else self.on

    def party(self, handle: int | None = None) -> Party:
        """A stream by its handle, the current one by default; in a replay, its double in the graph."""
        handle = self.handle if handle is None else handle
        handle = DEFAULT if handle == LEGACY else handle
        if self._replay is None:
            return handle
        return self._replay.setdefault(handle, (self._graph, handle))

    def made_blocking(self, handle: int) -> None:
        """A stream was created that the default stream waits for, and that waits for it."""
        self._blocking.add(handle)

    def before(self, handle: int) -> list[int]:
        """Streams that a new work of a stream waits for by CUDA's rule for the default stream."""
        if self._replay is not None:
            return []
        if handle in (DEFAULT, LEGACY):
            return sorted(b for b in self._blocking if b in self._known)
        return [DEFAULT] if handle in self._blocking and DEFAULT in self._known else []

    def issue(self, what: str, handle: int | None = None) -> Work:
        """A new work of a stream."""
        party = self.party(handle)
        known = self._joined(party)
        if isinstance(party, int) and self._blocking:
            for other in self.before(party):
                _merge(known, self._known[other])
        return self._next(party, known, what)

    def snapshot(self, handle: int | None = None) -> Vector:
        """What an event that is recorded in a stream now stands for."""
        return dict(self._joined(self.party(handle)))

    def wait(self, handle: int, vector: Vector) -> None:
        """A stream waits for an event."""
        _merge(self._joined(self.party(handle)), vector)

    def host_waits(self, handle: int | None = None, vector: Vector | None = None) -> None:
        """The host waits: for an event, a stream, or (without either) for the whole device."""
        known = self._known.setdefault(HOST, {})
        if vector is not None:
            _merge(known, vector)
        elif handle is not None:
            _merge(known, self._joined(self.party(handle)))
        else:
            for party in list(self._known):
                _merge(known, self._known[party])
        self._implied = [(work, more) for work, more in self._implied if not _knows(known, work)]

    @contextmanager
    def replaying(self, graph: object, origin: int, end: Vector) -> Iterator[None]:
        """Inside, works are those of a graph that the current stream replays.

        Args:
            graph: Which one.
            origin: The stream in which it was captured.
            end: What comes with the end of its last replay, which it waits for; is brought up to date.
        """
        root = self.party()
        known = self._joined(root)
        _merge(known, end)
        base = dict(known)
        self._replay, self._graph = {origin: root}, graph
        for party in [p for p in self._known if isinstance(p, tuple) and p[0] is graph]:
            _merge(self._known[party], base)
        self._base = base
        try:
            yield
        finally:
            self._replay = self._graph = self.on = None
            for party in [p for p in self._known if isinstance(p, tuple) and p[0] is graph]:
                _merge(end, self._known[party])
            _merge(end, self._joined(root))

    def _joined(self, party: Party) -> Vector:
        known = self._known.setdefault(party, {})
        _merge(known, self._known.get(HOST, {}))
        if isinstance(party, tuple) and self._replay is not None:
            _merge(known, self._base)
        return known

    def _next(self, party: Party, known: Vector, what: str) -> Work:
        self._clocks[party] += 1
        known[party] = self._clocks[party]
        line = caller()
        said = f"{what} ({named(line)})" if line is not None else what
        return Work(party, known[party], dict(known), said, line)

    # --- accesses

    def touch(self, work: Work, base: int, spans: Bytes, write: bool, run: int | None = None) -> None:
        """A work reads or writes bytes of the allocation at an address."""
        if not len(spans[0]):
            return
        tenant = self._tenants.get(base)
        if tenant is None:
            tenant = self._tenants[base] = Tenant(Place(0, None), "")
        mine = Touch(work, write, (spans[0] - base, spans[1] - base), run, tenant)
        if tenant.freed and work.vector.get(HOST, 0) >= tenant.freed:
            self._tell(FreedTouched(mine))
        kept = []
        for old in tenant.place.touches:
            if self._is_over(old):
                continue
            if not mine.same(old):
                kept.append(old)
            if not (write or old.write) or (run is not None and run == old.run and old.tenant is tenant):
                continue
            if self._ordered(old, mine) or self._ordered(mine, old):
                continue
            at = first_common(old.spans, mine.spans)
            if at is not None:
                reused, by_host = old.tenant is not tenant, HOST in (old.work.party, work.party)
                kind = ReusedWorks if reused else HostWorks if by_host else StreamWorks
                self._tell(kind(old, mine, self._memory.spot(base + at)))
        tenant.place.touches = [*kept[-KEPT:], mine]
        if work.party == HOST:
            self._by_host.add(tenant.place)

    def _is_over(self, touch: Touch) -> bool:
        """Whether all that is issued from now on comes after it."""
        return touch.work.party != HOST and _knows(self._known.get(HOST, {}), touch.work)

    def _ordered(self, first: Touch, then: Touch) -> bool:
        if first.work.party == then.work.party:
            return first.work.clock <= then.work.clock
        if first.tenant is not then.tenant and _knows(first.tenant.settled, first.work):
            return True
        if _knows(then.work.vector, first.work):
            return True
        return any(
            _knows(then.work.vector, work) and _knows(more, first.work) for work, more in self._implied
        )

    def touch_at(self, work: Work, spans: Bytes, write: bool) -> None:
        """The same of bytes that lie in one allocation of the rank, or else in none that matters."""
        allocation = self._memory.lookup(int(spans[0][0])) if len(spans[0]) else None
        if allocation is not None and allocation.rank == self._rank:
            self.touch(work, allocation.base, spans, write)

    def by_host(self, what: str) -> Work:
        """Something that the host does to pinned memory."""
        return self._next(HOST, self._known.setdefault(HOST, {}), what)

    def run_over(
        self,
        number: int,
        touches: Iterable[tuple[Work, int, Bytes, bool]],
        learnt: Iterable[tuple[Work, Work]],
    ) -> None:
        """A run of the machine has ended.

        Args:
            number: Of the run.
            touches: Work of a launch, allocation, bytes, whether it wrote them.
            learnt: Works of launches of which the first knows the second, by flags in memory.
        """
        for later, earlier in learnt:
            if not _knows(later.vector, earlier):
                self._implied.append((later, {**earlier.vector, earlier.party: earlier.clock}))
        for work, base, spans, write in touches:
            self.touch(work, base, spans, write, number)
        for place in self._by_host:  # launches from now on come after what the host did
            place.touches = [touch for touch in place.touches if touch.work.party != HOST]
        self._by_host.clear()

    # --- the caching allocator

    def allocated(self, base: int, nbytes: int, pinned: bool, pooled: bool) -> None:
        """New memory: it may be what was freed in the current stream, as torch's allocator keeps it.

        Not `pooled`: no other's, as `cudaMalloc` gives it, or a graph's own pool.
        """
        size = -(-nbytes // ROUND) * ROUND
        owner: tuple[Party, bool] = (HOST if pinned else self.party(), pinned)
        place = None
        if pooled and self._replay is None:
            fits = [p for p in self._free if p.nbytes >= size and (p.nbytes <= SMALL) == (size <= SMALL)]
            place = min((p for p in fits if p.owner == owner), key=lambda p: p.nbytes, default=None)
            if place is not None:
                self._free.remove(place)
            else:
                place = Place(size, owner)
        self._tenants[base] = Tenant(place or Place(size, None), named(caller()))

    def recorded(self, base: int, handle: int) -> None:
        """`record_stream`: freed memory waits for what a stream does until then."""
        if base in self._tenants:
            self._tenants[base].settled[self.party(handle)] = 0

    def freed(self, base: int) -> None:
        """The last reference to an allocation is gone."""
        tenant = self._tenants.get(base)
        if tenant is None or tenant.place.owner is None:
            return
        self._clocks[HOST] += 1
        self._known.setdefault(HOST, {})[HOST] = tenant.freed = self._clocks[HOST]
        for party in tenant.settled:
            tenant.settled[party] = self._clocks[party]
        self._free = [*self._free[-FREE:], tenant.place]


def _knows(vector: Vector, work: Work) -> bool:
    return vector.get(work.party, 0) >= work.clock


def _merge(into: Vector, other: Vector) -> None:
    for party, clock in other.items():
        if into.get(party, 0) < clock:
            into[party] = clock
