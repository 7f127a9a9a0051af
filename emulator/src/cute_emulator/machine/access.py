"""Loads and stores of a warp: addresses of a group's lanes to values, checked for bounds and alignment.

A uniform address is accessed through `memoryview`s; lane addresses are one NumPy gather or scatter. An
address below or beyond its memory becomes an index out of range, so that the common case needs no comparison.
Alignment is one OR-reduction.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.errors import MemoryFault
from cute_emulator.machine import order
from cute_emulator.machine.events import EndedCtaUsed
from cute_emulator.machine.lane_order import LaneStore, check_load
from cute_emulator.machine.lane_plan import LanePlan, Spread, lane_plan, one_place
from cute_emulator.machine.lane_plan import spread as spread_of
from cute_emulator.machine.memory import WINDOW_SHIFT
from cute_emulator.machine.visibility import HeldStore
from cute_emulator.machine.watching import granules, notify
from cute_emulator.machine.window import CTA_WINDOW, OFFSET, WINDOW
from cute_emulator.numbers.lanes import DTYPE, FULL, MASK, lane_array, lane_index, lane_list, one

if TYPE_CHECKING:
    from cute_emulator.machine.memory import Allocation
    from cute_emulator.machine.warp import Cta, Group
    from cute_emulator.ptx.ir import Instruction

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_SPACES = {0: "global", 1: "shared", 2: "param", 4: "local", 8: "const"}


def fault(group: Group, ins: Instruction, mask: int, what: str) -> MemoryFault:
    """Returns a fault with the position and the instruction."""
    place = group.warp.grid.program.place(ins.line)
    return MemoryFault(f"{group.where()}, line {place}: {ins.text}: {what}", ins.line)


def _safe(address: np.ndarray, mask: int) -> np.ndarray:
    """Returns lane addresses in which inactive lanes have the address of the first active one."""
    if mask == FULL:
        return address
    return np.where(lane_array(mask), address, address[lane_list(mask)[0]])


_STRONG = frozenset(("relaxed", "acquire", "volatile", "release", "acq_rel", "mmio"))
_ORDERING = frozenset(("acquire", "release"))


def strength_of(ins: Instruction) -> int:
    """Returns the scope of a strong access, as in `order.SCOPES`, -1 of a weak one; atomics are strong."""
    if ins.parts[0] in ("atom", "red"):
        return order.scope_of(ins, "gpu")
    if ins.opcode.startswith("multimem.red"):
        return order.scope_of(ins, "sys")
    return order.scope_of(ins, "sys") if _STRONG & set(ins.parts) else -1


class Access:
    """Shape of one memory instruction: `count` elements of `width` bytes per lane."""

    def __init__(self, ins: Instruction, space: str, width: int, count: int, is_store: bool) -> None:
        self.ins, self.space, self.width, self.count, self.is_store = ins, space, width, count, is_store
        self.size = width * count
        self.shift = width.bit_length() - 1
        self.bits = 8 * width
        self.row_shift = self.size.bit_length() - 1
        self.line, self.strength, self.multicast = ins.line, strength_of(ins), ins.parts[0] == "multimem"
        self.strong = self.strength >= 0
        self.publishes = is_store and self.strong  # a strong store, or a read-modify-write
        # A poll of data, or the store that it waits for: a strong access that orders nothing else.
        self.polls = self.strong and ins.parts[0] in ("ld", "st") and not _ORDERING & set(ins.parts)
        self.incoherent = "nc" in ins.parts
        self.is_single = "b128" in ins.parts  # no vector: its 16 bytes are one access
        self.words = Struct(f"<{count}{_CODES[width]}")
        self.alone = one_place(self.size)
        self.cached: Allocation | None = None

    # -- windows ---------------------------------------------------------------------------------

    def resolve(self, group: Group, mask: int, address: Any) -> tuple[str, Any]:
        """Returns the space and the address within it of a generic address."""
        if self.space:
            return self.space, address
        sample = address if address.__class__ is int else one(address, mask)
        space = _SPACES.get(sample >> WINDOW_SHIFT)
        if space is None:
            raise fault(group, self.ins, mask, f"{sample:#x} is not an address of any state space")
        if space == "global":
            return space, address
        if address.__class__ is int:
            return space, address & WINDOW
        windows = _safe(address, mask) >> WINDOW_SHIFT
        if int(windows.min()) != int(windows.max()):
            raise fault(group, self.ins, mask, "lanes address different state spaces, which is not modelled")
        return space, (address & WINDOW).astype(np.uint32)

    # -- loads -----------------------------------------------------------------------------------

    def load(self, group: Group, mask: int, space: str, address: Any) -> Any:
        """Returns the loaded value, or a tuple of `count` values, with the dtype of the element width."""
        if space == "shared":
            return self._load_shared(group, mask, address)
        if space == "global":
            return self._load_global(group, mask, address)
        if space == "local":
            return self._load_local(group, mask, address)
        return self._load_bank(group, mask, space, address)

    def _load_shared(self, group: Group, mask: int, address: Any) -> Any:
        cta = group.warp.cta
        if address.__class__ is int:
            offset: Any = address - cta.base
            if not (0 <= offset <= cta.grid.smem_bytes - self.size and offset % self.size == 0):
                cta, offset = self._other_cta(group, mask, address)
            shared = cta.grid.checks.shared
            if shared is not None:
                agent = group.warp.agent
                shared.word(
                    agent, cta, self.line, self.strong, offset, self.size, False, self.publishes, mask
                )
                if (group.warp.unsynced.stores or agent.doubts) and not self.strong:
                    self._lanes_met(group, cta, mask, offset, offset, offset)
            view, i = cta.mem[self.width], offset >> self.shift
            return view[i] if self.count == 1 else tuple(view[i + n] for n in range(self.count))
        lanes = self._plan(_safe(address, mask), cta.base)
        rows = cta.rows(self.width, self.count)
        if not lanes.aligned or lanes.highest >> self.row_shift >= len(rows):
            return self._load_lanes(group, mask, address)
        shared = cta.grid.checks.shared
        if shared is not None:
            agent = group.warp.agent
            shared.lanes(agent, cta, self.line, self.strong, lanes, self.size, False, self.publishes, mask)
            if (group.warp.unsynced.stores or agent.doubts) and not self.strong:
                offsets = lanes.offsets if mask == FULL else lanes.offsets[lane_index(mask)]
                self._lanes_met(group, cta, mask, offsets, lanes.lowest, lanes.highest)
        return self._columns(rows[lanes.rows])

    def _lanes_met(self, group: Group, cta: Cta | None, mask: int, offsets: Any, low: int, high: int) -> None:
        emit = group.warp.grid.checks.emit
        check_load(emit, group.warp, cta, mask, offsets, low, high + self.size, self.size, self.line)

    def _plan(self, addresses: np.ndarray, base: int) -> LanePlan:
        return lane_plan(addresses.astype(np.uint32, copy=False).tobytes(), base, self.row_shift)

    def _columns(self, rows: np.ndarray) -> Any:
        return rows if self.count == 1 else tuple(np.ascontiguousarray(rows.T))

    def _load_lanes(self, group: Group, mask: int, address: Any) -> Any:
        """Loads lane by lane from the shared memory of several CTAs of the cluster, or raises the fault."""
        out = np.zeros((self.count, 32), DTYPE[self.bits])
        for lane in lane_list(mask):
            cta, offset = self._other_cta(group, 1 << lane, int(address[lane]))
            shared = cta.grid.checks.shared
            if shared is not None:
                agent = group.warp.agent
                shared.word(
                    agent, cta, self.line, self.strong, offset, self.size, False, self.publishes, mask
                )
            out[:, lane] = cta.rows(self.width, 1)[offset >> self.shift : (offset >> self.shift) + self.count]
        return out[0] if self.count == 1 else tuple(out)

    def _other_cta(self, group: Group, mask: int, address: int) -> tuple[Any, int]:
        cluster = group.warp.cta.cluster
        rank, offset = (address & WINDOW) // CTA_WINDOW, address & OFFSET
        if address % self.size:
            raise fault(
                group, self.ins, mask, f"shared address {address:#x} is not a multiple of {self.size}"
            )
        if rank >= cluster.size:
            raise fault(
                group,
                self.ins,
                mask,
                f"shared address {address:#x} is in no CTA of a cluster of {cluster.size}",
            )
        cta = cluster.ctas[rank]
        if offset + self.size > cta.grid.smem_bytes:
            raise fault(
                group, self.ins, mask,
                f"shared memory overflow: {self.size} bytes at offset {offset:#x}; "
                f"{cta} ends at {cta.grid.smem_bytes:#x}",
            )  # fmt: skip
        if cta is not group.warp.cta:
            if not cta.live_warps:
                cta.grid.checks.emit(EndedCtaUsed(group, self.line, cta, None))
            cta.grid.checks.peer_used(group, cta, self.line)
            agent = group.warp.agent
            agent.touched = True
            key = agent.id + order.STRONG if self.publishes else agent.id
            cta.visitors[key] = agent, agent.vector[key], self.line
        return cta, offset

    def _load_global(self, group: Group, mask: int, address: Any) -> Any:
        lanes = None
        if address.__class__ is int:
            allocation: Any = self._allocation(group, mask, address)
            low, spread = address, self.alone
        else:
            lanes = lane_index(mask)
            low, spread = spread_of(address[lanes], self.size)
            allocation = self._holding(group, mask, low, spread)
            if allocation is None:
                out = np.zeros((self.count, 32), DTYPE[self.bits])
                for lane in lane_list(mask):
                    out[:, lane] = self._load_global(group, 1 << lane, int(address[lane]))
                return out[0] if self.count == 1 else tuple(out)
        unknown = self._reads(group, mask, allocation, low, spread)
        start, old = low - allocation.base, group.warp.grid.machine.old
        if lanes is None:
            data = allocation.raw[start : start + self.size]
            if unknown:
                data = old.loaded(self, group, allocation, low, spread, unknown, data)
            values = self.words.unpack(data)
            return values[0] if self.count == 1 else values
        rows = allocation.view(self.width, self.count)[spread.units(start, self.row_shift)]
        if unknown:
            rows = old.loaded(self, group, allocation, low, spread, unknown, rows)
        if mask == FULL:
            return rows.copy() if self.count == 1 else tuple(rows.T.copy())
        out = np.empty((self.count, 32), DTYPE[self.bits])
        out.T[:] = rows[:1].reshape(1, -1)  # inactive lanes
        out.T[lanes] = rows.reshape(-1, self.count)
        return out[0] if self.count == 1 else tuple(out)

    def _reads(self, group: Group, mask: int, allocation: Allocation, low: int, spread: Spread) -> list[int]:
        machine, unknown = group.warp.grid.machine, []
        if machine.races is not None:
            if (group.warp.unsynced.stores or group.warp.agent.doubts) and not self.strong:
                at = low if len(spread.offsets) == 1 else spread.offsets + low
                self._lanes_met(group, None, mask, at, low, low + spread.extent - self.size)
            unknown = machine.races.read(
                group.warp.agent, self.line, self.strength, allocation, low, spread, self.publishes,
                self.multicast, self.incoherent, mask,
            )  # fmt: skip
        if machine.held.active and allocation.rank != group.warp.grid.launch.rank:
            machine.held.touch(group.warp.grid.launch.rank, allocation, low, low + spread.extent)
        return unknown

    def _allocation(self, group: Group, mask: int, address: int) -> Allocation:
        if address % self.size:
            raise fault(
                group, self.ins, mask, f"global address {address:#x} is not a multiple of {self.size}"
            )
        memory = group.warp.grid.machine.memory
        cached = self.cached
        if (
            cached is not None
            and cached.owner is memory
            and cached.base <= address
            and address + self.size <= cached.end
        ):
            return cached
        try:
            self.cached = allocation = memory.find(address, self.size)
        except MemoryFault as why:
            raise fault(group, self.ins, mask, str(why)) from None
        return allocation

    def _holding(self, group: Group, mask: int, low: int, spread: Spread) -> Allocation | None:
        """Returns the allocation of all lanes' accesses; None if they differ or one of them is a fault."""
        cached, first = self.cached, low + spread.below
        memory = group.warp.grid.machine.memory
        if cached is None or cached.owner is not memory or not cached.base <= first < cached.end:
            cached = self._allocation(group, mask, first)
        if cached.view(self.width, self.count) is None or (low | spread.grain) & (self.size - 1):
            return None
        return cached if cached.base <= low and low + spread.extent <= cached.end else None

    def _load_local(self, group: Group, mask: int, address: Any) -> Any:
        rows = group.warp.local_rows(self.width)
        out = np.zeros((self.count, 32), DTYPE[self.bits])
        for lane in lane_list(mask):
            at = self._local_offset(group, lane, address)
            out[:, lane] = rows[lane, at >> self.shift : (at >> self.shift) + self.count]
        if mask & (mask - 1) == 0:
            lane = mask.bit_length() - 1
            return int(out[0, lane]) if self.count == 1 else tuple(int(v) for v in out[:, lane])
        return out[0] if self.count == 1 else tuple(out)

    def _local_offset(self, group: Group, lane: int, address: Any) -> int:
        at = one(address, 1 << lane) & WINDOW
        if at % self.width or at + self.size > group.warp.grid.program.local_bytes:
            raise fault(group, self.ins, 1 << lane, f"local address {at:#x} is misaligned or out of bounds")
        return at

    def _load_bank(self, group: Group, mask: int, space: str, address: Any) -> Any:
        bank = group.warp.grid.params if space == "param" else group.warp.grid.const
        if address.__class__ is not int:
            values = [
                self._load_bank(group, 1 << n, space, int(a)) for n, a in enumerate(_safe(address, mask))
            ]
            columns = np.array(values, DTYPE[self.bits]).reshape(32, self.count).T
            return (
                np.ascontiguousarray(columns[0]) if self.count == 1 else tuple(np.ascontiguousarray(columns))
            )
        at = address & WINDOW
        if at % self.width or at + self.size > len(bank):
            raise fault(
                group, self.ins, mask, f"{space} address {at:#x} is misaligned or beyond {len(bank)} bytes"
            )
        values = [
            int.from_bytes(bank[at + n * self.width : at + (n + 1) * self.width], "little")
            for n in range(self.count)
        ]
        return values[0] if self.count == 1 else tuple(values)

    # -- stores ----------------------------------------------------------------------------------
    def store(self, group: Group, mask: int, space: str, address: Any, values: Any) -> None:
        """Stores `count` values per lane: as many registers, or rows `[lanes of mask, count]`."""
        group.effects += 1
        if space == "shared":
            self._store_shared(group, mask, address, values)
        elif space == "global":
            self._store_global(group, mask, address, values)
        elif space == "local":
            self._store_local(group, mask, address, values)
        else:
            raise fault(group, self.ins, mask, f"a store to {space} memory, which is read-only")

    def _rows(self, mask: int, values: Any) -> Any:
        """Returns values as `[lanes of mask, count]` (or `[lanes]`) of the element dtype."""
        if values.__class__ is np.ndarray:
            return values
        dtype, n = DTYPE[self.bits], mask.bit_count()
        if self.count == 1:
            v = values[0]
            if v.__class__ is int:
                return np.full(n, v & MASK[self.bits], dtype)
            v = v.astype(dtype, copy=False)
            return v if n == 32 else v[lane_index(mask)]
        lanes = slice(None) if n == 32 else lane_index(mask)
        out = np.empty((n, self.count), dtype)
        for i, v in enumerate(values):
            out[:, i] = v & MASK[self.bits] if v.__class__ is int else v[lanes]
        return out

    def _scalar_bytes(self, mask: int, values: tuple[Any, ...]) -> bytes:
        """Returns the bytes stored to a uniform address: those of the highest active lane."""
        last, keep = 1 << (mask.bit_length() - 1), MASK[self.bits]
        return self.words.pack(*[(v if v.__class__ is int else one(v, last)) & keep for v in values])

    def _store_shared(self, group: Group, mask: int, address: Any, values: Any) -> None:
        cta = group.warp.cta
        if address.__class__ is int:
            offset = address - cta.base
            if not (0 <= offset <= cta.grid.smem_bytes - self.size and offset % self.size == 0):
                cta, offset = self._other_cta(group, mask, address)
            agent, shared, end = group.warp.agent, cta.grid.checks.shared, offset + self.size
            place, data = cta.smem[offset:end], np.frombuffer(self._scalar_bytes(mask, values), np.uint8)
            if shared is not None:
                shared.storing = place, slice(None), data
                shared.word(agent, cta, self.line, self.strong, offset, self.size, True, self.publishes, mask)
                if not self.strong:
                    span = offset, offset, end
                    group.warp.unsynced.add(LaneStore(group.warp, cta, mask, *span, self.size, self.line))
            place[:] = data
            agent.touched = True
            cta.mark_stored(slice(offset >> 4, (end + 15) >> 4), offset, end - 1, agent.epoch)
        else:
            active = address if mask == FULL else address[lane_array(mask)]
            lanes = self._plan(active, cta.base)
            view = cta.rows(self.width, self.count)
            if not lanes.aligned or lanes.highest >> self.row_shift >= len(view):
                values = values.T if values.__class__ is np.ndarray else values
                for lane in lane_list(mask):
                    one_lane = tuple(v if v.__class__ is int else int(v[lane]) for v in values)
                    self._store_shared(group, 1 << lane, int(address[lane]), one_lane)
                return
            agent, shared, rows = group.warp.agent, cta.grid.checks.shared, self._rows(mask, values)
            if shared is not None:
                shared.storing = view, lanes.rows, rows
                shared.lanes(agent, cta, self.line, self.strong, lanes, self.size, True, self.publishes, mask)
                if not self.strong:
                    end = lanes.highest + self.size
                    at = lanes.offsets, lanes.lowest, end
                    group.warp.unsynced.add(LaneStore(group.warp, cta, mask, *at, self.size, self.line))
            if self.size == 16:
                cta.chunks[lanes.rows] = rows.view(np.complex128)[:, 0]
            else:
                view[lanes.rows] = rows
            agent.touched = True
            cta.mark_stored(lanes.chunks, lanes.lowest, lanes.highest, agent.epoch)
            if self.size == 32:
                cta.mark_stored(lanes.chunks + 1, lanes.lowest, lanes.highest + 16, agent.epoch)
        watch = group.warp.cta.cluster.watch
        if watch:
            notify(watch, granules(address, mask, self.size))

    def _store_global(self, group: Group, mask: int, address: Any, values: tuple[Any, ...]) -> None:
        machine = group.warp.grid.machine
        if address.__class__ is int:
            allocation: Any = self._allocation(group, mask, address)
            low, spread, view = address, self.alone, allocation.raw
            where: Any = slice(address - allocation.base, address - allocation.base + self.size)
            data = np.frombuffer(self._scalar_bytes(mask, values), np.uint8)
        else:
            low, spread = spread_of(address if mask == FULL else address[lane_index(mask)], self.size)
            allocation = self._holding(group, mask, low, spread)
            if allocation is None:
                for lane in lane_list(mask):
                    one_lane = tuple(v if v.__class__ is int else int(v[lane]) for v in values)
                    self._store_global(group, 1 << lane, int(address[lane]), one_lane)
                return
            where = spread.units(low - allocation.base, self.row_shift)
            view, data = allocation.view(self.width, self.count), self._rows(mask, values)
        if machine.races is not None:
            machine.races.write(
                group.warp.agent, self.line, self.strength, allocation, low, spread,
                lambda: np.array_equal(view[where], data), self.multicast, mask,
            )  # fmt: skip
            if not self.strong:
                at = low if len(spread.offsets) == 1 else spread.offsets + low
                span = low, low + spread.extent
                group.warp.unsynced.add(LaneStore(group.warp, None, mask, at, *span, self.size, self.line))
        rank, agent = group.warp.grid.launch.rank, group.warp.agent
        machine.report.stored(rank, allocation.rank, data.nbytes)
        epoch = agent.strong_epoch if self.strong else agent.epoch
        keeps = machine.old.wants(self, allocation, group)

        def put() -> None:
            if keeps:
                machine.old.replace(self, allocation, low, spread, epoch)
            view[where] = data
            if machine.watch:
                notify(machine.watch, spread.granules(low))

        kind = "flag" if self.strong else "store"
        if machine.faults.active and machine.faults.catches(group, self.line, kind, allocation, low, put):
            return
        if machine.held.active and allocation.rank != rank:
            high = low + spread.extent
            machine.held.touch(rank, allocation, low, high)
            if not self.strong:
                machine.held.hold(HeldStore(agent, epoch, allocation, low, high, put))
                agent.touched = True
                return
        put()

    def _store_local(self, group: Group, mask: int, address: Any, values: tuple[Any, ...]) -> None:
        rows = group.warp.local_rows(self.width)
        for lane in lane_list(mask):
            at = self._local_offset(group, lane, address) >> self.shift
            for n, v in enumerate(values):
                rows[lane, at + n] = one(v, 1 << lane) & ((1 << self.bits) - 1)
