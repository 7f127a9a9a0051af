"""Order of the accesses of one rank's host and streams, for the rule about unordered accesses.

The host and every stream have a vector clock. A launch, an operation of torch and a copy are *works* of a
stream. A work is ordered after the earlier works of its stream, and after the works that the stream waited
for. It is also ordered after all that the host did or waited for before it issued the work. The host is
ordered after a stream that it waits for. Two works conflict if they access the same bytes and one of them
writes. Conflicting works without an order are a finding, even if the emulator executed them one after the
other.

Accesses of launches within one run of the machine are judged there, access by access (`machine.races`). At
the end of the run a launch is recorded here with all that it read and wrote.

The caching allocator is modelled by its rule. The next allocation of the same stream that fits reuses freed
memory. Accesses of other streams to that memory may still be in flight.
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

from cute_emulator.machine.conflicts import EventSink, FreedTouched, HostWorks, ReusedWorks, StreamWorks
from cute_emulator.machine.memory import GlobalMemory

Party = Hashable
Vector = dict[Party, int]
Bytes = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First addresses and ends of ranges, sorted and disjoint."""

HOST = "host"
DEFAULT = 0
LEGACY = 1
"""Handles of CUDA's default stream: 0 and `cudaStreamLegacy`."""
ROUND, SMALL = 512, 1 << 20
"""Granularity of torch's allocator, and largest size of its pool of small blocks, in bytes."""
KEPT, FREE = 64, 255
"""Largest numbers of recorded accesses of one place, and of free places kept for reuse."""
_MACHINERY = {
    "cute_emulator", "torch", "cutlass", "nvidia_cutlass_dsl", "triton", "contextlib.py", "<frozen runpy>",
    "runpy.py",
}  # fmt: skip


Line = tuple[str, int]
"""Path and number."""


def caller() -> Line | None:
    """Returns the line of the script that is being executed, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = PurePath(frame.f_code.co_filename)
        if not _MACHINERY.intersection(path.parts) and not path.name.startswith("<"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def named(line: Line | None) -> str:
    """Returns a line as text, such as `gemm.py:12`; empty if there is none."""
    return f"{PurePath(line[0]).name}:{line[1]}" if line is not None else ""


@dataclass(frozen=True, eq=False)
class Work:
    """Operation of a stream, or of the host.

    Attributes:
        party: Stream or host.
        clock: Clock of the party at the work.
        vector: Vector clock of all works that are ordered before.
        what: Description, with the line of the script.
        line: Line of the script that issued the work.
    """

    party: Party
    clock: int
    vector: Vector
    what: str
    line: Line | None = None

    @property
    def issued(self) -> str:
        """Returns the line of the script with its text; empty if there is none."""
        return f"{named(self.line)}: {linecache.getline(*self.line).strip()}" if self.line else ""


@dataclass(frozen=True, eq=False)
class Touch:
    """Access of a work to a place.

    Attributes:
        work: Work that accesses the place.
        write: Whether the access writes.
        spans: Bytes, relative to the beginning of the place.
        run: Run of the machine that contains the work; None if the work is no launch.
        tenant: Allocation that the place belonged to.
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
        """Returns whether both accesses are of one party and kind, to the same bytes."""
        return (
            (self.work.party, self.write, self.tenant) == (other.work.party, other.write, other.tenant)
        ) and all(map(np.array_equal, self.spans, other.spans))


class Place:
    """Memory of the device, used by one allocation after another.

    Attributes:
        nbytes: Size.
        owner: Stream whose allocations may reuse the place, and whether it is pinned; None if no allocator
            manages it.
        touches: Accesses that later ones must still be compared with.
    """

    def __init__(self, nbytes: int, owner: tuple[Party, bool] | None) -> None:
        self.nbytes, self.owner = nbytes, owner
        self.touches: list[Touch] = []


@dataclass(eq=False)
class Tenant:
    """An allocation.

    Attributes:
        place: Place of the allocation.
        where: Line of the script that made it.
        freed: Clock of the host when it was freed; 0 before.
        settled: Clock per party: its works up to this clock end before the place is reused.
    """

    place: Place
    where: str
    freed: int = 0
    settled: Vector = field(default_factory=dict)


def first_common(a: Bytes, b: Bytes) -> int | None:
    """Returns the first byte that is in both sets of ranges, or None."""
    at = np.searchsorted(a[1], b[0], side="right")
    inside = at < len(a[0])
    at = np.where(inside, at, 0)
    begins = np.maximum(a[0][at], b[0])
    common = np.flatnonzero(inside & (begins < np.minimum(a[1][at], b[1])))
    return int(begins[common[0]]) if len(common) else None


def united(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes:
    """Sorts ranges and joins those that touch."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.r_[True, begins[1:] > ends[:-1]])
    return begins[first], ends[np.r_[first[1:] - 1, len(ends) - 1]]


class Timeline:
    """Order and accesses of one rank.

    Args:
        rank: Number of the rank; memory of other ranks is not judged.
        memory: Memory with the names of allocations.
        emit: Function that passes an event to the rules.
        current: Function that returns the handle of torch's current stream.
    """

    def __init__(
        self,
        rank: int,
        memory: GlobalMemory,
        emit: EventSink,
        current: Callable[[], int],
    ) -> None:
        self._rank, self._memory, self._emit, self._current = rank, memory, emit, current
        self._clocks: Counter[Party] = Counter()
        self._known: dict[Party, Vector] = {}
        self._blocking: set[int] = set()
        self._implied: list[tuple[Work, Vector]] = []
        self._tenants: dict[int, Tenant] = {}
        self._free: list[Place] = []
        self._by_host: set[Place] = set()
        self._replay: dict[int, Party] | None = None  # captured stream -> party that replays its work
        self._graph: object = None
        self._base: Vector = {}
        self.on: int | None = None  # stream of the operation that a replay executes

    # --- order

    @property
    def handle(self) -> int:
        """Returns the handle of the stream of torch's current operations."""
        return self._current() if self.on is None else self.on

    def party(self, handle: int | None = None) -> Party:
        """Returns the party of a stream, by default of the current one.

        In a replay, its party in the graph.
        """
        handle = self.handle if handle is None else handle
        handle = DEFAULT if handle == LEGACY else handle
        if self._replay is None:
            return handle
        return self._replay.setdefault(handle, (self._graph, handle))

    def made_blocking(self, handle: int) -> None:
        """Records a new stream that waits for the default stream, and that the default stream waits for."""
        self._blocking.add(handle)

    def before(self, handle: int) -> list[int]:
        """Returns the streams that a new work of a stream waits for by CUDA's rule for the default stream."""
        if self._replay is not None:
            return []
        if handle in (DEFAULT, LEGACY):
            return sorted(b for b in self._blocking if b in self._known)
        return [DEFAULT] if handle in self._blocking and DEFAULT in self._known else []

    def issue(self, what: str, handle: int | None = None) -> Work:
        """Returns a new work of a stream."""
        party = self.party(handle)
        known = self._joined(party)
        if isinstance(party, int) and self._blocking:
            for other in self.before(party):
                _merge(known, self._known[other])
        return self._next(party, known, what)

    def snapshot(self, handle: int | None = None) -> Vector:
        """Returns the vector clock of an event that is recorded in a stream now."""
        return dict(self._joined(self.party(handle)))

    def wait(self, handle: int, vector: Vector) -> None:
        """Records that a stream waits for an event."""
        _merge(self._joined(self.party(handle)), vector)

    def host_waits(self, handle: int | None = None, vector: Vector | None = None) -> None:
        """Records that the host waits for an event, for a stream, or (without either) for all streams."""
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
        """Assigns works inside to a graph that the current stream replays.

        Args:
            graph: Graph that is replayed.
            origin: Stream in which the graph was captured.
            end: Vector clock of the end of the graph's last replay, which this replay waits for; updated.
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
        description = f"{what} ({named(line)})" if line is not None else what
        return Work(party, known[party], dict(known), description, line)

    # --- accesses

    def touch(self, work: Work, base: int, spans: Bytes, write: bool, run: int | None = None) -> None:
        """Records that a work reads or writes bytes of the allocation at an address."""
        if not len(spans[0]):
            return
        tenant = self._tenants.get(base)
        if tenant is None:
            tenant = self._tenants[base] = Tenant(Place(0, None), "")
        mine = Touch(work, write, (spans[0] - base, spans[1] - base), run, tenant)
        if tenant.freed and work.vector.get(HOST, 0) >= tenant.freed:
            self._emit(FreedTouched(mine))
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
                self._emit(kind(old, mine, self._memory.spot(base + at)))
        tenant.place.touches = [*kept[-KEPT:], mine]
        if work.party == HOST:
            self._by_host.add(tenant.place)

    def _is_over(self, touch: Touch) -> bool:
        """Returns whether all works that are issued from now on are ordered after the access."""
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
        """Records accesses to bytes of one allocation of the rank; accesses to other memory are ignored."""
        allocation = self._memory.lookup(int(spans[0][0])) if len(spans[0]) else None
        if allocation is not None and allocation.rank == self._rank:
            self.touch(work, allocation.base, spans, write)

    def by_host(self, what: str) -> Work:
        """Returns a new work of the host on pinned memory."""
        return self._next(HOST, self._known.setdefault(HOST, {}), what)

    def run_over(
        self,
        number: int,
        touches: Iterable[tuple[Work, int, Bytes, bool]],
        learnt: Iterable[tuple[Work, Work]],
    ) -> None:
        """Records the launches of a run of the machine that has ended.

        Args:
            number: Number of the run.
            touches: Work of a launch, allocation, bytes, whether it wrote them.
            learnt: Pairs of works of launches: the first is ordered after the second by flags in memory.
        """
        for later, earlier in learnt:
            if not _knows(later.vector, earlier):
                self._implied.append((later, {**earlier.vector, earlier.party: earlier.clock}))
        for work, base, spans, write in touches:
            self.touch(work, base, spans, write, number)
        for place in self._by_host:  # later launches are ordered after the host's accesses
            place.touches = [touch for touch in place.touches if touch.work.party != HOST]
        self._by_host.clear()

    # --- the caching allocator

    def allocated(self, base: int, nbytes: int, pinned: bool, pooled: bool) -> None:
        """Records an allocation, which may reuse memory freed in the current stream, as in torch's allocator.

        If not `pooled`, it reuses no memory: it is from `cudaMalloc`, or from a graph's pool.
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
        """Implements `record_stream`.

        Freed memory is not reused before a stream's works until then have ended.
        """
        if base in self._tenants:
            self._tenants[base].settled[self.party(handle)] = 0

    def freed(self, base: int) -> None:
        """Records that the last reference to an allocation was dropped."""
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


def _merge(target: Vector, other: Vector) -> None:
    for party, clock in other.items():
        if target.get(party, 0) < clock:
            target[party] = clock
