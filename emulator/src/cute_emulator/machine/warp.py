"""Warps, their divergence groups, and the CTAs they belong to.

A warp is a list of groups: lanes that share a program counter. Each group has a separate register file (valid
only for its lanes). So divergent code runs without masking, and a group of one lane runs on plain ints.
Groups merge when they arrive at the same instruction.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.barrier import CountBarrier, MBarrier, Parked
from cute_emulator.machine.cells import SharedCells, TensorCells
from cute_emulator.machine.lane_order import LaneStores
from cute_emulator.machine.shared_races import Unit
from cute_emulator.machine.special import special
from cute_emulator.machine.tmem_order import TmemOrder
from cute_emulator.machine.wgmmas import Product, WarpWgmmas
from cute_emulator.machine.window import CTA_WINDOW, OFFSET, SMEM_BASE
from cute_emulator.numbers.lanes import FULL, LANE_IDS, merge
from cute_emulator.ptx.shared_names import name
from cute_emulator.units.tcgen05 import TMEM_COLUMNS, TMEM_LANES

if TYPE_CHECKING:
    from cute_emulator.execution.grid import Grid
    from cute_emulator.machine.cluster import Cluster
    from cute_emulator.machine.order import Agent
    from cute_emulator.machine.pools import Columns, Registers


class Group:
    """Lanes of a warp that execute together.

    Attributes:
        warp: Warp of the group.
        mask: Lanes of the group.
        pc: Item to run next.
        R: Register file.
        stack: Return items of the active calls.
        why: Event that the group is parked on, or "" when it can run.
        token: Progress of the instruction it waits in (such as a barrier's generation), or None.
        polls: Polling loads since the last change, by line.
        effects: Count of the group's effects that others can observe.
        clock: Whether it has read a clock.
        last_poll: Position and registers at its last poll after reading a clock.
    """

    __slots__ = (
        "R",
        "__weakref__",
        "clock",
        "effects",
        "mask",
        "pc",
        "polls",
        "stack",
        "last_poll",
        "token",
        "warp",
        "why",
    )

    def __init__(self, warp: Warp, mask: int, pc: int, R: list[Any], stack: tuple[int, ...] = ()) -> None:
        self.warp, self.mask, self.pc, self.R, self.stack = warp, mask, pc, R, stack
        self.why = ""
        self.token: Any = None
        self.polls: dict[int, Any] = {}
        self.effects = 0
        self.clock = False
        self.last_poll: Any = None

    def park(self, why: str) -> None:
        """Stops the group until `wake`."""
        self.why = why

    def wake(self) -> None:
        """Lets a parked group run again."""
        if self.why:
            self.why = ""
            scheduler = self.warp.grid.scheduler
            scheduler.pollers.pop(id(self), None)
            scheduler.ready(self.warp)

    def split(self, taken: int, target: int, rest: int) -> None:
        """Moves the lanes of `taken` to a new group at item `target`; the others continue at item `rest`."""
        other = Group(self.warp, taken, target, list(self.R), self.stack)
        other.effects = self.effects
        self.mask &= ~taken
        self.pc = rest
        self.warp.groups.append(other)
        for group in (self, other):
            if group.mask & (group.mask - 1) == 0:
                group._scalarise()

    def _scalarise(self) -> None:
        """Replaces the arrays of a single lane by ints, so that its code runs on ints."""
        lane, R = self.mask.bit_length() - 1, self.R
        for slot in self.warp.grid.program.live_in(self.pc):
            if R[slot].__class__ is np.ndarray:
                R[slot] = R[slot][lane].item()

    @property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """Returns its item, and the calls that led there."""
        return self.pc, self.stack

    def grow(self) -> None:
        """Adds the registers of functions translated, for any warp, since this group's last turn."""
        initial = self.warp.grid.program.initial
        self.R.extend(initial[len(self.R) :])

    def absorb(self, other: Group, live: tuple[int, ...]) -> None:
        """Merges a group at the same instruction; `live` contains the live registers."""
        self.grow()
        other.grow()
        mine, theirs = self.R, other.R
        for slot in live:
            a, b = mine[slot], theirs[slot]
            if a is not b:
                width = self.warp.grid.program.widths[slot]
                mine[slot] = _joined(width, other.mask, b, a)
        self.mask |= other.mask
        self.polls.clear()

    def where(self) -> str:
        """Returns the position, for messages."""
        return f"{self.warp} lanes {self.mask:#010x}"


def _joined(width: int, mask: int, new: Any, old: Any) -> Any:
    out = merge(mask, new, old)
    if out.__class__ is np.ndarray:
        dtype = {0: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
        out = out.astype(dtype, copy=False)
    return out


class BulkStore(NamedTuple):
    """Bulk store, whose two halves are awaited separately.

    Attributes:
        read: Event of its source.
        write: Event of its destination.
        clock: Number of bulk stores that its warp had issued with it.
    """

    read: Event
    write: Event
    clock: int


class BulkGroups:
    """Bulk async-groups of one thread: uncommitted stores and committed groups, oldest first."""

    __slots__ = ("committed", "open")

    def __init__(self) -> None:
        self.open: list[BulkStore] = []
        self.committed: deque[list[BulkStore]] = deque()


class CopyGroups(Parked):
    """`cp.async` copies of a warp: uncommitted ones and committed groups, oldest first, and waiting groups.

    A committed group has the clock of the warp's copies at its commit.
    """

    __slots__ = ("committed", "open")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Event] = []
        self.committed: deque[tuple[list[Event], int]] = deque()


class Warp:
    """32 threads of a CTA.

    Attributes:
        tid: `%tid.x`, `.y`, `.z`, each by lane or one for all.
        groups: Divergence groups of the warp.
        bulk: Bulk stores by the lane that issued them.
        bulk_waiters: Groups that wait for these.
        copies: `cp.async` copies of the warp.
        wgmmas: Part of the warp in its warpgroup's products.
        meeting: Groups at a `bar.warp.sync`, with the lanes that each expects there.
        cluster_token: Generation of the cluster barrier that it has arrived at and not passed, or None.
        cluster_lanes: Lanes that have arrived there and not waited.
        unfenced: mbarriers that it has initialised, with no fence after that.
        fenced: mbarriers with a fence after the initialisation, until the next barrier publishes them.
        unsynced: Stores that are not ordered before all its lanes.
    """

    cta: Cta
    grid: Grid
    agent: Agent
    index: int

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index, self.grid = cta, index, cta.grid
        x, y, _ = cta.grid.launch.block
        thread = LANE_IDS + np.uint32(32 * index)
        self.tid: tuple[Any, Any, Any] = (thread % x, thread // x % y, thread // (x * y))
        if x == cta.grid.threads:
            self.tid = (thread, 0, 0)
        lanes = min(32, cta.grid.threads - 32 * index)
        self.full = FULL if lanes == 32 else (1 << lanes) - 1
        self.live = self.full
        program = cta.grid.program
        self.groups = [Group(self, self.full, program.start, list(program.initial))]
        self.queued = False
        self.agent = cta.grid.checks.new_agent(self)
        self.bulk: dict[int, BulkGroups] = {}
        self.bulk_waiters = Parked()
        self.copies = CopyGroups()
        self.wgmmas = WarpWgmmas()
        self.meeting: dict[Group, int] = {}
        self.cluster_token: int | None = None
        self.cluster_lanes = 0
        self.unfenced: list[MBarrier] = []
        self.fenced: list[MBarrier] = []
        self.local: np.ndarray | None = None
        self.counted = 0
        self.unsynced = LaneStores()

    @property
    def symbols(self) -> dict[str, int]:
        """Addresses of the module's variables for this launch."""
        return self.grid.symbols

    def special(self, name: str) -> Any:
        """Returns the value of a special register."""
        return special(self, name)

    def local_rows(self, width: int) -> np.ndarray:
        """Returns local memory `[32, n]` in elements of `width` bytes."""
        if self.local is None:
            self.local = np.zeros((32, -(-self.grid.program.local_bytes // 8) * 8), np.uint8)
        return self.local.view(_VIEWS[width])

    def exit(self, group: Group) -> None:
        """Ends the lanes of a group."""
        self.groups.remove(group)
        self.live &= ~group.mask
        self.cta.cluster.lanes_exited(self, group.mask)
        if not self.groups:
            self.cta.warp_exited(self)
        else:
            self.recheck()

    def recheck(self) -> None:
        """Wakes groups that wait for lanes which have exited."""
        for group in self.groups:
            group.wake()

    def __str__(self) -> str:
        role = self.grid.machine.role(self.index)
        return f"{self.cta} warp {self.index} ({role})" if role else f"{self.cta} warp {self.index}"


class Cta:
    """Thread block: shared memory, barriers, tensor memory.

    Attributes:
        tmem_owner: By column of tensor memory: 1 + the first column of the allocation, 0 for none.
        tmem_freed: By column: 1 + the warp and the PTX line of the last dealloc.
        tmem_alloc_line: PTX line of the last alloc.
        columns: Columns of tensor memory of the CTA's SM.
        promised: First columns that its pair has allocated and that it has not allocated yet.
        registers: Registers that its warps share, from the first `setmaxnreg` on.
        triggers: Whether it has let the programmatic dependents of its grid begin.
        knows_cluster: Whether a warp of it has waited at its cluster's barrier.
        may_alloc: Whether it still has the permit to allocate.
        products: wgmmas that some warps of a warpgroup have not issued yet, by warpgroup and number.
        wgmma_units: wgmmas of its warpgroups as readers of shared memory, by warpgroup.
        pending: Events that have not happened, by `id`.
    """

    cluster: Cluster
    grid: Grid
    rank_in_cluster: int
    sm: int
    warps: list[Warp]

    def __init__(self, cluster: Cluster, rank_in_cluster: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster, self.grid, self.rank_in_cluster, self.ctaid = (
            cluster,
            cluster.grid,
            rank_in_cluster,
            ctaid,
        )
        self._name = f"rank {self.grid.launch.rank} CTA {ctaid}"
        self.base = rank_in_cluster * CTA_WINDOW
        size = self.grid.smem_bytes
        self.smem = cluster.window[self.base : self.base + -(-size // 16) * 16]
        self.smem[SMEM_BASE:] = 0xFF  # poison: NaN in every float type
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, CountBarrier] = {}
        self._tmem: np.ndarray | None = None
        self.tmem_owner = np.zeros(TMEM_COLUMNS, np.int32)
        self.tmem_freed = np.zeros((TMEM_COLUMNS, 2), np.int32)
        self.tmem_alloc_line = 0
        self.columns: Columns
        self.promised: deque[int] = deque()
        self.registers: Registers | None = None
        self.triggers = False
        self.may_alloc = True
        self.knows_cluster = False
        self.tmem_order = TmemOrder()
        self.chunks = self.smem.view(np.complex128)  # the type that copies 16 bytes fastest, bit for bit
        self.dirty = np.zeros(len(self.smem) >> 4, np.int64)
        self.cells = SharedCells(len(self.smem))
        self._tensor_cells: TensorCells | None = None
        self.visitors: dict[int, tuple[Agent, int, int]] = {}  # last accesses by agents of other CTAs
        self._stored = (len(self.dirty), 0)
        self.mem: dict[int, Any] = {w: self.smem[: size // w * w].view(t).data for w, t in _VIEWS.items()}
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self.pending: dict[int, Event] = {}
        self.products: dict[tuple[int, int], Product] = {}
        self.wgmma_units: dict[str, Unit] = {}
        self.sm = 0
        self.live_warps = -(-self.grid.threads // 32)
        self.warps = [Warp(self, i) for i in range(self.live_warps)]

    @property
    def tmem(self) -> np.ndarray:
        """Returns tensor memory `uint32 [128, 512]`, poisoned with NaN."""
        if self._tmem is None:
            self._tmem = np.full((TMEM_LANES, TMEM_COLUMNS), 0xFFFFFFFF, np.uint32)
        return self._tmem

    @property
    def tensor_cells(self) -> TensorCells:
        """Returns the accesses to tensor memory by quarter of its lanes, half of a quarter, and column."""
        if self._tensor_cells is None:
            self._tensor_cells = TensorCells(4, 2, TMEM_COLUMNS)
        return self._tensor_cells

    def called(self, at: int) -> str:
        """Returns the source's name of an offset in its shared memory, in brackets.

        Empty if there is none.
        """
        program, end = self.grid.program, self.grid.smem_bytes
        known = program.smem_names.get((end, at))
        if known is None:
            source = name(program.module.original, program.entry.name, program.smem_symbols, end, at)
            known = program.smem_names[end, at] = f" ({source})" if source else ""
        return known

    def rows(self, width: int, count: int) -> np.ndarray:
        """Returns shared memory as `[n]` elements of `width` bytes, or `[n, count]`."""
        key = (width, count)
        if key not in self._rows:
            size = width * count
            view = self.smem[: self.grid.smem_bytes // size * size].view(_VIEWS[width])
            self._rows[key] = view.reshape(-1, count) if count > 1 else view
        return self._rows[key]

    def mark_stored(self, chunks: Any, lowest: int, highest: int, epoch: int) -> None:
        """Records ordinary stores to 16-byte chunks, between the chunks of two offsets."""
        self.dirty[chunks] = epoch
        first, end = self._stored
        self._stored = min(first, lowest >> 4), max(end, (highest >> 4) + 1)

    def written_in(self, spans: list[tuple[int, int]]) -> bool:
        """Returns whether the last writes to some ranges of 16-byte chunks include ordinary stores."""
        low, high = self._stored
        for first, end in spans:
            if first < high and low < end and np.logical_or.reduce(self.dirty[first:end]):
                return True
        return False

    def barrier(self, number: int) -> CountBarrier:
        """Returns named barrier `number`."""
        if not 0 <= number < 16:
            raise EmulatorError(f"{self}: barrier {number}; a CTA has barriers 0 to 15")
        if number not in self.named:
            new = CountBarrier(f"barrier {number} of {self}", lambda: 32 * self.live_warps)
            self.named[number], new.clocks = new, self.grid.checks.clocks
        return self.named[number]

    def mbarrier(self, address: int) -> MBarrier:
        """Returns the mbarrier at a shared address of this cluster."""
        mine = self.mbarriers.get(address - self.base)
        if mine is not None:
            return mine
        owner = self.cluster.owner(address)
        barrier = owner.mbarriers.get(address & OFFSET)
        if barrier is None:
            raise EmulatorError(
                f"no mbarrier has been initialised at shared address {address:#x} of {owner}: a barrier of "
                "all its users is required between mbarrier.init and the first use (of the cluster, if "
                "other CTAs use it)"
            )
        return barrier

    def warp_exited(self, warp: Warp) -> None:
        """Records a warp's exit; the last one ends the CTA."""
        self.live_warps -= 1
        if self.grid.checks.clocks is not None:
            self.grid.checks.clocks.exited(warp)
        self.grid.scheduler.moved()
        if not self.live_warps:
            self.grid.cta_exited(self)
            return
        for barrier in self.named.values():
            barrier.check()

    def __str__(self) -> str:
        return self._name


_VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
