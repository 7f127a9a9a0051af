"""Data races on global memory, detected by happens-before (as in FastTrack) instead of by observed values.

Every granule of an allocation records the last write and each stream's last read: agent, clock, PTX line,
strength. A granule has 16 bytes, or fewer if an access to the allocation is smaller. An access that is not
ordered after a conflicting one of another warp is reported with both parties. Pairs of strong accesses
(relaxed, acquire, release, atomic) at scopes that include each other are not reported.

Reads are recorded in symmetric memory and memory of other ranks, and elsewhere from the first write of a run
on. They are recorded everywhere if launches may overlap or the host is recorded (`keeps_reads`). Of several
reads of a granule by a stream only the last is recorded. Accesses of earlier runs are ordered before
everything here; `footprints` returns them.

Every access also records by which of two addresses multicast memory was accessed: the multicast address, or
the rank's address. An access that is ordered after a conflicting one by the other address needs an alias
fence between the two, by any warps; otherwise it is reported, too (PTX ISA, "Causality Order":
proxy-preserved base causality order).
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
    from cute_emulator.machine.conflicts import EventSink
    from cute_emulator.machine.lane_plan import Places, Spread
    from cute_emulator.machine.memory import Allocation, GlobalMemory


def distinct(epochs: NDArray[np.int64]) -> list[int]:
    """Returns the different epochs of some granules, ascending, without zero, which means no access.

    Nearly always there are none, or one. The epochs have one dimension.
    """
    data = epochs.tobytes()
    first = data[:8]
    if data == first * (len(data) >> 3):
        epoch = int.from_bytes(first, "little", signed=True)
        return [epoch] if epoch else []
    changes = epochs[1:][epochs[1:] != epochs[:-1]]  # most neighbours are equal
    return sorted({int(epochs[0]), *changes.tolist()} - {0})


def _numbers(cells: Any) -> NDArray[np.int64]:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _mark(line: int, strength: int, multicast: bool = False) -> int:
    return line << 4 | multicast << 3 | (strength + 1)


class RaceDetector:
    """Race detector for global memory, called for every access.

    Attributes:
        agents: Every agent of the run by id.
        keeps_reads: Whether all reads of this run are recorded, because a launch may overlap the one before
            it.
        always_keeps_reads: Whether all reads of every run are recorded.
    """

    def __init__(self, emit: EventSink, memory: GlobalMemory, agents: dict[int, Agent]) -> None:
        self.emit, self.memory, self.agents = emit, memory, agents
        self._shadows: dict[int, Shadow] = {}
        self.keeps_reads = self.always_keeps_reads = False
        self._lanes: tuple[Lanes, int] | None = None  # lanes and lowest address of the access being judged
        self._by_multicast = False  # whether there has been an access by a multicast address

    def clear(self) -> None:
        """Drops all records: everything so far is ordered before what follows."""
        self._shadows.clear()
        self._by_multicast, self.keeps_reads = False, self.always_keeps_reads

    def footprints(self) -> Iterator[Footprint]:
        """Returns the ordinary accesses of each launch of the run to its rank's memory."""
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
        """Records and checks a generic read.

        Args:
            agent: Agent that reads.
            line: PTX line.
            strength: Scope of a strong access, or `WEAK`.
            allocation: Allocation that is read.
            low: Lowest address.
            spread: Distances of the lanes from the lowest address.
            rmw: Whether the read is that of a read-modify-write.
            multicast: Whether it is by a multicast address.
            incoherent: Whether it is by `ld.global.nc`.
            mask: Lanes.

        Returns:
            Epochs of the writes in the granules that are not ordered before the read.
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
        """Records and checks a generic write; arguments as for `read`.

        `repeats` returns whether the write changes nothing.
        """
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
        """Records and checks the destination write of an agent's last bulk store, in chunks."""
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
        """Records and checks a read of global memory by a TMA or bulk copy.

        Generic writes must have been fenced.

        Arguments as for `GlobalMemory.gather`; `places` returns the addresses, which are seldom needed.
        """
        container = self.memory.lookup(bounds[0])
        if (
            container is not None
            and bounds[1] + chunk <= container.end
            and not self._shadow_for_read(agent, container)
        ):
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
        """Returns the shadow of an allocation, or None if a read of it need not be recorded.

        This is so if there is no write yet, and no access of another rank is known.
        """
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
        """Returns the granules that lanes access.

        Refines the shadow if the access is smaller than a granule.
        """
        start = low - allocation.base
        grain = start | spread.grain
        if grain & (shadow.granule - 1):
            shadow.refine(grain & -grain)
        return spread.units(start, shadow.shift)

    @staticmethod
    def _cells(shadow: Shadow, allocation: Allocation, addresses: np.ndarray, size: int) -> Places:
        """Returns the granules of an asynchronous copy's chunks, at multiples of their size."""
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
                continue  # all warps of a cluster store the same result
            places = allocation.base + _numbers(cells)[epochs == epoch] * shadow.granule
            if strength == WEAK and epoch >> 32 & STRONG and agent.has_observed(epoch, places.tolist()):
                continue
            unknown.append(epoch)
            marks = np.where(epochs == epoch, history[1][cells], 0)
            for mark in distinct(marks):
                theirs, scopes = (mark & 7) - 1, None
                if strength != WEAK and theirs != WEAK:
                    if includes(min(strength, theirs), owner.warp, agent.warp):
                        continue
                    scopes = SCOPES[strength], SCOPES[theirs]
                at = int(np.flatnonzero(marks == mark)[0])
                index = cells.start + at if isinstance(cells, slice) else int(cells[at])
                address, lanes = allocation.base + index * shadow.granule, ""
                if self._lanes is not None:
                    offset = address - self._lanes[1]
                    lanes = self._lanes[0].at(offset, offset + shadow.granule)
                pair = agent, line, owner, mark >> 4, verb, other_verb, self.memory.spot(address)
                self.emit(GlobalUnordered(*pair, scopes, bool(epoch >> 32 & BULK), lanes))
        return unknown

    def _check_incoherent(
        self, agent: Agent, line: int, allocation: Allocation, writes: History, cells: Places
    ) -> None:
        """Reports an `ld.global.nc` of memory that its kernel wrote, in any order.

        Its cache is not kept coherent: the memory must be read-only while the kernel runs (PTX ISA 9.7.9.9,
        `ld.global.nc`; CUDA programming guide, read-only data cache load function).
        """
        epochs = writes[0][cells]
        for epoch in distinct(epochs):
            owner = self.agents.get((epoch >> 32) & OWN)
            if owner is None or owner.warp.grid is not agent.warp.grid:
                continue
            theirs = int(writes[1][cells][int(np.flatnonzero(epochs == epoch)[0])]) >> 4
            self.emit(GlobalIncoherent(agent, line, owner, theirs, "read", "written", str(allocation)))

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
        """Checks an access that is ordered after one by the memory's other address.

        An alias fence must have passed the earlier access on.
        """
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
            self.emit(GlobalAliased(*pair, multicast))

    def _check_proxy(
        self, agent: Agent, line: int, allocation: Allocation, shadow: Shadow, cells: Places, verb: str
    ) -> None:
        """Checks that generic writes were fenced before an async unit reads or overwrites them (8.7)."""
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
            self.emit(GlobalUnfenced(*pair))
