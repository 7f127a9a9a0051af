"""Data races on global memory, found by happens-before (as FastTrack does) rather than by what a run shows.

Every granule of an allocation remembers the last write and each stream's last read: agent, clock, PTX line,
strength.
An access that is not ordered after a conflicting one of another warp is reported with both parties,
unless both are strong (relaxed, acquire, release, atomic) at scopes that include each other. A granule has
16 bytes, or as few as the smallest access to the allocation. Reads are recorded in
symmetric memory and memory of other ranks, elsewhere from the first write of a run on, and everywhere where
launches may run beside each other or the host is a party (`keeps_reads`); of several reads of a granule by a
stream only the last is remembered. What ended with the run before
is ordered before everything here; `footprints` tells of it.

Every access also has a name, of the two under which multicast memory may be known: the multicast address, or
the rank's own. What is ordered after a conflicting access by the other name needs an alias fence between the
two, of whichever warps: else it is reported, too (PTX ISA, "Causality Order": proxy-preserved base causality
order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine.conflicts import GlobalAliased, GlobalIncoherent, GlobalUnfenced, GlobalUnordered
from cute_emulator.machine.lane_plan import Lanes, parts
from cute_emulator.machine.order import BULK, OWN, SCOPES, STRONG, Agent, includes
from cute_emulator.machine.shadow import WEAK, Footprint, History, Shadow, footprints

if TYPE_CHECKING:
    from cute_emulator.machine.conflicts import Tell
    from cute_emulator.machine.lane_plan import Places, Spread
    from cute_emulator.machine.memory import Allocation, GlobalMemory


def distinct(epochs: NDArray[np.int64]) -> list[int]:
    """The different epochs of some granules but zero, which says that there was no access; ascending.

    Nearly always there are none, or one. The epochs are of one dimension.
    """
    data = epochs.tobytes()
    first = data[:8]
    if data == first * (len(data) >> 3):
        epoch = int.from_bytes(first, "little", signed=True)
        return [epoch] if epoch else []
    changes = epochs[1:][epochs[1:] != epochs[:-1]]  # neighbours are alike
    return sorted({int(epochs[0]), *changes.tolist()} - {0})


def _numbers(cells: Any) -> NDArray[np.int64]:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _mark(line: int, strength: int, multicast: bool = False) -> int:
    return line << 4 | multicast << 3 | (strength + 1)


class RaceDetector:
    """Told of every access to global memory.

    Attributes:
        agents: Every agent of the run by id.
        keeps_reads: Whether to record all reads of this run, as a launch may run beside the one before it.
        always_keeps_reads: Of every run.
    """

    def __init__(self, tell: Tell, memory: GlobalMemory, agents: dict[int, Agent]) -> None:
        self.tell, self.memory, self.agents = tell, memory, agents
        self._shadows: dict[int, Shadow] = {}
        self.keeps_reads = self.always_keeps_reads = False
        self._lanes: tuple[Lanes, int] | None = None  # of the access that is judged, and the lowest address
        self._by_multicast = False  # whether there has been an access by a multicast address

    def clear(self) -> None:
        """Starts afresh: everything so far is ordered before what follows."""
        self._shadows.clear()
        self._by_multicast, self.keeps_reads = False, self.always_keeps_reads

    def footprints(self) -> Iterator[Footprint]:
        """What each launch of the run did by ordinary accesses to its own rank's memory."""
        return footprints(self._shadows, self.memory, self.agents)

    def read(
        self,
        agent: Agent,
        line: int,
        strength: int,
        allocation: Allocation,
        low: int,
        spread: Spread,
        rmw: bool = False,
        multicast: bool = False,
        incoherent: bool = False,
        mask: int = 1,
    ) -> list[int]:
        """A generic read; `rmw`: that of a read-modify-write.

        Args:
            agent: Whose.
            line: Of the PTX.
            strength: Scope of a strong access, or `WEAK`.
            allocation: Which is read.
            low: The lowest address.
            spread: How the lanes lie from there.
            rmw: See above.
            multicast: Whether by a multicast address.
            incoherent: Whether by `ld.global.nc`.
            mask: The lanes.

        Returns:
            Epochs of the writes it finds that nothing orders before it.
        """
        shadow = self._shadow_for_read(agent, allocation)
        if shadow is None:
            return []
        self._lanes = Lanes(mask, spread.offsets, spread.size), low
        cells = self._cells_of(shadow, allocation, low, spread)
        writes = shadow.writes
        unknown = self._check(agent, line, strength, allocation, shadow, writes, cells, "read", "written")
        if incoherent:
            self._check_incoherent(agent, line, allocation, writes, cells)
        self._by_multicast |= multicast
        if self._by_multicast:
            self._check_alias(agent, line, allocation, writes, cells, multicast, "read", "written")
        epochs, marks = shadow.reads_of(agent.warp.grid.launch.stream)
        epochs[cells] = agent.strong_epoch if rmw else agent.epoch
        marks[cells] = _mark(line, strength, multicast)
        agent.touched = True
        return unknown

    def write(
        self,
        agent: Agent,
        line: int,
        strength: int,
        allocation: Allocation,
        low: int,
        spread: Spread,
        repeats: Callable[[], bool] | None = None,
        multicast: bool = False,
        mask: int = 1,
    ) -> None:
        """A generic write, arguments as for `read`; `repeats` tells whether it changes nothing."""
        epoch = agent.epoch if strength == WEAK else agent.strong_epoch
        self._lanes = Lanes(mask, spread.offsets, spread.size), low
        shadow = self._shadow_for_write(allocation)
        cells = self._cells_of(shadow, allocation, low, spread)
        self._write(agent, epoch, line, strength, allocation, shadow, cells, repeats, multicast)
        agent.touched = True

    def bulk_write(
        self,
        agent: Agent,
        line: int,
        strength: int,
        addresses: np.ndarray,
        chunk: int,
        bounds: tuple[int, int],
        multicast: bool = False,
    ) -> None:
        """The destination write of the bulk store that an agent issued last, in chunks."""
        epoch, self._lanes = agent.id + BULK << 32 | agent.issued, None
        for allocation, where in self.memory.spans(addresses, chunk, bounds):
            shadow = self._shadow_for_write(allocation)
            cells = self._cells(shadow, allocation, addresses[where], chunk)
            self._check_proxy(agent, line, allocation, shadow, cells, "write")
            self._write(agent, epoch, line, strength, allocation, shadow, cells, multicast=multicast)

    def async_read(
        self,
        agent: Agent,
        line: int,
        places: Callable[[], NDArray[np.int64]],
        chunk: int,
        bounds: tuple[int, int],
    ) -> None:
        """A TMA or bulk copy reads global memory. Generic writes it reads must have passed a proxy fence.

        Arguments as for `GlobalMemory.gather`; `places` gives the addresses, which seldom matter.
        """
        whole = self.memory.lookup(bounds[0])
        if whole is not None and bounds[1] + chunk <= whole.end and not self._shadow_for_read(agent, whole):
            return
        addresses, self._lanes = places(), None
        for allocation, where in self.memory.spans(addresses, chunk, bounds) if len(addresses) else ():
            shadow = self._shadow_for_read(agent, allocation)
            if shadow is None:
                continue
            cells = self._cells(shadow, allocation, addresses[where], chunk)
            self._check(agent, line, WEAK, allocation, shadow, shadow.writes, cells, "async read", "written")
            self._check_proxy(agent, line, allocation, shadow, cells, "read")
            if self._by_multicast:
                self._check_alias(
                    agent, line, allocation, shadow.writes, cells, False, "async read", "written"
                )
            epochs, marks = shadow.reads_of(agent.warp.grid.launch.stream)
            epochs[cells] = agent.epoch
            marks[cells] = _mark(line, WEAK)
            agent.touched = True

    def _shadow_for_read(self, agent: Agent, allocation: Allocation) -> Shadow | None:
        """None where a read need not be recorded: nobody wrote, and no other rank is known to have access."""
        shadow = self._shadows.get(allocation.base)
        if shadow is None and (
            self.keeps_reads
            or allocation.kind == "symmetric"
            or allocation.rank != agent.warp.grid.launch.rank
        ):
            shadow = self._shadows[allocation.base] = Shadow(allocation.nbytes, 16)
        return shadow

    def _shadow_for_write(self, allocation: Allocation) -> Shadow:
        shadow = self._shadows.get(allocation.base)
        if shadow is None:
            shadow = self._shadows[allocation.base] = Shadow(allocation.nbytes, 16)
        return shadow

    # -- inside ----------------------------------------------------------------------------------

    def _write(
        self,
        agent: Agent,
        epoch: int,
        line: int,
        strength: int,
        allocation: Allocation,
        shadow: Shadow,
        cells: Places,
        repeats: Callable[[], bool] | None = None,
        multicast: bool = False,
    ) -> None:
        self._by_multicast |= multicast
        histories = [(shadow.writes, "written"), *((reads, "read") for reads in shadow.reads.values())]
        for history, verb in histories:
            self._check(agent, line, strength, allocation, shadow, history, cells, "write", verb, repeats)
            if self._by_multicast:
                self._check_alias(agent, line, allocation, history, cells, multicast, "write", verb)
        epochs, marks = shadow.writes
        epochs[cells] = epoch
        marks[cells] = _mark(line, strength, multicast)

    @staticmethod
    def _cells_of(shadow: Shadow, allocation: Allocation, low: int, spread: Spread) -> Places:
        """Granules that lanes access, refining the shadow where the access is smaller than one."""
        start = low - allocation.base
        grain = start | spread.grain
        if grain & (shadow.granule - 1):
            shadow.refine(grain & -grain)
        return spread.units(start, shadow.shift)

    @staticmethod
    def _cells(shadow: Shadow, allocation: Allocation, addresses: np.ndarray, size: int) -> Places:
        """The same of the chunks of an asynchronous copy, at multiples of their size."""
        offsets = (addresses - addresses.dtype.type(allocation.base)).view(np.int64)
        low = int(offsets[0]) | size
        if low & (shadow.granule - 1):
            shadow.refine(low & -low)
        cells = offsets >> shadow.shift
        if size > shadow.granule:
            cells = parts(cells, size // shadow.granule)
        return cells

    def _check(
        self,
        agent: Agent,
        line: int,
        strength: int,
        allocation: Allocation,
        shadow: Shadow,
        history: History,
        cells: Places,
        verb: str,
        other_verb: str,
        repeats: Callable[[], bool] | None = None,
    ) -> list[int]:
        epochs, unknown = history[0][cells], []
        for epoch in distinct(epochs):
            owner = self.agents.get((epoch >> 32) & OWN)
            if owner is None or owner.warp is agent.warp or agent.knows(epoch, owner):
                continue
            if (
                repeats is not None
                and other_verb == "written"
                and owner.warp.cta.cluster is agent.warp.cta.cluster
                and repeats()
            ):
                continue  # warps of a cluster that all store one result
            places = allocation.base + _numbers(cells)[epochs == epoch] * shadow.granule
            if strength == WEAK and epoch >> 32 & STRONG and agent.has_observed(epoch, places.tolist()):
                continue
            unknown.append(epoch)
            at = int(np.flatnonzero(epochs == epoch)[0])
            mark = int(history[1][cells][at])
            theirs = (mark & 7) - 1
            scopes = None
            if strength != WEAK and theirs != WEAK:
                if includes(min(strength, theirs), owner.warp, agent.warp):
                    continue
                scopes = SCOPES[strength], SCOPES[theirs]
            index = cells.start + at if isinstance(cells, slice) else int(cells[at])
            address, lanes = allocation.base + index * shadow.granule, ""
            if self._lanes is not None:
                offset = address - self._lanes[1]
                lanes = self._lanes[0].at(offset, offset + shadow.granule)
            pair = agent, line, owner, mark >> 4, verb, other_verb, self.memory.spot(address)
            self.tell(GlobalUnordered(*pair, scopes, bool(epoch >> 32 & BULK), lanes))
        return unknown

    def _check_incoherent(
        self, agent: Agent, line: int, allocation: Allocation, writes: History, cells: Places
    ) -> None:
        """`ld.global.nc` reads what its own kernel wrote, however ordered.

        Its cache is not kept coherent: the memory must be read-only while the kernel runs (PTX ISA 9.7.9.9,
        `ld.global.nc`; CUDA programming guide, read-only data cache load function).
        """
        found = writes[0][cells]
        for epoch in distinct(found):
            owner = self.agents.get((epoch >> 32) & OWN)
            if owner is None or owner.warp.grid is not agent.warp.grid:
                continue
            theirs = int(writes[1][cells][int(np.flatnonzero(found == epoch)[0])]) >> 4
            self.tell(GlobalIncoherent(agent, line, owner, theirs, "read", "written", str(allocation)))

    def _check_alias(
        self,
        agent: Agent,
        line: int,
        allocation: Allocation,
        history: History,
        cells: Places,
        multicast: bool,
        verb: str,
        other_verb: str,
    ) -> None:
        """What is ordered after an access by the other name: has an alias fence passed that on?"""
        marks = history[1][cells]
        others = (marks >> 3 & 1) != multicast
        epochs = history[0][cells][others]
        for epoch in distinct(epochs) if len(epochs) else ():
            owner = self.agents.get((epoch >> 32) & OWN)
            if owner is None or not agent.knows(epoch, owner) or agent.has_aliased(epoch, owner):
                continue
            first = int(np.flatnonzero(epochs == epoch)[0])
            mark = int(marks[others][first])
            at = (
                allocation.base + int(_numbers(cells)[others][first]) * self._shadows[allocation.base].granule
            )
            pair = agent, line, owner, mark >> 4, verb, other_verb, self.memory.spot(at)
            self.tell(GlobalAliased(*pair, multicast))

    def _check_proxy(
        self, agent: Agent, line: int, allocation: Allocation, shadow: Shadow, cells: Places, verb: str
    ) -> None:
        """Generic writes must have passed a fence before an async unit reads or overwrites them (8.7)."""
        epochs = shadow.writes[0][cells]
        for epoch in distinct(epochs):
            owner = self.agents.get((epoch >> 32) & OWN)
            if (
                owner is None
                or epoch >> 32 & BULK
                or agent.has_proxied(epoch, owner, in_global=True)
                or not agent.knows(epoch, owner)
            ):
                continue
            at = int(np.flatnonzero(epochs == epoch)[0])
            mark = int(shadow.writes[1][cells][at])
            where = allocation.base + int(_numbers(cells)[at]) * shadow.granule
            pair = agent, line, owner, mark >> 4, verb, "written", self.memory.spot(where)
            self.tell(GlobalUnfenced(*pair))
