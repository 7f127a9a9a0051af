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
it and of what it publishes, but not of ordinary accesses after the fence that it publishes. Its `cp.async`
copies (plus `COPY`) write through the generic proxy (PTX ISA 9.7.9.25.3: they are no operations of the async
proxy, 9.7.9.25.2), but late: who has waited for them knows of them, and may pass them to the async proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_emulator.machine.lane_order import add_doubts, joint_untold

if TYPE_CHECKING:
    from cute_emulator.machine.lane_order import LaneStore
    from cute_emulator.machine.shared_races import Unit
    from cute_emulator.machine.warp import Warp
    from cute_emulator.ptx.ir import Instruction

SCOPES = ("cta", "cluster", "gpu", "sys")
BULK, STRONG, COPY, OWN = 1, 2, 3, ~3  # a warp's further agents, and the mask that leaves the warp's own id
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
        untold: Stores that it does not tell of though their warp's clock does: by store the lanes.
    """

    __slots__ = (
        "agent", "aliased", "clock", "fenced_grids", "grids", "joint", "nearby", "proxied", "tensor_passed",
        "untold", "vector",
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
        tensor_passed: Vector,
    ) -> None:
        self.agent, self.vector, self.proxied, self.grids = agent, vector, proxied, grids
        self.nearby, self.fenced_grids = nearby, fenced_grids
        self.aliased, self.tensor_passed = aliased, tensor_passed
        self.clock, self.joint = vector[agent.id], False
        self.untold: dict[LaneStore, int] = {}

    def without(self, untold: dict[LaneStore, int]) -> Snapshot:
        """The same, but for some stores of some lanes."""
        out = Snapshot(
            self.agent, self.vector, self.proxied, self.grids, self.nearby, self.fenced_grids, self.aliased,
            self.tensor_passed,
        )  # fmt: skip
        out.clock, out.joint, out.untold = self.clock, self.joint, untold
        return out

    @staticmethod
    def joined(parts: Iterable[Snapshot]) -> Snapshot:
        """Everything that any of several knew."""
        every = list(parts)
        first, *rest = every
        out = Snapshot(
            first.agent,
            dict(first.vector),
            first.proxied,
            first.grids,
            dict(first.nearby),
            first.fenced_grids,
            first.aliased,
            first.tensor_passed,
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
            out.tensor_passed = united(out.tensor_passed, part.tensor_passed)
        if any(part.untold for part in every):
            out.untold = joint_untold(every)
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
        tensor_passed: Clocks of accesses to tensor memory that a before-fence passed on; replaced, too.
        tensor_seen: Of these, and of units in `tensor_units`, those that its after-fence has seen.
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
        doubts: Stores of other warps whose lanes did not release them, see `lane_order`.
        observed: The strong stores that its strong loads found last, by place: they lie before what follows
            the load (causality order), what they do not release does not.
    """

    __slots__ = (
        "_latest",
        "_seen",
        "aliased",
        "doubts",
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
        "tensor_passed",
        "tensor_seen",
        "tensor_units",
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
        self.tensor_passed: Vector = {}
        self.tensor_seen: Vector = {}
        self.tensor_units: Vector = {}
        self.touched = False
        self.fenced: tuple[Snapshot, int] | None = None
        self.loads: list[Released] = []
        self.issued, self.strong = 0, 0
        self.party, self.strong_party = 0, 0
        self.nearby: Vector = {}
        self.units: dict[str, Unit] = {}
        self.stale: frozenset[int] = frozenset()
        self.observed: dict[Any, int] = {}
        self.doubts: dict[LaneStore, int] = {}
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

    def release(self, lanes: int = -1) -> Snapshot:
        """Publishes what it knows, by some of its lanes; later accesses get a later clock."""
        if self._latest is None or self.touched:
            self._latest = Snapshot(
                self,
                dict(self.vector),
                self.proxied,
                self.grids,
                dict(self.nearby),
                self.fenced_grids,
                self.aliased,
                self.tensor_passed,
            )
            self.vector[self.id] += 1
            self.touched = False
        return self.told_by(self._latest, lanes)

    def told_by(self, snapshot: Snapshot, lanes: int) -> Snapshot:
        """What some lanes tell of what their warp knew."""
        if not self.doubts and not self.warp.unsynced.stores:
            return snapshot
        untold = {**self.doubts, **self.warp.unsynced.untold(lanes, snapshot.clock)}
        return snapshot.without(untold) if untold else snapshot

    def acquire(self, snapshot: Snapshot) -> None:
        """Takes over what another agent published."""
        if self.doubts or snapshot.untold:
            add_doubts(self, snapshot)
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
        self.tensor_passed = united(self.tensor_passed, snapshot.tensor_passed)

    def take_over(self, history: History) -> None:
        """Knows all that grids did that have ended, whatever the proxy."""
        merge(self.vector, history.vector)
        self.grids |= history.grids
        self.fenced_grids |= history.grids
        self._latest = None
        self.touched = True

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
        """Passes every generic write it knows of, to shared or global memory, to the async proxy.

        A fence orders what stands before it in program order, and nothing that follows (PTX ISA 8.7,
        "proxy-preserved base causality order": a proxy fence along the path from the one to the other).
        """
        if in_shared:
            self.proxied = united(self.proxied, self.vector)
        if in_global:
            passed = {~agent: clock for agent, clock in self.vector.items()}
            self.proxied = united(self.proxied, passed)
            self.fenced_grids |= self.grids
        self.advance()

    def fence_alias(self) -> None:
        """Passes every access it knows of, its own among them, to the other names of their places."""
        self.aliased = united(self.aliased, self.vector)
        self.advance()

    def advance(self) -> None:
        """A fence has passed what it did: what it does from now on has a later clock."""
        self.vector[self.id] += 1
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
