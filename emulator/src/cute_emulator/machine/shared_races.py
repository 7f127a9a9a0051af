"""Data races on shared and tensor memory, detected by happens-before, like those on global memory (`races`).

A *party* accesses a cluster's memories. These are the parties:

- a warp, whose clock is that of its agent
- an mbarrier, for the copies that complete on it; its clock counts its phases
- the bulk stores of a warp (which read their source late), the wgmmas of a warpgroup, and the tensor-core
  pipe of a
  warp; the clock of such a unit counts the operations issued to it

Every cell records its last write and, in two slots, its last reads: party, the party's clock, PTX line. A
warp is ordered after

- a copy, when it has observed the completion of the mbarrier's phase;
- a bulk store's read, after `wait_group`;
- a wgmma, after its `wait_group`;
- a product, after a wait on the mbarrier at which a later `tcgen05.commit` arrived.

It passes that order on with each release to a warp of its cluster. Cells of shared memory have 16 bytes.
Lanes that access less refine them; single words are recorded separately. Synchronisation inside a cluster
counts whatever its scope, because kernels release stages of a neighbour's shared memory at CTA scope. Lanes
of a warp are not distinguished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.machine import tensor_fences
from cute_emulator.machine.cells import (
    CLOCK,
    CLOCK_MASK,
    LINE_MASK,
    PACK,
    PARTY,
    READS,
    WRITE,
    SharedCells,
    Where,
    entry_of,
)
from cute_emulator.machine.conflicts import SharedUnordered
from cute_emulator.machine.lane_plan import Lanes
from cute_emulator.machine.order import STRONG
from cute_emulator.machine.races import distinct
from cute_emulator.numbers.lanes import FULL

if TYPE_CHECKING:
    from cute_emulator.machine.conflicts import EventSink
    from cute_emulator.machine.lane_plan import LanePlan
    from cute_emulator.machine.order import Agent, Snapshot, Vector
    from cute_emulator.machine.warp import Cta


@dataclass(frozen=True)
class Party:
    """Party that accesses a cluster's memories.

    Attributes:
        what: Name in messages.
        agent: Id of the agent of a warp; None for an asynchronous unit.
        unit: Kind of the asynchronous unit, which determines how a warp observes its accesses; empty for a
            warp.
        barrier: Name of the mbarrier that counts the unit's accesses, if one does.
    """

    what: str
    agent: int | None = None
    unit: str = ""
    barrier: str = ""


class Unit:
    """Asynchronous unit of a warp or warpgroup.

    Attributes:
        number: Number as a party.
        issued: Clock of the operation issued last.
        recorded: Accesses at that clock that are already recorded.
    """

    __slots__ = ("issued", "number", "recorded")

    def __init__(self, number: int) -> None:
        self.number, self.issued = number, 1
        self.recorded: set[object] = set()

    def advance(self) -> None:
        """Advances the clock: operations that follow are later than those issued so far."""
        self.issued += 1
        self.recorded.clear()

    def first_time(self, what: object) -> bool:
        """Returns whether an access has not been recorded at this clock, and records it."""
        if what in self.recorded:
            return False
        self.recorded.add(what)
        return True


class SharedRaces:
    """Race detector for shared and tensor memory, called for every access.

    Methods `lanes` and `word` record ordinary accesses of a warp, `async_*` those of a unit.

    Attributes:
        storing: Memory, places in it and data of the store that is recorded next.
    """

    def __init__(self, emit: EventSink, strict: bool = False) -> None:
        self.emit, self.strict = emit, strict
        self._lanes: Lanes | None = None
        self.storing: tuple[np.ndarray, Any, np.ndarray] | None = None

    # -- ordinary accesses -----------------------------------------------------------------------

    def lanes(
        self, agent: Agent, cta: Cta, line: int, strong: bool, plan: LanePlan, size: int, store: bool,
        publishes: bool = False, mask: int = FULL,
    ) -> None:  # fmt: skip
        """Records accesses of `size` bytes by each lane of a warp.

        `publishes` is set for a strong store or a read-modify-write.
        """
        cells, self._lanes = cta.cells, Lanes(mask, plan.offsets, size)
        where = cells.of_lanes(plan.offsets, plan.lowest, plan.highest, size)
        self._access(agent, cta, where, line, strong, store, publishes)
        if cells.words and plan.lowest < cells.high and cells.low < plan.highest + size:
            low, high, first = plan.lowest, plan.highest + size, plan.offsets
            cells.divide_words(size)
            words = [a for a in cells.words if low <= a < high]
            hit = [a for a in words if np.logical_or.reduce((first <= a) & (a < first + size))]
            self._words(agent, cta, hit, line, strong, store)
        self.storing = None

    def stores(self, agent: Agent, cta: Cta, lines: list[int], plan: LanePlan, size: int) -> bool:
        """Records consecutive ordinary stores of a warp's lanes; `plan` is that of all of them.

        Returns:
            False if there may be something to report: then nothing is recorded.
        """
        cells = cta.cells
        if cells.words and plan.lowest < cells.high and cells.low < plan.highest + size:
            return False
        where = cells.of_lanes(plan.offsets, plan.lowest, plan.highest, size)
        slots = _entries(cells.raw[where], "write")
        if not all(self.knows(agent, entry) for entries in slots for entry in entries):
            return False
        clock, count = agent.vector[agent.id], len(where) // len(lines)
        mine = [PACK.pack(entry_of(agent.party, clock, line, False), 0, 0) * count for line in lines]
        cells.raw[where] = np.frombuffer(b"".join(mine), cells.raw.dtype)
        agent.touched = True
        return True

    @staticmethod
    def _mine(agent: Agent, line: int, strong: bool, publishes: bool) -> int:
        if not publishes:
            return entry_of(agent.party, agent.vector[agent.id], line, strong)
        if not agent.strong_party:
            agent.strong_party = agent.warp.cta.cluster.enrol(Party(str(agent.warp), agent.id + STRONG))
        return entry_of(agent.strong_party, agent.strong, line, strong)

    def _access(
        self, agent: Agent, cta: Cta, where: Where, line: int, strong: bool, store: bool, publishes: bool
    ) -> None:
        cells = cta.cells
        mine = self._mine(agent, line, strong, publishes)
        if store:
            self._check(agent, cta, cells.raw[where], "write", line, strong, where)
            cells.raw[where] = PACK.pack(mine, 0, 0)
        else:
            self._check(agent, cta, cells.raw[where], "read", line, strong, where)
            cells.reads[agent.warp.index & 1][where] = mine
        agent.touched = True

    def word(
        self,
        agent: Agent,
        cta: Cta,
        line: int,
        strong: bool,
        offset: int,
        size: int,
        store: bool,
        publishes: bool = False,
        mask: int = 1,
    ) -> None:
        """Records an access of `size` bytes by one lane, or by all at one address."""
        cells, self._lanes = cta.cells, Lanes(mask, offset, size)
        if cells.regions:
            cells.dissolve(offset, offset + size)
        if size >= 16:
            first, end = offset >> cells.shift, (offset + size) >> cells.shift
            self._access(agent, cta, slice(first, end), line, strong, store, publishes)
            if offset < cells.high and cells.low < offset + size:
                hit = [a for a in cells.words if offset <= a < offset + size]
                self._words(agent, cta, hit, line, strong, store)
            return
        at = slice(offset >> cells.shift, (offset + size - 1 >> cells.shift) + 1)
        self._check(agent, cta, cells.raw[at], "write" if store else "read", line, strong, at)
        cells.divide_words(size)
        touched = range(offset, offset + size, cells.unit)
        for place in touched:
            cells.words.setdefault(place, [0] * (1 + READS))
        cells.low, cells.high = min(cells.low, offset), max(cells.high, offset + size)
        mine = self._mine(agent, line, strong, publishes)
        self._words(agent, cta, touched, line, strong, store)
        for place in touched:
            if store:
                cells.words[place] = [mine] + [0] * READS
            else:
                cells.words[place][1 + (agent.warp.index & 1)] = mine
        agent.touched, self.storing = True, None

    def _words(
        self, agent: Agent, cta: Cta, places: Any, line: int, strong: bool, store: bool,
        only_async: bool = False,
    ) -> None:  # fmt: skip
        for place in places:
            entries = cta.cells.words[place]
            for slot, entry in enumerate(entries if store else entries[:1]):
                if entry and not self.knows(agent, entry):
                    verb = "write" if store else "read"
                    self._judge(agent, cta, entry, verb, slot == WRITE, line, strong, place, only_async)

    # -- asynchronous accesses -------------------------------------------------------------------

    def async_read(
        self, agent: Agent, cta: Cta, chunks: Where, line: int, party: int, clock: int, slot: int = 0
    ) -> None:
        """Records a unit's read of chunks of 16 bytes; ordinary writes are judged by the proxy check."""
        cells, mine, self._lanes = cta.cells, entry_of(party, clock, line, False), None
        regions = cells.exactly(chunks)
        if regions is not None:
            for at, region in regions:
                if region[1] and not self.knows(agent, region[1]):
                    self._judge(agent, cta, region[1], "read", True, line, False, 16 * at, only_async=True)
                region[2 + slot] = mine
            return
        where = self._as_cells(cells, chunks)
        self._check(agent, cta, cells.raw[where], "read", line, False, where, only_async=True)
        cells.reads[slot][where] = mine

    def async_write(self, agent: Agent, cta: Cta, chunks: Where, line: int, party: int, clock: int) -> None:
        """Records a unit's write to chunks of 16 bytes, which completes at `clock` of `party`."""
        cells, mine, self._lanes = cta.cells, entry_of(party, clock, line, False), None
        regions = cells.exactly(chunks)
        if regions is not None:
            for at, region in regions:
                for slot, entry in enumerate(region[1:]):
                    if entry and entry != mine and not self.knows(agent, entry):
                        self._judge(agent, cta, entry, "write", slot == WRITE, line, False, 16 * at)
                region[1:] = [mine, 0, 0]
        else:
            where = self._as_cells(cells, chunks)
            self._check(agent, cta, cells.raw[where], "write", line, False, where, mine=mine)
            if isinstance(chunks, slice):
                cells.keep_region(chunks, mine)
            else:
                cells.raw[where] = PACK.pack(mine, 0, 0)
        if cells.words:
            self._drop_words(agent, cta, chunks, line)

    def copied_lanes(
        self, agent: Agent, cta: Cta, offsets: NDArray[np.int64], low: int, high: int, size: int, line: int,
        unit: Unit,
    ) -> None:  # fmt: skip
        """Records a `cp.async` of `size` bytes by each lane, with first bytes from `low` to `high`."""
        cells, self._lanes = cta.cells, None
        where = cells.of_lanes(offsets, low, high, size)
        self._check(agent, cta, cells.raw[where], "write", line, False, where, pipe=unit)
        cells.raw[where] = PACK.pack(entry_of(unit.number, unit.issued, line, False), 0, 0)
        hit = [a for a in cells.words if ((offsets <= a) & (a < offsets + size)).any()]
        self._words(agent, cta, hit, line, False, store=True)
        for place in hit:
            del cells.words[place]

    @staticmethod
    def _as_cells(cells: SharedCells, chunks: Where) -> Where:
        if cells.regions and isinstance(chunks, slice):
            cells.dissolve(16 * chunks.start, 16 * chunks.stop)
        elif cells.regions and not isinstance(chunks, slice):
            cells.dissolve(16 * int(chunks.min()), 16 * int(chunks.max()) + 16)
        return cells.of_chunks(chunks)

    def _drop_words(self, agent: Agent, cta: Cta, chunks: Where, line: int) -> None:
        cells = cta.cells
        if isinstance(chunks, slice):
            if not (16 * chunks.start < cells.high and cells.low < 16 * chunks.stop):
                return
            hit = [a for a in cells.words if 16 * chunks.start <= a < 16 * chunks.stop]
        else:
            touched = set(chunks.tolist())
            hit = [a for a in cells.words if a >> 4 in touched]
        self._words(agent, cta, hit, line, False, store=True)
        for place in hit:
            del cells.words[place]

    # -- tensor memory ---------------------------------------------------------------------------

    def tensor(
        self, agent: Agent, cta: Cta, cells: tuple[Any, ...], line: int, store: bool,
        unit: Unit | None = None, frees: bool = False,
    ) -> None:  # fmt: skip
        """Records an access to cells `[quarter, half, column]` by a warp (`unit` None) or by a pipe."""
        self._lanes = None
        if unit is None:
            mine = entry_of(agent.party, agent.vector[agent.id], line, False)
            agent.touched = True
        else:
            mine = entry_of(unit.number, unit.issued, line, False)
        all_cells = cta.tensor_cells
        if store and unit is not None and all_cells.rewrites(cells, mine):
            return
        all_cells.settle()
        self._check(
            agent, cta, all_cells.raw[cells], "write" if store else "read", line, False, None, pipe=unit
        )
        slots = _entries(all_cells.raw[cells], "write" if store else "read")
        entries = [e for slot in slots for e in slot if e != mine]
        tensor_fences.check(self.emit, agent, entries, line, self.strict, frees)
        if store and unit is not None:
            all_cells.write_late(cells, mine)
        elif store:
            all_cells.raw[cells] = PACK.pack(mine, 0, 0)
        else:
            all_cells.reads[0][cells] = mine

    # -- inside ----------------------------------------------------------------------------------

    def _check(
        self, agent: Agent, cta: Cta, cells: np.ndarray, verb: str, line: int, strong: bool,
        where: Where | None, only_async: bool = False, pipe: Unit | None = None, mine: int = 0,
    ) -> None:  # fmt: skip
        """Judges the entries of some cells: the last writes, and for a write the last reads."""
        for slot, entries in enumerate(_entries(cells, verb)):
            for entry in entries:
                if entry == mine or self.knows(agent, entry):
                    continue
                if pipe is not None and entry >> PARTY == pipe.number:
                    continue  # a pipe executes its operations in order
                at = np.frombuffer(cells.tobytes(), np.int64)[slot :: 1 + READS].tolist().index(entry)
                if where is not None:
                    index = where.start + at if isinstance(where, slice) else int(where[at])
                    at = index << cta.cells.shift
                self._judge(
                    agent, cta, entry, verb, slot == WRITE, line, strong, at, only_async, where is None
                )

    def _repeats(self) -> bool:
        """Executes the store that is recorded next; returns whether it changes nothing."""
        if self.storing is None:
            return False
        memory, places, data = self.storing
        before = memory[places].copy()
        memory[places] = data
        return np.array_equal(before, memory[places])

    @staticmethod
    def knows(agent: Agent, entry: int) -> bool:
        """Returns whether an access happened before this agent's next one."""
        number, clock = entry >> PARTY, entry >> CLOCK & CLOCK_MASK
        if number == agent.party or agent.nearby.get(number, 0) >= clock:
            return True
        owner = agent.warp.cta.cluster.parties[number].agent
        return owner is not None and agent.vector.get(owner, 0) >= clock

    def _judge(
        self, agent: Agent, cta: Cta, entry: int, verb: str, was_write: bool, line: int, strong: bool,
        at: int, only_async: bool = False, tensor: bool = False,
    ) -> None:  # fmt: skip
        if strong and entry & 1 or self.knows(agent, entry):
            return
        party = agent.warp.cta.cluster.parties[entry >> PARTY]
        if only_async and party.agent is not None:
            return
        theirs = entry >> 1 & LINE_MASK
        if verb == "write" and was_write and theirs == line and self._repeats():
            return  # warps with the same data may all store it
        lanes = "" if self._lanes is None else self._lanes.at(at, at + 1)
        was, place = "written" if was_write else "read", None if tensor else at
        self.emit(SharedUnordered(agent, line, party, theirs, verb, was, cta, place, lanes))


def _entries(cells: np.ndarray, verb: str) -> list[list[int]]:
    """Returns the different entries of some cells, by slot, which an access must be ordered after."""
    slots = 1 + READS if verb == "write" else 1
    data = cells.tobytes()
    first = data[: PACK.size]
    if data == first * (len(data) // PACK.size):
        return [[entry] if entry else [] for entry in PACK.unpack(first)[:slots]]
    columns = np.frombuffer(data, np.int64).reshape(-1, 1 + READS)
    return [distinct(columns[:, slot]) for slot in range(slots)]


def nearby(agent: Agent, snapshot: Snapshot | None = None) -> Vector:
    """Returns the clocks of its cluster's parties that a warp has observed (or had at its release)."""
    vector, of_units = (
        (agent.vector, agent.nearby) if snapshot is None else (snapshot.vector, snapshot.nearby)
    )
    out = dict(of_units)
    for number, owner in agent.warp.cta.cluster.warp_parties:
        if owner in vector:
            out[number] = max(vector[owner], out.get(number, 0))
    return out
