"""Stores of some lanes of a warp that nothing has shown to other lanes yet.

Since Volta the lanes of a warp need not run in lock-step: what one lane stored another may use only after
`bar.warp.sync`, or after a barrier, or a release and an acquire, between the two. A shuffle, a vote or an
election orders no memory (PTX ISA 9.7.9.6, 9.7.13.8 to .14: they wait for the lanes to come; only
`bar.warp.sync`, 9.7.13.2, "guarantees memory ordering among participating threads").

Every ordinary store of a warp is kept until all its lanes know of it. Three things are judged with it:

- a load of a lane of what another lane stored;
- an asynchronous operation (bulk store, product) issued by a lane, that reads what another lane stored;
- a release by some lanes, such as the one that raises a flag: it tells of their own stores and of what they
  know. Who acquires it has *doubts* about the others' stores until a later release of the warp tells of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cute_emulator.machine.conflicts import LanesUnordered
from cute_emulator.numbers.lanes import lane_list

if TYPE_CHECKING:
    from cute_emulator.machine.conflicts import Tell
    from cute_emulator.machine.order import Agent, Snapshot
    from cute_emulator.machine.warp import Cta, Warp

KEPT = 64  # stores of a warp that are looked at; those before are forgotten


class LaneStore:
    """A store of some lanes.

    Attributes:
        warp: Whose.
        cta: Whose shared memory it went to; None for global memory.
        mask: Lanes.
        offsets: Of each of these lanes, in bytes (global memory: addresses), or one of all of them.
        low: Lowest byte.
        end: End of the highest.
        size: Bytes of a lane.
        line: In the PTX.
        clock: Of the warp.
        known: Lanes that know of it, beside each of its own part.
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
        """(lane, where it stored); where several lanes store to one place nobody can tell whose it is."""
        if self.offsets.__class__ is int:
            return [(self.mask.bit_length() - 1, self.offsets)] if not self.mask & (self.mask - 1) else []
        return list(zip(lane_list(self.mask), self.offsets.tolist(), strict=True))

    def overwrites(self, lane: int, at: int, size: int) -> bool:
        """Whether a lane stored all of some bytes."""
        return any(own == lane and to <= at and at + size <= to + self.size for own, to in self.places())


class LaneStores:
    """The stores of a warp that some of its lanes may not know of.

    Attributes:
        stores: Oldest first.
    """

    __slots__ = ("_bounds", "stores")

    def __init__(self) -> None:
        self.stores: list[LaneStore] = []
        self._bounds: dict[Cta | None, tuple[int, int]] = {}

    def add(self, store: LaneStore) -> None:
        """Lanes stored."""
        self.stores.append(store)
        low, end = self._bounds.get(store.cta, (store.low, store.end))
        self._bounds[store.cta] = min(low, store.low), max(end, store.end)
        if len(self.stores) > 2 * KEPT:
            del self.stores[:-KEPT]

    def near(self, cta: Cta | None, low: int, end: int) -> list[LaneStore]:
        """Those that may overlap some bytes, newest first."""
        bounds = self._bounds.get(cta)
        if bounds is None or low >= bounds[1] or end <= bounds[0]:
            return []
        return [s for s in reversed(self.stores) if s.cta is cta and s.low < end and low < s.end]

    def meet(self, lanes: int, live: int) -> None:
        """Lanes wait for each other: each of them knows what any of them did or knows."""
        if not live & ~lanes:
            self.stores = []
            self._bounds.clear()
            return
        for store in self.stores:
            if store.known & lanes or not store.mask & ~lanes:
                store.known |= lanes

    def release(self, lanes: int) -> None:
        """Lanes release what they did."""
        for store in self.stores:
            store.released |= lanes

    def acquire(self, lanes: int, live: int) -> None:
        """Lanes acquire, or leave a barrier: they know what all lanes of a store released since."""
        kept = []
        for store in self.stores:
            if not store.mask & ~(store.released | lanes):
                store.known |= lanes
            if live & ~store.known:
                kept.append(store)
        self.stores = kept
        if not kept:
            self._bounds.clear()

    def untold(self, lanes: int, clock: int) -> dict[LaneStore, int]:
        """What a release by some lanes does not tell of, up to the warp's `clock`: by store the lanes."""
        return {
            store: store.mask & ~lanes
            for store in self.stores
            if store.mask & ~lanes and not store.known & lanes and store.clock <= clock
        }


# -- doubts of other warps -----------------------------------------------------------------------------


def add_doubts(agent: Agent, snapshot: Snapshot) -> None:
    """Before an agent takes over a snapshot: about which stores does it have doubts from then on?"""
    doubts = agent.doubts
    for store in {**doubts, **snapshot.untold}:
        writer = store.warp.agent.id
        if writer == agent.id:
            continue
        knew = agent.vector.get(writer, 0) >= store.clock
        old = doubts.get(store, 0) if knew else -1
        told = snapshot.vector.get(writer, 0) >= store.clock
        new = snapshot.untold.get(store, 0) if told else -1
        left = old & new & store.mask
        if left and (knew or told):
            doubts[store] = left
        else:
            doubts.pop(store, None)


def joint_untold(parts: list[Snapshot]) -> dict[LaneStore, int]:
    """What none of several releases tells of."""
    out: dict[LaneStore, int] = {}
    for store in {s for part in parts for s in part.untold}:
        left = store.mask
        for part in parts:
            if part.vector.get(store.warp.agent.id, 0) >= store.clock:
                left &= part.untold.get(store, 0)
        if left:
            out[store] = left
    return out


# -- what is judged ------------------------------------------------------------------------------------


def check_load(
    tell: Tell, warp: Warp, cta: Cta | None, mask: int, offsets: Any, low: int, end: int, size: int,
    line: int,
) -> None:  # fmt: skip
    """Reports a load of what another lane of its warp stored, or what lanes of another warp did not tell of.

    Args:
        tell: Takes what is found.
        warp: That loads.
        cta: Whose shared memory it is, None for global memory.
        mask: Lanes that load.
        offsets: Of these lanes, in bytes (global memory: addresses), or one of all of them.
        low: Lowest byte.
        end: End of the highest.
        size: Bytes of a lane.
        line: In the PTX.
    """
    near = warp.unsynced.near(cta, low, end)
    doubted = [s for s in warp.agent.doubts if s.cta is cta and s.low < end and low < s.end]
    if not near and not doubted:
        return
    lanes = lane_list(mask)
    wanted = dict(
        zip(lanes, [offsets] * len(lanes) if offsets.__class__ is int else offsets.tolist(), strict=True)
    )
    for lane, at in wanted.items():
        for store in near:
            if store.overwrites(lane, at, size):
                break
            if store.known >> lane & 1:
                continue
            for other, to in store.places():
                if other != lane and to < at + size and at < to + store.size:
                    tell(LanesUnordered(warp, f"lane {lane}", line, store, other, to))
                    return
    for store in doubted:
        left = warp.agent.doubts[store]
        for lane, at in wanted.items():
            for other, to in store.places():
                if left >> other & 1 and to < at + size and at < to + store.size:
                    tell(LanesUnordered(warp, f"lane {lane}", line, store, other, to))
                    return


def check_async(
    tell: Tell, warp: Warp, cta: Cta | None, mask: int, chunks: Any, chunk: int, what: str, line: int
) -> None:
    """Reports an asynchronous read of what other lanes stored and its issuer may not know of.

    Args:
        tell: Takes what is found.
        warp: That issues it.
        cta: As for `check_load`.
        mask: Lanes that issue it.
        chunks: Numbers of what it reads: a slice, or in any order.
        chunk: Bytes of each.
        what: For messages.
        line: In the PTX.
    """
    if not warp.unsynced.stores and not warp.agent.doubts:
        return
    if not isinstance(chunks, slice) and not len(chunks):
        return
    if isinstance(chunks, slice):
        low, end = chunks.start * chunk, chunks.stop * chunk
    else:
        low, end = int(chunks.min()) * chunk, (int(chunks.max()) + 1) * chunk
    near = [(s, s.mask & ~mask) for s in warp.unsynced.near(cta, low, end) if not s.known & mask]
    near += [
        (s, left) for s, left in warp.agent.doubts.items() if s.cta is cta and s.low < end and low < s.end
    ]
    for store, left in near:
        for other, to in store.places() if left else ():
            if not left >> other & 1:
                continue
            first, last = to // chunk, (to + store.size - 1) // chunk
            if isinstance(chunks, slice):
                hit = chunks.start <= last and first < chunks.stop
            else:
                hit = bool(((chunks >= first) & (chunks <= last)).any())
            if hit:
                tell(LanesUnordered(warp, what, line, store, other, to))
                return
