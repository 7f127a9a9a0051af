"""Checks during a kernel's execution, and the order of events that the checks use."""

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
from cute_emulator.machine.lane_order import check_async, joint_unreleased
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
    """Hooks that instruction handlers call; each records the order of events or adds to the report.

    Attributes:
        races: Race detector of global memory, or None if it is disabled.
        shared: Race detector of shared and tensor memory.
        sync: Releases visible in memory.
        held: Stores to other ranks that are held back until a release.
        clocks: Model of time, if a trace is recorded.
        listeners: Rules by the class of event that they handle.
    """

    def __init__(self, report: Report, enabled: frozenset[str], memory: GlobalMemory) -> None:
        self.report, self.enabled = report, enabled
        self.sync = SyncVariables()
        self.held: HeldStores | None = None
        self.clocks: Clocks | None = None
        self.agents: dict[int, Agent] = {}
        self.races = RaceDetector(self.emit, memory, self.agents) if "race" in enabled else None
        self.shared = SharedRaces(self.emit, "tmem-fence" in enabled) if "shared" in enabled else None
        self._histories: dict[tuple[int, int], History] = {}
        self.listeners: Mapping[type, Sequence[Callable[[Checks, Any], None]]] = {}
        self._notes: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()

    def emit(self, event: object) -> None:
        """Passes an event to the rules of its class (`machine.events`)."""
        for look in self.listeners.get(event.__class__, ()):
            look(self, event)

    def notes(self, of: object) -> dict[str, Any]:
        """Returns the records of rules about a CTA or a cluster, by kind."""
        records = self._notes.get(of)
        if records is None:
            records = self._notes[of] = {}
        return records

    # -- agents ----------------------------------------------------------------------------------------

    def new_agent(self, warp: Warp) -> Agent:
        """Returns the agent of a new warp."""
        number = 4 * len(self.agents) + 4  # further agents: `order.BULK`, `order.STRONG`
        agent = self.agents[number] = Agent(number, warp, warp.grid.history)
        agent.party = warp.cta.cluster.enrol(Party(str(warp), number))
        return agent

    def history(self, rank: int, stream: int) -> History:
        """Returns the history of a launch that begins in a stream now."""
        return self._histories.get((rank, stream), History())

    def stream_waited(self, rank: int, stream: int, other: History) -> None:
        """Records that a stream has waited for an event: the history of the event is added to its own."""
        mine = self.history(rank, stream)
        vector = {**mine.vector}
        merge(vector, other.vector)
        grids = mine.grids | other.grids
        # Launches in `grids` are ordered with all their accesses: their warps' clocks order nothing more.
        vector = {a: c for a, c in vector.items() if self.agents[a & OWN].warp.grid.number not in grids}
        self._histories[rank, stream] = History(grids, vector)

    def cta_ended(self, cta: Cta) -> None:
        """Records the order that a CTA has observed to other launches."""
        grid = cta.grid
        for warp in cta.warps:
            vector = warp.agent.vector
            if warp.agent.grids is not grid.known_grids:
                grid.known_grids |= warp.agent.grids
            others = {a: c for a, c in vector.items() if self.agents[a & OWN].warp.grid is not grid}
            merge(grid.learnt, others)

    def grid_ended(self, grid: Grid) -> None:
        """Orders the next launch in the stream after all accesses of a grid, bulk stores included."""
        before = grid.history
        vector = {**before.vector}
        merge(vector, grid.learnt)
        grid.final = History(grid.known_grids | {grid.number}, vector)
        self.stream_waited(grid.launch.rank, grid.launch.stream, grid.final)

    def prerequisites_done(self, group: Group) -> None:
        """Executes `griddepcontrol.wait`.

        All accesses of the prerequisite grid are visible, to every proxy.
        """
        agent, before = group.warp.agent, group.warp.grid.prerequisite
        if before is not None:
            agent.take_over(before.final)
            if self.clocks is not None:
                self.clocks.join(self.clocks.end(before), "the launch before")

    def clear(self) -> None:
        """Ends a run: all of it is ordered before what follows."""
        self.agents.clear()
        self._histories.clear()
        self.sync.clear()
        if self.races is not None:
            self.races.clear()

    # -- generic and async proxy -----------------------------------------------------------------------

    def proxy_fence(self, group: Group, spaces: list[str]) -> None:
        """Executes `fence.proxy.async`.

        Generic writes ordered before it become visible to the async proxy.
        """
        shared = not spaces or any(s.startswith("shared") for s in spaces)
        group.warp.agent.fence_proxy(shared, not spaces or "global" in spaces)

    def smem_read(
        self, group: Group, mask: int, cta: Cta, granules: slice | NDArray[np.int64], what: str, line: int
    ) -> None:
        """Checks lanes that request an async unit to read 16-byte granules.

        Each granule must be fenced after its last write. Writes by other lanes must be ordered before the
        request.
        """
        if self.shared is not None:
            check_async(self.emit, group.warp, cta, mask, granules, 16, what, line)
        if "proxy" in self.enabled:
            self._fenced(group, cta, granules, what, True, line)

    def smem_overwrite(self, group: Group, cta: Cta, granules: slice | NDArray[np.int64], line: int) -> None:
        """Checks a request to write 16-byte granules by an async copy: generic writes there must be fenced.

        The ISA (8.7, "proxy-preserved base causality order") requires it of generic reads, too; no kernel
        fences these.
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
                self.emit(SharedUnfenced(group.warp, line, what, is_read, cta, at, owner.warp, is_copy))
                return

    def smem_written(self, cta: Cta, granules: slice | NDArray[np.int64]) -> None:
        """Records that an async unit overwrote shared memory: generic writes before it no longer matter."""
        cta.dirty[granules] = 0

    # -- initialisation of mbarriers -------------------------------------------------------------

    def mbarrier_init(self, group: Group, barrier: MBarrier, line: int) -> None:
        """Records `mbarrier.init`: a fence of this warp must follow."""
        warp, agent = group.warp, group.warp.agent
        warp.unfenced.append(barrier)
        barrier.party = warp.cta.cluster.enrol(Party("an asynchronous copy", None, "copy", barrier.name()))
        barrier.initialised = agent, agent.vector[agent.id], line
        barrier.users.add(agent.id)
        agent.touched = True

    def mbarrier_fence(self, group: Group) -> None:
        """Executes `fence.mbarrier_init`, or a fence at least as strong."""
        warp = group.warp
        for barrier in warp.unfenced:
            barrier.fenced = True
        warp.fenced += warp.unfenced
        warp.unfenced.clear()

    def mbarrier_use(self, barrier: MBarrier, what: str, line: int) -> None:
        """Checks an operation of another CTA or of the async proxy on a barrier."""
        if not barrier.fenced:
            self.emit(MbarrierUnfenced(barrier, what, line))

    def mbarrier_known(self, group: Group, barrier: MBarrier, line: int) -> None:
        """Checks an operation of a warp on a barrier: the initialisation must be ordered before it."""
        agent = group.warp.agent
        if agent.id in barrier.users or barrier.initialised is None:
            return
        barrier.users.add(agent.id)
        owner, clock, initialised = barrier.initialised
        if agent.vector.get(owner.id, 0) < clock and agent.nearby.get(owner.party, 0) < clock:
            self.emit(MbarrierUnordered(group, line, barrier, owner, initialised))

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
        """Checks a product or a dealloc of cells: no warp may have an access of `kinds` to them in flight."""
        conflict = cta.tmem_order.conflict(kinds, first, columns, halves) if "tmem" in self.enabled else None
        if conflict is not None:
            self.emit(TensorUnwaited(cta, line, what, (first, first + columns - 1), *conflict))

    # -- synchronisation -------------------------------------------------------------------

    def fence(self, group: Group, ins: Instruction) -> None:
        """Executes `fence.{sc,acq_rel}` and `membar`."""
        if ins.parts[0] == "membar" or {"sc", "acq_rel", "acquire", "release"} & set(ins.parts):
            scope = scope_of(ins, "cta" if ins.parts[0] == "membar" else "sys")
            group.warp.agent.fence(scope)
            if scope == SYS and self.held is not None:
                self.held.release(group.warp.agent)

    def arrive(self, group: Group, mask: int, barrier: Waiters, ins: Instruction) -> None:
        """Records an arrival of lanes at a barrier.

        It is a release, unless it is `.relaxed` and no fence precedes it.
        """
        agent, scope = group.warp.agent, scope_of(ins, barrier.scope)
        if group.warp.unsynced.stores:
            group.warp.unsynced.release(mask)
        if "relaxed" not in ins.parts:
            snapshot = agent.release(mask)
        elif agent.fenced is not None:
            snapshot, scope = agent.released_by(agent.fenced[0], mask), min(scope, agent.fenced[1])
        else:
            snapshot = None
        if snapshot is not None:
            if snapshot.unreleased and agent.id in barrier.arrivals:  # other lanes have arrived before
                snapshot = snapshot.without(joint_unreleased([barrier.arrivals[agent.id][0], snapshot]))
            barrier.arrivals[agent.id] = snapshot, scope
        if barrier.joint:  # a fence of mbarrier initialisations needs no more than this
            barrier.inits += group.warp.fenced
            group.warp.fenced.clear()

    def leave(self, group: Group, mask: int, barrier: Waiters, ins: Instruction) -> None:
        """Records that lanes leave a barrier: an acquire unless it is `.relaxed`."""
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
        """Checks a warp that leaves a barrier of a CTA without a count: all warps must have arrived."""
        if not barrier.count and barrier.present < 32 * len(group.warp.cta.warps):
            self.emit(BarrierIncomplete(group, ins.line, barrier))

    def completed(self, group: Group, barrier: MBarrier) -> None:
        """Records a successful wait for a phase of an mbarrier.

        The operations that completed on the mbarrier are ordered before the warp's next access.
        """
        agent = group.warp.agent
        for copies, clock in barrier.copied.items():
            agent.join(copies, clock)
        if self.shared is not None and agent.nearby.get(barrier.party, 0) < barrier.completed:
            agent.acquire_nearby(barrier.passed, {barrier.party: barrier.completed})

    def strong_load(self, group: Group, ins: Instruction, mask: int, space: str, address: Any) -> None:
        """Records a volatile, relaxed or acquire load."""
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
        """Records a volatile, relaxed or release store."""
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
        """Records an atomic or reduction; relaxed by default."""
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
        """Checks an access to another CTA's shared memory: that CTA must have begun."""
        if cta is not group.warp.cta and not group.warp.cta.knows_cluster:
            self.emit(PeerUsed(group, line, cta))

    # -- exit ------------------------------------------------------------------------------------

    def cta_exit(self, cta: Cta) -> None:
        """Checks a CTA that ends: no operation in flight may read or write its memory."""
        self.emit(CtaEnded(cta))
