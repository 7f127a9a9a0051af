"""Happens-before between warps: vector clocks, release and acquire with scope (PTX ISA 8, memory model).

Each warp is an agent with a clock. A release publishes the agent's vector clock. An acquire that observes it
merges that clock, but only if the scopes of both include the other party: `.cta` the same CTA, `.cluster` the
same cluster, `.gpu` the same rank, `.sys` any. A fence makes a release of later, and an acquire of earlier,
relaxed accesses. It releases what is before the fence, and nothing between the fence and the strong store
that publishes it. Barriers release and acquire.

Each agent has two further vector clocks:

- of generic-proxy writes that a proxy fence has passed to the async proxy;
- of accesses that an alias fence has passed to the other addresses of their memory: a multicast address, and
  each rank's address. It is empty until the first such fence.

A warp has three further agents:

- Its bulk stores (id plus `BULK`), whose clock counts them: only a full wait_group orders the warp after
  them.
- Its strong stores (plus `STRONG`): a warp that observes one is ordered after it and after what it publishes,
  but not after ordinary accesses after the published fence.
- Its `cp.async` copies (plus `COPY`). They write late, through the generic proxy: they are no operations of
  the
  async proxy (PTX ISA 9.7.9.25.2, 9.7.9.25.3). A warp that has waited for them is ordered after them, and may
  pass them to the async proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_emulator.machine.lane_order import add_doubts, joint_unreleased

if TYPE_CHECKING:
    from cute_emulator.machine.lane_order import LaneStore
    from cute_emulator.machine.shared_races import Unit
    from cute_emulator.machine.warp import Warp
    from cute_emulator.ptx.ir import Instruction

SCOPES = ("cta", "cluster", "gpu", "sys")
BULK, STRONG, COPY, OWN = 1, 2, 3, ~3  # a warp's further agents, and the mask that leaves the warp's own id
Vector = dict[int, int]


class History(NamedTuple):
    """Accesses that are ordered before a launch of a stream.

    Attributes:
        grids: Numbers of the launches that have ended before, with all their accesses.
        vector: Clocks of other launches that those had observed.
    """

    grids: frozenset[int] = frozenset()
    vector: Vector = {}


def merge(target: Vector, other: Vector) -> None:
    """Merges a vector clock into another: takes the later clock of each agent."""
    get = target.get
    for agent, clock in other.items():
        if get(agent, 0) < clock:
            target[agent] = clock


def united(mine: Vector, other: Vector) -> Vector:
    """Returns the merge of two vectors.

    Vectors are shared and never changed. An argument is returned if it is the result.
    """
    if mine is other or not other:
        return mine
    get = mine.get
    later = {agent: clock for agent, clock in other.items() if get(agent, 0) < clock}
    return {**mine, **later} if later else mine


class Snapshot:
    """State that an agent, or all participants of a barrier, released.

    Attributes:
        agent: Agent that released; of several the first.
        clock: Clock of that agent.
        joint: Whether several agents released it.
        unreleased: Stores that are not released although the clock of their warp is, with their lanes.
    """

    __slots__ = (
        "agent", "aliased", "clock", "fenced_grids", "grids", "joint", "nearby", "proxied", "tensor_passed",
        "unreleased", "vector",
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
        self.unreleased: dict[LaneStore, int] = {}

    def without(self, unreleased: dict[LaneStore, int]) -> Snapshot:
        """Returns a copy without some stores of some lanes."""
        out = Snapshot(
            self.agent, self.vector, self.proxied, self.grids, self.nearby, self.fenced_grids, self.aliased,
            self.tensor_passed,
        )  # fmt: skip
        out.clock, out.joint, out.unreleased = self.clock, self.joint, unreleased
        return out

    @staticmethod
    def joined(parts: Iterable[Snapshot]) -> Snapshot:
        """Returns the merge of several snapshots."""
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
        if any(part.unreleased for part in every):
            out.unreleased = joint_unreleased(every)
        return out


class Released(NamedTuple):
    """Release that a strong store published.

    Attributes:
        snapshot: State of its agent at the release, with the store or at the fence before it.
        scope: Scope of the release.
        store: Agent's clock of strong stores.
    """

    snapshot: Snapshot
    scope: int
    store: int


class Agent:
    """Happens-before state of a warp.

    Attributes:
        vector: Clock of every agent up to which its accesses happen before this one's next.
        proxied: Clocks of generic writes to shared (key: the agent) and global memory (its complement) that a
            proxy fence has passed on. It is replaced, never changed: snapshots share it.
        grids: Launches that are ordered before with all their accesses.
        fenced_grids: Of these, those whose generic writes to global memory a proxy fence has passed on.
        aliased: Clocks of the accesses that an alias fence has passed on; replaced, too.
        tensor_passed: Clocks of accesses to tensor memory that a before-fence passed on; replaced, too.
        tensor_seen: Clocks in `tensor_passed` at its last after-fence; those of units are in `tensor_units`.
        touched: Whether it accessed memory since its last release.
        fenced: Snapshot and scope of its last fence.
        loads: Releases that its relaxed loads observed since the last fence; with the common scope of both.
        issued: Number of bulk stores issued.
        strong: Number of strong stores.
        party: Number among the parties that access its cluster's memories (`shared_races`).
        strong_party: Party of its strong stores, 0 before the first.
        nearby: Clocks by party, in addition to `vector`.
        units: Asynchronous units that it has used, by name.
        stale: Places where its last strong load returned a replaced value.
        doubts: Stores of other warps whose lanes did not release them, see `lane_order`.
        observed: Strong stores that its last strong loads observed, by place. They are ordered before
            accesses after the load (causality order); accesses that they do not release are not.
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
        """Returns the agent and its clock in one integer."""
        return self.id << 32 | self.vector[self.id]

    @property
    def strong_epoch(self) -> int:
        """Returns the epoch of its current strong store."""
        return self.id + STRONG << 32 | self.strong

    def release(self, lanes: int = -1) -> Snapshot:
        """Publishes its state, by some of its lanes; later accesses have a later clock."""
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
        return self.released_by(self._latest, lanes)

    def released_by(self, snapshot: Snapshot, lanes: int) -> Snapshot:
        """Returns the part of a snapshot that some lanes release."""
        if not self.doubts and not self.warp.unsynced.stores:
            return snapshot
        unreleased = {**self.doubts, **self.warp.unsynced.unreleased(lanes, snapshot.clock)}
        return snapshot.without(unreleased) if unreleased else snapshot

    def acquire(self, snapshot: Snapshot) -> None:
        """Merges what another agent published."""
        if self.doubts or snapshot.unreleased:
            add_doubts(self, snapshot)
        key = snapshot.agent.id
        last = self._seen.get(key)
        if last is snapshot or snapshot is self._latest:
            return
        if last is not None and snapshot.clock <= last.clock and not snapshot.joint:
            return  # an earlier snapshot of that agent: already merged
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
        """Orders all accesses of ended grids before this agent, for every proxy."""
        merge(self.vector, history.vector)
        self.grids |= history.grids
        self.fenced_grids |= history.grids
        self._latest = None
        self.touched = True

    def join_nearby(self, party: int, clock: int) -> None:
        """Orders an asynchronous unit's accesses before this agent."""
        if self.nearby.get(party, 0) < clock:
            self.nearby[party] = clock
            self._latest = None

    def acquire_nearby(self, *known: Vector) -> None:
        """Merges clocks that units of its cluster pass on."""
        for vector in known:
            if vector:
                merge(self.nearby, vector)
        self._latest = None

    def begin_strong_store(self) -> None:
        """Advances the clock of strong stores, for a store that follows."""
        self.strong += 1
        self.vector[self.id + STRONG] = self.strong
        self._latest = None

    def observe(self, released: Released) -> None:
        """Merges what a strong store published, and the store itself."""
        self.acquire(released.snapshot)
        self.join(released.snapshot.agent.id + STRONG, released.store)

    def fence_proxy(self, in_shared: bool, in_global: bool) -> None:
        """Passes every generic write ordered before, to shared or global memory, to the async proxy.

        A fence orders what is before it in program order, and nothing that follows (PTX ISA 8.7,
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
        """Passes every access ordered before, including its own, to the other addresses of their memory."""
        self.aliased = united(self.aliased, self.vector)
        self.advance()

    def advance(self) -> None:
        """Advances the clock after a fence that has passed its accesses on."""
        self.vector[self.id] += 1
        self._latest = None
        self.touched = True

    def join(self, agent: int, clock: int) -> None:
        """Orders another agent's accesses before this agent."""
        if self.vector.get(agent, 0) < clock:
            self.vector[agent] = clock
            self._latest = None

    def has_observed(self, epoch: int, addresses: Iterable[int]) -> bool:
        """Returns whether its strong loads observed a strong store at all of some global addresses."""
        seen = self.observed.get
        return all(any(seen(a & -size) == epoch for size in (4, 8, 16, 32)) for a in addresses)

    def knows(self, epoch: int, owner: Agent) -> bool:
        """Returns whether an access of `owner` happened before this agent's next one."""
        return self.vector.get(epoch >> 32, 0) >= epoch & 0xFFFFFFFF or owner.warp.grid.number in self.grids

    def has_proxied(self, epoch: int, owner: Agent, in_global: bool) -> bool:
        """Returns whether a generic write was passed to the async proxy, in an observed order.

        Writes of a kernel that had ended before this one began are. If a flag signalled the kernel's end,
        only fenced writes are.
        """
        key = ~(epoch >> 32) if in_global else epoch >> 32
        if self.proxied.get(key, 0) >= epoch & 0xFFFFFFFF:
            return True
        number = owner.warp.grid.number
        return number in self.warp.grid.history.grids or number in self.fenced_grids

    def has_aliased(self, epoch: int, owner: Agent) -> bool:
        """Returns whether an access was passed to its memory's other addresses, in an observed order.

        Accesses of a kernel are if its end was observed. So are those that kernels had observed which ended
        before this one began.
        """
        key, clock = epoch >> 32, epoch & 0xFFFFFFFF
        if self.aliased.get(key, 0) >= clock or self.warp.grid.history.vector.get(key, 0) >= clock:
            return True
        return owner.warp.grid.number in self.grids

    def fence(self, scope: int) -> None:
        """Executes `fence.{acq_rel,sc}`.

        Earlier relaxed loads become acquires, later relaxed stores become releases.
        """
        for released in self.loads:
            if includes(min(scope, released.scope), released.snapshot.agent.warp, self.warp):
                self.observe(released)
        self.loads.clear()
        self.fenced = (self.release(), scope)


def includes(scope: int, a: Warp, b: Warp) -> bool:
    """Returns whether two warps are in one instance of a scope."""
    if scope == 3 or a.cta is b.cta:
        return True
    if a.grid.launch.rank != b.grid.launch.rank:
        return False
    if scope == 2:
        return True
    return a.cta is b.cta if scope == 0 else a.cta.cluster is b.cta.cluster


def scope_of(ins: Instruction, default: str) -> int:
    """Returns the index in `SCOPES` of an instruction's scope."""
    return _scope(ins.parts, default)


@lru_cache(maxsize=256)
def _scope(parts: tuple[str, ...], default: str) -> int:
    if "volatile" in parts or "mmio" in parts:
        return 3
    name = next((s for s in SCOPES if s in parts), {"gl": "gpu"}.get(parts[-1], default))
    return SCOPES.index(name)
