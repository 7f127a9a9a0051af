"""Happens-before between warps: vector clocks, release and acquire with scope (PTX ISA 8, memory model).

Each warp is an agent with a clock. A release publishes what the agent knows; an acquire that observes it
takes that over, but only where the scopes of both sides include the other party: `.cta` the same CTA,
`.cluster` the same cluster, `.gpu` the same rank, `.sys` anyone. A fence makes a release of later, and an
acquire of earlier, relaxed accesses; what it releases is what lies before it, and nothing that a warp does
between it and the strong store that publishes it. Barriers release and acquire.

Beside each clock runs a second one, of generic-proxy writes that a proxy fence has passed to the async proxy,
and a third, of accesses that an alias fence has passed to the other names of their places: a multicast
address, and each rank's own. It is empty until the first such fence.
The bulk stores of a warp are a further agent (its id plus `BULK`), whose clock counts them: only a full
wait_group makes the warp know of them. So are its strong stores (plus `STRONG`): who observes one knows of
it and of what it publishes, but not of ordinary accesses behind the fence that it publishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from overlap_gemm.emulator.machine.shared_races import Unit
    from overlap_gemm.emulator.machine.warp import Warp
    from overlap_gemm.emulator.ptx.ir import Instruction

SCOPES = ("cta", "cluster", "gpu", "sys")
BULK, STRONG, OWN = 1, 2, ~3  # a warp's further agents, and the mask that leaves the warp's own id
Vector = dict[int, int]


class History(NamedTuple):
    """What a stream has behind it when a launch begins.

    Attributes:
        grids: Numbers of the launches that have ended before, wholly known.
        vector: What those knew of others.
    """

    grids: frozenset[int] = frozenset()
    vector: Vector = {}


def merge(into: Vector, other: Vector) -> None:
    """Takes the later clock of each agent."""
    get = into.get
    for agent, clock in other.items():
        if get(agent, 0) < clock:
            into[agent] = clock


def united(mine: Vector, other: Vector) -> Vector:
    """The later clock of each agent, for vectors that are shared while they stay what they are."""
    if mine is other or not other:
        return mine
    get = mine.get
    later = {agent: clock for agent, clock in other.items() if get(agent, 0) < clock}
    return {**mine, **later} if later else mine


class Snapshot:
    """What an agent, or all participants of a barrier, knew when they released.

    Attributes:
        agent: Who; of several the first.
        clock: Of that agent.
        joint: Whether it is what several knew.
    """

    __slots__ = (
        "agent", "aliased", "clock", "fenced_grids", "grids", "joint", "nearby", "proxied", "vector",
    )  # fmt: skip

    def __init__(
        self,
        agent: Agent,
        vector: Vector,
        proxied: Vector,
        grids: frozenset[int],
        nearby: Vector,
        fenced_grids: frozenset[int],
        aliased: Vector,
    ) -> None:
        self.agent, self.vector, self.proxied, self.grids = agent, vector, proxied, grids
        self.nearby, self.fenced_grids = nearby, fenced_grids
        self.aliased = aliased
        self.clock, self.joint = vector[agent.id], False

    @staticmethod
    def joined(parts: Iterable[Snapshot]) -> Snapshot:
        """Everything that any of several knew."""
        first, *rest = parts
        out = Snapshot(
            first.agent,
            dict(first.vector),
            first.proxied,
            first.grids,
            dict(first.nearby),
            first.fenced_grids,
            first.aliased,
        )
        out.joint = bool(rest)
        for part in rest:
            merge(out.vector, part.vector)
            merge(out.nearby, part.nearby)
            out.proxied = united(out.proxied, part.proxied)
            if part.grids is not out.grids:
                out.grids |= part.grids
            if part.fenced_grids is not out.fenced_grids:
                out.fenced_grids |= part.fenced_grids
            out.aliased = united(out.aliased, part.aliased)
        return out


class Released(NamedTuple):
    """What a strong store published.

    Attributes:
        snapshot: What its agent knew when it released, with the store or at the fence before it.
        scope: Of the release.
        store: The agent's clock of strong stores.
    """

    snapshot: Snapshot
    scope: int
    store: int


class Agent:
    """A warp's knowledge.

    Attributes:
        vector: Clock of every agent up to which its accesses happen before this one's next.
        proxied: The same for generic writes to shared (key: the agent) and global memory (its complement)
            that a proxy fence has passed on. It is replaced, never changed: snapshots share it.
        grids: Launches that are known as a whole.
        fenced_grids: Of these, those whose generic writes to global memory a proxy fence has passed on.
        aliased: Clocks of the accesses that an alias fence has passed on; replaced, too.
        touched: Whether it accessed memory since it last released.
        fenced: Snapshot and scope of its last fence.
        loads: What its relaxed loads observed since the last fence; the scope is that of both sides.
        issued: Bulk stores issued.
        strong: Strong stores made.
        party: Its number among those who access its cluster's memories (`shared_races`).
        strong_party: That of its strong stores, 0 while it has made none there.
        nearby: What it knows of these beside `vector`: clocks by party.
        units: The asynchronous units that it has used, by name.
        stale: Where its last strong load found something that was replaced.
        observed: The strong stores that its strong loads found last, by place: they lie before what follows
            the load (causality order), what they do not release does not.
    """

    __slots__ = (
        "_latest",
        "_seen",
        "aliased",
        "fenced",
        "fenced_grids",
        "grids",
        "id",
        "issued",
        "loads",
        "nearby",
        "observed",
        "party",
        "proxied",
        "stale",
        "strong",
        "strong_party",
        "touched",
        "units",
        "vector",
        "warp",
    )

    def __init__(self, number: int, warp: Warp, history: History) -> None:
        self.id, self.warp, self.grids = number, warp, history.grids
        self.fenced_grids: frozenset[int] = frozenset()
        self.vector: Vector = {**history.vector, number: 1}
        self.proxied: Vector = {~agent: clock for agent, clock in history.vector.items()}
        self.aliased: Vector = {}
        self.touched = False
        self.fenced: tuple[Snapshot, int] | None = None
        self.loads: list[Released] = []
        self.issued, self.strong = 0, 0
        self.party, self.strong_party = 0, 0
        self.nearby: Vector = {}
        self.units: dict[str, Unit] = {}
        self.stale: frozenset[int] = frozenset()
        self.observed: dict[Any, int] = {}
        self._latest: Snapshot | None = None
        self._seen: dict[int, Snapshot] = {}

    @property
    def epoch(self) -> int:
        """The agent and its clock in one integer."""
        return self.id << 32 | self.vector[self.id]

    @property
    def strong_epoch(self) -> int:
        """The same of the strong store that it is making."""
        return self.id + STRONG << 32 | self.strong

    def release(self) -> Snapshot:
        """Publishes what it knows; later accesses get a later clock."""
        if self._latest is None or self.touched:
            self._latest = Snapshot(
                self,
                dict(self.vector),
                self.proxied,
                self.grids,
                dict(self.nearby),
                self.fenced_grids,
                self.aliased,
            )
            self.vector[self.id] += 1
            self.touched = False
        return self._latest

    def acquire(self, snapshot: Snapshot) -> None:
        """Takes over what another agent published."""
        key = snapshot.agent.id
        last = self._seen.get(key)
        if last is snapshot or snapshot is self._latest:
            return
        if last is not None and snapshot.clock <= last.clock and not snapshot.joint:
            return  # of before that, when its agent knew no more
        self._seen[key] = snapshot
        self._latest = None
        merge(self.vector, snapshot.vector)
        if last is None or last.proxied is not snapshot.proxied:
            self.proxied = united(self.proxied, snapshot.proxied)
        if snapshot.agent.warp.cta.cluster is self.warp.cta.cluster:
            merge(self.nearby, snapshot.nearby)
        if snapshot.grids is not self.grids:
            self.grids |= snapshot.grids
        if snapshot.fenced_grids is not self.fenced_grids:
            self.fenced_grids |= snapshot.fenced_grids
        self.aliased = united(self.aliased, snapshot.aliased)

    def learn_nearby(self, party: int, clock: int) -> None:
        """Knows of one more asynchronous unit's accesses."""
        if self.nearby.get(party, 0) < clock:
            self.nearby[party] = clock
            self._latest = None

    def acquire_nearby(self, *known: Vector) -> None:
        """Takes over what units of its cluster pass on."""
        for vector in known:
            if vector:
                merge(self.nearby, vector)
        self._latest = None

    def begin_strong_store(self) -> None:
        """It is about to make one, which is later than those before."""
        self.strong += 1
        self.vector[self.id + STRONG] = self.strong
        self._latest = None

    def observe(self, released: Released) -> None:
        """Takes over what a strong store published, and knows of the store itself."""
        self.acquire(released.snapshot)
        self.learn(released.snapshot.agent.id + STRONG, released.store)

    def fence_proxy(self, in_shared: bool, in_global: bool) -> None:
        """Passes every generic write it knows of, to shared or global memory, to the async proxy."""
        if in_shared:
            self.proxied = united(self.proxied, self.vector)
        if in_global:
            passed = {~agent: clock for agent, clock in self.vector.items()}
            self.proxied = united(self.proxied, passed)
            self.fenced_grids |= self.grids
        self._latest = None
        self.touched = True

    def fence_alias(self) -> None:
        """Passes every access it knows of, its own among them, to the other names of their places."""
        self.aliased = united(self.aliased, self.vector)
        self.vector[self.id] += 1  # what it does from now on is not passed
        self._latest = None
        self.touched = True

    def learn(self, agent: int, clock: int) -> None:
        """Knows of one more agent's accesses."""
        if self.vector.get(agent, 0) < clock:
            self.vector[agent] = clock
            self._latest = None

    def has_observed(self, epoch: int, addresses: Iterable[int]) -> bool:
        """Whether its strong loads found a strong store at all of some addresses in global memory."""
        seen = self.observed.get
        return all(any(seen(a & -size) == epoch for size in (4, 8, 16, 32)) for a in addresses)

    def knows(self, epoch: int, owner: Agent) -> bool:
        """Whether an access of `owner` happened before this agent's next one."""
        return self.vector.get(epoch >> 32, 0) >= epoch & 0xFFFFFFFF or owner.warp.grid.number in self.grids

    def has_proxied(self, epoch: int, owner: Agent, in_global: bool) -> bool:
        """Whether a generic write was passed to the async proxy, as far as this agent knows.

        What a kernel wrote that had ended before this one began was; of one whose end a flag told of, only
        what was fenced.
        """
        key = ~(epoch >> 32) if in_global else epoch >> 32
        if self.proxied.get(key, 0) >= epoch & 0xFFFFFFFF:
            return True
        number = owner.warp.grid.number
        return number in self.warp.grid.history.grids or number in self.fenced_grids

    def has_aliased(self, epoch: int, owner: Agent) -> bool:
        """Whether an access was passed to the other names of its place, as far as this agent knows.

        What a kernel did was, where its end is known; so was what kernels knew of that had ended before this
        one began.
        """
        key, clock = epoch >> 32, epoch & 0xFFFFFFFF
        if self.aliased.get(key, 0) >= clock or self.warp.grid.history.vector.get(key, 0) >= clock:
            return True
        return owner.warp.grid.number in self.grids

    def fence(self, scope: int) -> None:
        """`fence.{acq_rel,sc}`: makes earlier relaxed loads acquires, later relaxed stores releases."""
        for released in self.loads:
            if includes(min(scope, released.scope), released.snapshot.agent.warp, self.warp):
                self.observe(released)
        self.loads.clear()
        self.fenced = (self.release(), scope)


def includes(scope: int, a: Warp, b: Warp) -> bool:
    """Whether two warps lie in one instance of a scope."""
    if scope == 3 or a.cta is b.cta:
        return True
    if a.grid.launch.rank != b.grid.launch.rank:
        return False
    if scope == 2:
        return True
    return a.cta is b.cta if scope == 0 else a.cta.cluster is b.cta.cluster


def scope_of(ins: Instruction, default: str) -> int:
    """Index in `SCOPES` of an instruction's scope."""
    return _scope(ins.parts, default)


@lru_cache(maxsize=256)
def _scope(parts: tuple[str, ...], default: str) -> int:
    if "volatile" in parts or "mmio" in parts:
        return 3
    name = next((s for s in SCOPES if s in parts), {"gl": "gpu"}.get(parts[-1], default))
    return SCOPES.index(name)


class SyncVariables:
    """Releases visible in memory: the heads of each location's release sequences."""

    def __init__(self) -> None:
        self._heads: dict[Any, list[Released]] = {}
        self._older: dict[Any, list[Released]] = {}  # before the last write
        self._last: dict[Any, int] = {}  # epoch of the last write

    def write(self, agent: Agent, place: Any, scope: int, releases: bool, rmw: bool) -> None:
        """A strong write, about to be made. A read-modify-write continues the release sequences it read."""
        before = self._heads.get(place, [])
        self._older[place], self._last[place] = before, agent.strong_epoch
        heads = list(before) if rmw else []
        if releases:
            heads.append(Released(agent.release(), scope, agent.strong))
        elif agent.fenced is not None:
            snapshot, fenced = agent.fenced
            heads.append(Released(snapshot, min(scope, fenced), agent.strong))
        if heads:
            self._heads[place] = heads[-64:]
        else:
            self._heads.pop(place, None)

    def read(self, agent: Agent, place: Any, scope: int, acquires: bool, older: bool = False) -> None:
        """A strong read; `older`: of what the last write replaced."""
        if not older and place in self._last:
            agent.observed[place] = self._last[place]
        for released in (self._older if older else self._heads).get(place, ()):
            both = min(scope, released.scope)
            if not acquires:
                agent.loads.append(released if both == released.scope else released._replace(scope=both))
            elif includes(both, released.snapshot.agent.warp, agent.warp):
                agent.observe(released)
        if len(agent.loads) > 256:
            del agent.loads[:-256]

    def clear(self) -> None:
        """Forgets everything: all that happened is ordered before what follows."""
        self._heads.clear()
        self._older.clear()
        self._last.clear()
