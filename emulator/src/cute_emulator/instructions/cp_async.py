"""`cp.async`: copies of 4 to 16 bytes per lane, their groups, and arrivals that await them (9.7.9.25.3)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.errors import MemoryFault
from cute_emulator.instructions.bulk import smem_chunks
from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported
from cute_emulator.instructions.registry import instruction
from cute_emulator.instructions.sync import fail
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.order import COPY
from cute_emulator.machine.shared_races import Unit, nearby
from cute_emulator.machine.warp import Group, Warp
from cute_emulator.machine.watching import notify
from cute_emulator.machine.window import OFFSET, WINDOW
from cute_emulator.numbers.lanes import FULL, lane_array, lane_list, one
from cute_emulator.ptx.ir import Function, Imm, Instruction
from cute_emulator.units.tma import CHUNK_DTYPE


@instruction("cp.async.ca", "cp.async.cg")
def _cp_async(program: Any, f: Function, ins: Instruction) -> Op:
    operands = list(ins.operands)
    if "cache_hint" in ins.opcode:
        operands.pop()
    dst, src, size = operands[:3]
    if "cg" in ins.parts and size != Imm(16):
        raise Unsupported(f"{ins.opcode} of other than 16 bytes")
    source_size = operands[3] if len(operands) > 3 else size

    def run(group: Group, mask: int, dst: Any, src: Any, size: int, source_size: Any) -> None:
        grid, cta = group.warp.grid, group.warp.cta
        d, s, take = _of_lanes(dst, mask) & OFFSET, _of_lanes(src, mask), _of_lanes(source_size, mask)
        memory, lowest, highest = grid.machine.memory, int(d.min()), int(d.max())
        if int(np.bitwise_or.reduce(d | s)) & (size - 1):
            raise fail(group, ins, f"an address is not a multiple of {size}")
        if highest + size > grid.smem_bytes:
            raise fail(group, ins, "the destination exceeds shared memory")
        if int(take.max()) > size:
            raise fail(group, ins, f"src-size {int(take.max())} is larger than cp-size {size}")
        full, places = take == size, d >> size.bit_length() - 1

        def copy() -> None:
            try:
                if full.all():
                    smem_chunks(cta, size)[places] = memory.gather(s, size)
                else:
                    data = np.zeros((len(d), size), np.uint8)
                    if full.any():
                        data[full] = memory.gather(s[full], size).view(np.uint8).reshape(-1, size)
                    for n in np.flatnonzero(~full & (take > 0)):
                        data[n, : take[n]] = memory.bytes_at(int(s[n]), int(take[n]))
                    smem_chunks(cta, size)[places] = data.reshape(-1).view(CHUNK_DTYPE[size])
            except MemoryFault as why:
                raise fail(group, ins, str(why)) from None
            if cta.cluster.watch:
                notify(cta.cluster.watch, ((d >> 4) + (cta.base >> 4)).tolist())
            group.warp.copies.wake()

        unit, agent = _unit(group.warp), group.warp.agent
        unit.advance()
        cta.mark_stored(d >> 4, lowest, highest, agent.id + COPY << 32 | unit.issued)
        if grid.checks.shared is not None:
            grid.checks.shared.copied_lanes(agent, cta, d, lowest, highest, size, ins.line, unit)
        what = f"the cp.async of line {ins.line}"
        event = grid.engine.submit(Event(copy, grid, cta, what, line=ins.line, size=int(take.sum())))
        group.warp.copies.open.append(event)

    return Op(run, (dst, src, size, source_size))


def _of_lanes(value: Any, mask: int) -> NDArray[np.int64]:
    """Returns an operand's values of the lanes of a mask."""
    if value.__class__ is int:
        return np.full(mask.bit_count(), value, np.int64)
    values: NDArray[np.int64] = value.astype(np.int64)
    return values if mask == FULL else values[lane_array(mask)]


@instruction("cp.async.commit_group")
def _cp_commit(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        _commit(group.warp)

    return Op(run)


def _commit(warp: Warp) -> None:
    copies = warp.copies
    copies.committed.append((copies.open, _unit(warp).issued))
    copies.open = []


def _unit(warp: Warp) -> Unit:
    return warp.cta.cluster.unit(warp.agent.units, "cp.async", "a cp.async", warp, "cp.async")


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _cp_wait(program: Any, f: Function, ins: Instruction) -> Op:
    everything = ins.parts[2] == "wait_all"

    def run(group: Group, mask: int, allowed: int) -> Any:
        warp, copies = group.warp, group.warp.copies
        if everything and copies.open:
            _commit(warp)
        due = list(copies.committed)[: max(0, len(copies.committed) - allowed)]
        if not all(e.done for events, _ in due for e in events):
            copies.park(group, "its cp.async copies")
            return BLOCK_RESULT
        clocks = warp.grid.checks.clocks
        if clocks is not None:
            clocks.join(max((e.end for events, _ in due for e in events), default=0), "its cp.async copies")
        for _, clock in due:
            copies.committed.popleft()
            warp.agent.join_nearby(_unit(warp).number, clock)
            warp.agent.join(warp.agent.id + COPY, clock)
        return None

    return Op(run, (Imm(0) if everything else ins.operands[0],), (), head=True)


@instruction("cp.async.mbarrier.arrive")
def _cp_arrive(program: Any, f: Function, ins: Instruction) -> Op:
    keeps = "noinc" in ins.parts

    def run(group: Group, mask: int, address: Any) -> None:
        grid, cta = group.warp.grid, group.warp.cta
        copies = group.warp.copies
        issued = [*(events for events, _ in copies.committed), copies.open]
        before = tuple(e for events in issued for e in events if not e.done or e.end)
        for lane in lane_list(mask):
            barrier = cta.mbarrier(one(address, 1 << lane) & WINDOW)
            grid.checks.mbarrier_known(group, barrier, ins.line)
            if not keeps:
                barrier.pending += 1
            unit = _unit(group.warp)
            known = {**nearby(group.warp.agent), unit.number: unit.issued}
            what = f"the cp.async.mbarrier.arrive of line {ins.line}"
            copied = {group.warp.agent.id + COPY: unit.issued}
            arrive = partial(barrier.arrive, passing=known, copied=copied)
            event = Event(arrive, grid, cta, what, after=before, line=ins.line)
            grid.engine.submit(event)

    return Op(run, (ins.operands[0],))
