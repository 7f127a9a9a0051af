"""Stores of some lanes of a warp that are not ordered before other lanes' accesses yet.

Since Volta the lanes of a warp need not run in lock-step. A lane may use what another lane stored only after
`bar.warp.sync`, or after a barrier, or a release and an acquire, between the two. A shuffle, a vote or an
election orders no memory (PTX ISA 9.7.9.6, 9.7.13.8 to .14: they wait for the lanes to arrive; only
`bar.warp.sync`, 9.7.13.2, "guarantees memory ordering among participating threads").

Every ordinary store of a warp is recorded until it is ordered before all its lanes. Three accesses are
judged:

- a load by a lane of what another lane stored;
- an asynchronous operation (bulk store, product) issued by a lane, that reads what another lane stored;
- a release by some lanes, such as the store of a flag: it publishes their stores and what they have acquired.
  A warp that acquires it has *doubts* about the others' stores until a later release of the warp publishes
  them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cute_emulator.machine.conflicts import LanesUnordered
from cute_emulator.numbers.lanes import lane_list

if TYPE_CHECKING:
    from cute_emulator.machine.conflicts import EventSink
    from cute_emulator.machine.order import Agent, Snapshot
    from cute_emulator.machine.warp import Cta, Warp

KEPT = 64  # recorded stores of a warp; older ones are dropped


class LaneStore:
    """Store of some lanes.

    Attributes:
        warp: Warp that stores.
        cta: CTA that owns the shared memory; None for global memory.
        mask: Lanes.
        offsets: Offset of each of these lanes, in bytes (global memory: addresses), or one for all of them.
        low: Lowest byte.
        end: End of the highest.
        size: Bytes of a lane.
        line: PTX line.
        clock: Clock of the warp.
        known: Lanes that are ordered after all of the store; each lane is ordered after its own part.
        released: Lanes that have released since.
    """

    __slots__ = (
        "clock", "cta", "end", "known", "line", "low", "mask", "offsets", "released", "size", "warp",
    )  # fmt: skip

    def __init__(
        self, warp: Warp, cta: Cta | None, mask: int, offsets: Any, low: int, end: int, size: int, line: int
    ) -> None:
        self.warp, self.cta, self.mask, self.offsets = warp, cta, mask, offsets
        self.low, self.end, self.size, self.line = low, end, size, line
        self.clock = warp.agent.vector[warp.agent.id]
        self.known = self.released = 0

    def places(self) -> list[tuple[int, int]]:
        """Returns (lane, location) of each lane's store; none if several lanes store to one location."""
        if self.offsets.__class__ is int:
            return [(self.mask.bit_length() - 1, self.offsets)] if not self.mask & (self.mask - 1) else []
        return list(zip(lane_list(self.mask), self.offsets.tolist(), strict=True))

    def overwrites(self, lane: int, at: int, size: int) -> bool:
        """Returns whether one lane stored all of some bytes."""
        return any(who == lane and to <= at and at + size <= to + self.size for who, to in self.places())


class LaneStores:
    """Stores of a warp that are not ordered before all its lanes.

    Attributes:
        stores: Oldest first.
    """

    __slots__ = ("_bounds", "stores")

    def __init__(self) -> None:
        self.stores: list[LaneStore] = []
        self._bounds: dict[Cta | None, tuple[int, int]] = {}

    def add(self, store: LaneStore) -> None:
        """Records a store of lanes."""
        self.stores.append(store)
        low, end = self._bounds.get(store.cta, (store.low, store.end))
        self._bounds[store.cta] = min(low, store.low), max(end, store.end)
        if len(self.stores) > 2 * KEPT:
            del self.stores[:-KEPT]

    def overlapping(self, cta: Cta | None, low: int, end: int) -> list[LaneStore]:
        """Returns the stores that may overlap some bytes, newest first."""
        bounds = self._bounds.get(cta)
        if bounds is None or low >= bounds[1] or end <= bounds[0]:
            return []
        return [s for s in reversed(self.stores) if s.cta is cta and s.low < end and low < s.end]

    def meet(self, lanes: int, live: int) -> None:
        """Synchronises lanes: each of them is ordered after what any of them did or observed."""
        if not live & ~lanes:
            self.stores = []
            self._bounds.clear()
            return
        for store in self.stores:
            if store.known & lanes or not store.mask & ~lanes:
                store.known |= lanes

    def release(self, lanes: int) -> None:
        """Records a release by lanes."""
        for store in self.stores:
            store.released |= lanes

    def acquire(self, lanes: int, live: int) -> None:
        """Records an acquire by lanes, or that they leave a barrier.

        They observe everything that a store's lanes released since.
        """
        kept = []
        for store in self.stores:
            if not store.mask & ~(store.released | lanes):
                store.known |= lanes
            if live & ~store.known:
                kept.append(store)
        self.stores = kept
        if not kept:
            self._bounds.clear()

    def unreleased(self, lanes: int, clock: int) -> dict[LaneStore, int]:
        """Returns the stores, with lanes, that a release by some lanes at `clock` does not publish."""
        return {
            store: store.mask & ~lanes
            for store in self.stores
            if store.mask & ~lanes and not store.known & lanes and store.clock <= clock
        }


# -- doubts of other warps -----------------------------------------------------------------------------


def add_doubts(agent: Agent, snapshot: Snapshot) -> None:
    """Updates an agent's doubts about stores, before it acquires a snapshot."""
    doubts = agent.doubts
    for store in {**doubts, **snapshot.unreleased}:
        if store.warp is agent.warp:
            continue
        knew = _observed(agent, store)
        old = doubts.get(store, 0) if knew else -1
        is_released = _observed(snapshot, store)
        new = snapshot.unreleased.get(store, 0) if is_released else -1
        left = old & new & store.mask
        if left and (knew or is_released):
            doubts[store] = left
        else:
            doubts.pop(store, None)


def _observed(state: Agent | Snapshot, store: LaneStore) -> bool:
    """Returns whether the clock of a store, or the end of its launch, is in some state."""
    warp = store.warp
    return state.vector.get(warp.agent.id, 0) >= store.clock or warp.grid.number in state.grids


def joint_unreleased(parts: list[Snapshot]) -> dict[LaneStore, int]:
    """Returns the stores that none of several releases publishes."""
    out: dict[LaneStore, int] = {}
    for store in {s for part in parts for s in part.unreleased}:
        left = store.mask
        for part in parts:
            if _observed(part, store):
                left &= part.unreleased.get(store, 0)
        if left:
            out[store] = left
    return out


# -- judged accesses-----------------------------------------------------------------------------------


def check_load(
    emit: EventSink, warp: Warp, cta: Cta | None, mask: int, offsets: Any, low: int, end: int, size: int,
    line: int,
) -> None:  # fmt: skip
    """Reports a load of what another lane of its warp stored, or what lanes of another warp did not release.

    Args:
        emit: Receiver of the findings.
        warp: Warp that loads.
        cta: CTA that owns the shared memory, None for global memory.
        mask: Lanes that load.
        offsets: Offsets of these lanes, in bytes (global memory: addresses), or one for all of them.
        low: Lowest byte.
        end: End of the highest.
        size: Bytes of a lane.
        line: PTX line.
    """
    recent = warp.unsynced.overlapping(cta, low, end)
    doubted = [s for s in warp.agent.doubts if s.cta is cta and s.low < end and low < s.end]
    if not recent and not doubted:
        return
    lanes = lane_list(mask)
    wanted = dict(
        zip(lanes, [offsets] * len(lanes) if offsets.__class__ is int else offsets.tolist(), strict=True)
    )
    for lane, at in wanted.items():
        for store in recent:
            if store.overwrites(lane, at, size):
                break
            if store.known >> lane & 1:
                continue
            for other, to in store.places():
                if other != lane and to < at + size and at < to + store.size:
                    emit(LanesUnordered(warp, f"lane {lane}", line, store, other, to))
                    return
    for store in doubted:
        left = warp.agent.doubts[store]
        for lane, at in wanted.items():
            for other, to in store.places():
                if left >> other & 1 and to < at + size and at < to + store.size:
                    emit(LanesUnordered(warp, f"lane {lane}", line, store, other, to))
                    return


def check_async(
    emit: EventSink, warp: Warp, cta: Cta | None, mask: int, chunks: Any, chunk: int, what: str, line: int
) -> None:
    """Reports an asynchronous read of what other lanes stored without order before its issuer.

    Args:
        emit: Receiver of the findings.
        warp: Warp that issues the operation.
        cta: CTA that owns the shared memory, None for global memory.
        mask: Lanes that issue it.
        chunks: Numbers of the chunks that it reads: a slice, or in any order.
        chunk: Bytes of each chunk.
        what: Name in messages.
        line: PTX line.
    """
    if not warp.unsynced.stores and not warp.agent.doubts:
        return
    if not isinstance(chunks, slice) and not len(chunks):
        return
    if isinstance(chunks, slice):
        low, end = chunks.start * chunk, chunks.stop * chunk
    else:
        low, end = int(chunks.min()) * chunk, (int(chunks.max()) + 1) * chunk
    recent = [(s, s.mask & ~mask) for s in warp.unsynced.overlapping(cta, low, end) if not s.known & mask]
    recent += [
        (s, left) for s, left in warp.agent.doubts.items() if s.cta is cta and s.low < end and low < s.end
    ]
    for store, left in recent:
        for other, to in store.places() if left else ():
            if not left >> other & 1:
                continue
            first, last = to // chunk, (to + store.size - 1) // chunk
            if isinstance(chunks, slice):
                hit = chunks.start <= last and first < chunks.stop
            else:
                hit = bool(((chunks >= first) & (chunks <= last)).any())
            if hit:
                emit(LanesUnordered(warp, what, line, store, other, to))
                return
