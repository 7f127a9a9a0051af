"""What is checked while a kernel runs, and the order of events that the checks rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine.conflicts import (
    MbarrierUnfenced,
    MbarrierUnordered,
    SharedUnfenced,
    TensorUnwaited,
)
from cute_emulator.machine.events import BarrierIncomplete, CtaEnded, PeerUsed
from cute_emulator.machine.lane_order import check_async, joint_untold
from cute_emulator.machine.order import (
    COPY,
    OWN,
    SCOPES,
    Agent,
    History,
    includes,
    merge,
    scope_of,
    united,
)
from cute_emulator.machine.races import RaceDetector, distinct
from cute_emulator.machine.shared_races import Party, SharedRaces, nearby
from cute_emulator.machine.sync_variables import SyncVariables
from cute_emulator.numbers.lanes import lane_list

if TYPE_CHECKING:
    from cute_emulator.errors import Report
    from cute_emulator.execution.grid import Grid
    from cute_emulator.machine.barrier import CountBarrier, MBarrier, Waiters
    from cute_emulator.machine.clocks import Clocks
    from cute_emulator.machine.memory import GlobalMemory
    from cute_emulator.machine.visibility import HeldStores
    from cute_emulator.machine.warp import Cta, Group, Warp
    from cute_emulator.ptx.ir import Instruction

SYS = SCOPES.index("sys")


class Checks:
    """Hooks that instruction handlers call; each keeps the order of events or feeds the report.

    Attributes:
        races: The race detector of global memory, or None where it is off.
        shared: That of shared and tensor memory.
        sync: Releases visible in memory.
        held: Stores to other ranks that are held back until a release.
        clocks: The model of time, where a trace is wanted.
        listeners: Class of an event -> rules that look at it.
    """

    def __init__(self, report: Report, enabled: frozenset[str], memory: GlobalMemory) -> None:
        self.report, self.enabled = report, enabled
        self.sync = SyncVariables()
        self.held: HeldStores | None = None
        self.clocks: Clocks | None = None
        self.agents: dict[int, Agent] = {}
        self.races = RaceDetector(self.tell, memory, self.agents) if "race" in enabled else None
        self.shared = SharedRaces(self.tell, "tmem-fence" in enabled) if "shared" in enabled else None
        self._histories: dict[tuple[int, int], History] = {}
        self.listeners: Mapping[type, Sequence[Callable[[Checks, Any], None]]] = {}
        self._notes: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()

    def tell(self, event: object) -> None:
        """Shows an event to the rules that look at its kind (`machine.events`)."""
        for look in self.listeners.get(event.__class__, ()):
            look(self, event)

    def notes(self, of: object) -> dict[str, Any]:
        """What rules have noted of a CTA or a cluster, by their kinds."""
        found = self._notes.get(of)
        if found is None:
            found = self._notes[of] = {}
        return found

    # -- agents ----------------------------------------------------------------------------------------

    def new_agent(self, warp: Warp) -> Agent:
        """The agent of a new warp."""
        number = 4 * len(self.agents) + 4  # further agents: `order.BULK`, `order.STRONG`
        agent = self.agents[number] = Agent(number, warp, warp.grid.history)
        agent.party = warp.cta.cluster.enrol(Party(str(warp), number))
        return agent

    def history(self, rank: int, stream: int) -> History:
        """What a launch finds behind it."""
        return self._histories.get((rank, stream), History())

    def learn(self, rank: int, stream: int, other: History) -> None:
        """A stream has waited for an event: it has behind it what the other stream had there."""
        mine = self.history(rank, stream)
        vector = {**mine.vector}
        merge(vector, other.vector)
        self._histories[rank, stream] = History(mine.grids | other.grids, vector)

    def cta_ended(self, cta: Cta) -> None:
        """Collects what a CTA learnt of other launches."""
        grid = cta.grid
        for warp in cta.warps:
            vector = warp.agent.vector
            if warp.agent.grids is not grid.known_grids:
                grid.known_grids |= warp.agent.grids
            others = {a: c for a, c in vector.items() if self.agents[a & OWN].warp.grid is not grid}
            merge(grid.learnt, others)

    def grid_ended(self, grid: Grid) -> None:
        """The next launch in the stream knows all that a grid did, bulk stores included."""
        before = grid.history
        vector = {**before.vector}
        merge(vector, grid.learnt)
        grid.final = History(grid.known_grids | {grid.number}, vector)
        self.learn(grid.launch.rank, grid.launch.stream, grid.final)

    def prerequisites_done(self, group: Group) -> None:
        """`griddepcontrol.wait`: all that the prerequisite grid knew and did is visible, to every proxy."""
        agent, before = group.warp.agent, group.warp.grid.prerequisite
        if before is not None:
            agent.take_over(before.final)
            if self.clocks is not None:
                self.clocks.join(self.clocks.end(before), "the launch before")

    def clear(self) -> None:
        """A run is over: all of it is ordered before what follows."""
        self.agents.clear()
        self._histories.clear()
        self.sync.clear()
        if self.races is not None:
            self.races.clear()

    # -- generic and async proxy -----------------------------------------------------------------------

    def proxy_fence(self, group: Group, spaces: list[str]) -> None:
        """`fence.proxy.async`: generic writes that this warp knows of become visible to the async proxy."""
        shared = not spaces or any(s.startswith("shared") for s in spaces)
        group.warp.agent.fence_proxy(shared, not spaces or "global" in spaces)

    def smem_read(
        self, group: Group, mask: int, cta: Cta, granules: slice | NDArray[np.int64], what: str, line: int
    ) -> None:
        """Lanes tell an async unit to read 16-byte granules: each must have been fenced since it was written.

        They must know of what other lanes wrote there.
        """
        if self.shared is not None:
            check_async(self.tell, group.warp, cta, mask, granules, 16, what, line)
        if "proxy" in self.enabled:
            self._fenced(group, cta, granules, what, True, line)

    def smem_overwrite(self, group: Group, cta: Cta, granules: slice | NDArray[np.int64], line: int) -> None:
        """An async copy is told to write 16-byte granules: generic writes there must have been fenced.

        By the ISA (8.7, "proxy-preserved base causality order") generic reads, too; no kernel fences these.
        """
        if "proxy" not in self.enabled:
            return
        if isinstance(granules, slice) and not cta.written_in([(granules.start, granules.stop)]):
            return
        if cta.dirty[granules].any():
            self._fenced(group, cta, granules, "the copy", False, line)

    def _fenced(
        self, group: Group, cta: Cta, granules: slice | NDArray[np.int64], what: str, is_read: bool, line: int
    ) -> None:
        epochs, agent = cta.dirty[granules], group.warp.agent
        for epoch in distinct(epochs):
            owner = self.agents.get((epoch >> 32) & OWN)
            if owner is not None and not agent.has_proxied(epoch, owner, in_global=False):
                number = int(np.flatnonzero(epochs == epoch)[0])
                at = 16 * int(np.arange(len(cta.dirty))[granules][number])
                is_copy = epoch >> 32 & COPY == COPY
                self.tell(SharedUnfenced(group.warp, line, what, is_read, cta, at, owner.warp, is_copy))
                return

    def smem_written(self, cta: Cta, granules: slice | NDArray[np.int64]) -> None:
        """An async unit overwrote shared memory: generic writes before it no longer matter."""
        cta.dirty[granules] = 0

    # -- initialisation of mbarriers -------------------------------------------------------------

    def mbarrier_init(self, group: Group, barrier: MBarrier, line: int) -> None:
        """`mbarrier.init`: a fence of this warp must follow."""
        warp, agent = group.warp, group.warp.agent
        warp.unfenced.append(barrier)
        barrier.party = warp.cta.cluster.enrol(Party("an asynchronous copy", None, "copy", barrier.name()))
        barrier.initialised = agent, agent.vector[agent.id], line
        barrier.users.add(agent.id)
        agent.touched = True

    def mbarrier_fence(self, group: Group) -> None:
        """`fence.mbarrier_init`, or a fence at least as strong."""
        warp = group.warp
        for barrier in warp.unfenced:
            barrier.fenced = True
        warp.fenced += warp.unfenced
        warp.unfenced.clear()

    def mbarrier_use(self, barrier: MBarrier, what: str, line: int) -> None:
        """Another CTA or the async proxy operates on a barrier."""
        if not barrier.fenced:
            self.tell(MbarrierUnfenced(barrier, what, line))

    def mbarrier_known(self, group: Group, barrier: MBarrier, line: int) -> None:
        """A warp operates on a barrier: its initialisation must have happened before."""
        agent = group.warp.agent
        if agent.id in barrier.users or barrier.initialised is None:
            return
        barrier.users.add(agent.id)
        owner, clock, initialised = barrier.initialised
        if agent.vector.get(owner.id, 0) < clock and agent.nearby.get(owner.party, 0) < clock:
            self.tell(MbarrierUnordered(group, line, barrier, owner, initialised))

    # -- tensor memory ---------------------------------------------------------------------------

    def tmem_use(
        self,
        cta: Cta,
        kinds: tuple[str, ...],
        first: int,
        columns: int,
        halves: tuple[int, ...],
        what: str,
        line: int,
    ) -> None:
        """A product or a dealloc touches cells: no warp may have an access of `kinds` to them open."""
        found = cta.tmem_order.conflict(kinds, first, columns, halves) if "tmem" in self.enabled else None
        if found is not None:
            self.tell(TensorUnwaited(cta, line, what, (first, first + columns - 1), *found))

    # -- synchronisation -------------------------------------------------------------------

    def fence(self, group: Group, ins: Instruction) -> None:
        """`fence.{sc,acq_rel}` and `membar`."""
        if ins.parts[0] == "membar" or {"sc", "acq_rel", "acquire", "release"} & set(ins.parts):
            scope = scope_of(ins, "cta" if ins.parts[0] == "membar" else "sys")
            group.warp.agent.fence(scope)
            if scope == SYS and self.held is not None:
                self.held.release(group.warp.agent)

    def arrive(self, group: Group, mask: int, barrier: Waiters, ins: Instruction) -> None:
        """Lanes arrive at a barrier: a release, unless it says `.relaxed` and no fence goes before it."""
        agent, scope = group.warp.agent, scope_of(ins, barrier.scope)
        if group.warp.unsynced.stores:
            group.warp.unsynced.release(mask)
        if "relaxed" not in ins.parts:
            snapshot = agent.release(mask)
        elif agent.fenced is not None:
            snapshot, scope = agent.told_by(agent.fenced[0], mask), min(scope, agent.fenced[1])
        else:
            snapshot = None
        if snapshot is not None:
            if snapshot.untold and agent.id in barrier.arrivals:  # other lanes have come before
                snapshot = snapshot.without(joint_untold([barrier.arrivals[agent.id][0], snapshot]))
            barrier.arrivals[agent.id] = snapshot, scope
        if barrier.joint:  # a fence of mbarrier initialisations needs no more than this
            barrier.inits += group.warp.fenced
            group.warp.fenced.clear()

    def leave(self, group: Group, mask: int, barrier: Waiters, ins: Instruction) -> None:
        """A barrier let lanes go: an acquire unless it says `.relaxed`."""
        agent, mine = group.warp.agent, scope_of(ins, barrier.scope)
        if self.clocks is not None:
            self.clocks.join(barrier.since, str(barrier).partition(" (")[0])
        if group.warp.unsynced.stores:
            group.warp.unsynced.acquire(mask, group.warp.live)
        for known in barrier.inits:
            known.users.add(agent.id)
        if "relaxed" in ins.parts:
            return
        for snapshot, scope in barrier.known.values():
            if barrier.joint or includes(min(scope, mine), snapshot.agent.warp, agent.warp):
                agent.acquire(snapshot)
            elif self.shared is not None and snapshot.agent.warp.cta.cluster is agent.warp.cta.cluster:
                agent.acquire_nearby(nearby(agent, snapshot))
                in_shared = {a: c for a, c in snapshot.proxied.items() if a >= 0}
                agent.proxied = united(agent.proxied, in_shared)

    def passed(self, group: Group, barrier: CountBarrier, ins: Instruction) -> None:
        """A barrier of a CTA that names no count let a warp go, and not all warps came."""
        if not barrier.count and barrier.present < 32 * len(group.warp.cta.warps):
            self.tell(BarrierIncomplete(group, ins.line, barrier))

    def completed(self, group: Group, barrier: MBarrier) -> None:
        """A wait found a phase of an mbarrier complete: the warp knows what completed on it."""
        agent = group.warp.agent
        for copies, clock in barrier.copied.items():
            agent.learn(copies, clock)
        if self.shared is not None and agent.nearby.get(barrier.party, 0) < barrier.completed:
            agent.acquire_nearby(barrier.passed, {barrier.party: barrier.completed})

    def strong_load(self, group: Group, ins: Instruction, mask: int, space: str, address: Any) -> None:
        """A volatile, relaxed or acquire load."""
        agent, acquires, scope = group.warp.agent, "acquire" in ins.parts, scope_of(ins, "gpu")
        if acquires:
            group.warp.unsynced.acquire(mask, group.warp.live)
        places = self._places(group, mask, space, address)
        if self.clocks is not None:
            self.clocks.seen(places)
        for place in places:
            self.sync.read(agent, place, scope, acquires, place in agent.stale)
        agent.stale = frozenset()

    def strong_store(self, group: Group, ins: Instruction, mask: int, space: str, address: Any) -> None:
        """A volatile, relaxed or release store."""
        scope, releases = scope_of(ins, "gpu"), "release" in ins.parts
        if releases and scope == SYS and self.held is not None:
            self.held.release(group.warp.agent)
        if releases:
            group.warp.unsynced.release(mask)
        group.warp.agent.begin_strong_store()
        places = self._places(group, mask, space, address)
        if self.clocks is not None:
            self.clocks.stored(places)
        for place in places:
            self.sync.write(group.warp.agent, place, scope, releases, False, mask)

    def atomic(self, group: Group, ins: Instruction, mask: int, space: str, address: Any) -> None:
        """An atomic or reduction; relaxed unless it says more."""
        parts, agent = ins.parts, group.warp.agent
        scope = scope_of(ins, "sys" if parts[0] == "multimem" else "gpu")
        acquires, releases = (
            "acquire" in parts or "acq_rel" in parts,
            "release" in parts or "acq_rel" in parts,
        )
        if releases and scope == SYS and self.held is not None:
            self.held.release(agent)
        if releases:
            group.warp.unsynced.release(mask)
        if acquires:
            group.warp.unsynced.acquire(mask, group.warp.live)
        agent.begin_strong_store()
        places = self._places(group, mask, space, address)
        if self.clocks is not None:
            self.clocks.stored(places)
        for place in places:
            self.sync.read(agent, place, scope, acquires)
            self.sync.write(agent, place, scope, releases, True, mask)

    @staticmethod
    def _places(group: Group, mask: int, space: str, address: Any) -> list[Any]:
        if address.__class__ is int:
            addresses = [address]
        else:
            addresses = list(dict.fromkeys(int(address[lane]) for lane in lane_list(mask)))
        if space == "global":
            return addresses
        where = group.warp.grid.number, group.warp.cta.cluster.first
        return [(where, a) for a in addresses]

    def peer_used(self, group: Group, cta: Cta, line: int) -> None:
        """Another CTA's shared memory is used: it must have begun."""
        if cta is not group.warp.cta and not group.warp.cta.knows_cluster:
            self.tell(PeerUsed(group, line, cta))

    # -- exit ------------------------------------------------------------------------------------

    def cta_exit(self, cta: Cta) -> None:
        """Nothing may still read or write the memory of a CTA that ends."""
        self.tell(CtaEnded(cta))
