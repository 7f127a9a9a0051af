"""Barriers, mbarriers and fences (PTX ISA 9.7.13)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from cute_emulator.errors import EmulatorError
from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported
from cute_emulator.instructions.registry import destinations, instruction
from cute_emulator.machine.barrier import MBarrier
from cute_emulator.machine.events import (
    AlignedBarrierPassed,
    AlignedBarrierReached,
    MbarrierInvalidated,
    MbarrierMade,
)
from cute_emulator.machine.warp import Cta, Group
from cute_emulator.machine.window import OFFSET, WINDOW
from cute_emulator.numbers.lanes import FULL, bits, lane_list, one
from cute_emulator.ptx.ir import Function, Imm, Instruction, Mem, Operand, Pair


def fail(group: Group, ins: Instruction, what: str) -> EmulatorError:
    """Returns an error with the position and the instruction."""
    place = group.warp.grid.program.place(ins.line)
    return EmulatorError(f"{group.where()}, line {place} ({ins.opcode}): {what}", ins.line)


def within(group: Group, ins: Instruction, cta: Cta, spans: Iterable[tuple[int, int]]) -> None:
    """Raises if 16-byte chunks that an instruction reads, first and end, are not shared memory."""
    for first, end in spans:
        if end > len(cta.dirty):
            raise fail(
                group, ins,
                f"an operand occupies bytes {16 * first:#x} to {16 * end:#x} of the shared memory of {cta}, "
                f"which ends at {cta.grid.smem_bytes:#x}",
            )  # fmt: skip


# -- named barriers ------------------------------------------------------------------------------


@instruction("bar", "barrier")
def _bar(program: Any, f: Function, ins: Instruction) -> Op:
    """Executes `bar` and `barrier`: sync, arrive and red.

    A thread count that is not a multiple of 32 and an arrival without a thread count are errors (`fail`), as
    are those of `CountBarrier.arrive`.
    """
    parts = [p for p in ins.parts if p not in ("cta", "aligned")]
    verb = parts[1] if len(parts) > 1 else "sync"
    if verb not in ("sync", "arrive", "red"):
        raise Unsupported(ins.opcode)
    reduces = verb == "red"
    aligned = verb != "arrive" and (ins.parts[0] == "bar" or "aligned" in ins.parts)
    number, *rest = ins.operands[1:] if reduces else ins.operands
    vote = rest.pop() if reduces else Imm(0)
    count = rest[0] if rest else Imm(0)

    def run(group: Group, mask: int, number: Any, count: Any, vote: Any) -> Any:
        cta = group.warp.cta
        barrier = cta.barrier(number if number.__class__ is int else one(number, mask))
        if group.token is None:
            count = one(count, mask)
            if count % 32:
                raise fail(group, ins, f"thread count {count} is not a multiple of the warp size")
            if not count and verb == "arrive":
                raise fail(group, ins, "an arrival requires the number of participating threads")
            votes = (bits(vote) & mask).bit_count() if reduces else 0
            expected = (count or barrier.everyone()) if reduces else 0
            cta.grid.checks.arrive(group, mask, barrier, ins)
            if aligned and mask != group.warp.live:
                cta.grid.checks.emit(AlignedBarrierReached(group, ins.line, mask, ins))
            try:
                generation = barrier.arrive(_threads(group, mask), count, votes, reduces)
            except EmulatorError as why:
                raise fail(group, ins, str(why)) from None
            group.effects += 1
            if verb == "arrive":
                return None
            group.token = generation, expected
        generation, expected = group.token
        if barrier.generation == generation:
            barrier.park(group, str(barrier))
            return BLOCK_RESULT
        group.token = None
        cta.grid.checks.leave(group, mask, barrier, ins)
        cta.grid.checks.passed(group, barrier, ins)
        if aligned and mask != FULL:
            cta.grid.checks.emit(AlignedBarrierPassed(group, ins.line, mask, ins))
        if not reduces:
            return None
        votes = barrier.votes[generation & 1]
        return {"popc": votes, "or": votes > 0, "and": votes >= expected}[parts[2]]

    return Op(run, (number, count, vote), destinations(ins) if reduces else (), head=True)


def _threads(group: Group, mask: int) -> int:
    """Returns the number of threads of an arrival: a partial last warp counts as a full one."""
    warp = group.warp
    return 32 if mask == warp.live else mask.bit_count()


@instruction("barrier.cluster")
def _barrier_cluster(program: Any, f: Function, ins: Instruction) -> Op:
    """Executes `barrier.cluster`.

    A lane that arrives again without having waited, and a wait of a warp that has not arrived, are errors.
    """
    arrives = ins.parts[2] == "arrive"

    def arrive(group: Group, mask: int) -> Any:
        warp = group.warp
        if warp.cluster_token is not None and warp.cluster_lanes & mask:
            raise fail(group, ins, "arrives at the cluster barrier again without having waited")
        cluster = warp.cta.cluster
        cluster.grid.checks.arrive(group, mask, cluster.barrier, ins)
        warp.cluster_token = cluster.barrier.arrive(mask.bit_count())
        warp.cluster_lanes |= mask
        group.effects += 1

    def wait(group: Group, mask: int) -> Any:
        warp, barrier = group.warp, group.warp.cta.cluster.barrier
        if warp.cluster_token is None:
            raise fail(group, ins, "waits at the cluster barrier without having arrived")
        if barrier.generation == warp.cluster_token:
            barrier.park(group, str(barrier))
            return BLOCK_RESULT
        warp.grid.checks.leave(group, mask, barrier, ins)
        warp.cta.knows_cluster = True
        warp.cluster_lanes &= ~mask
        if not warp.cluster_lanes & warp.live:
            warp.cluster_token = None
        return None

    return Op(arrive if arrives else wait, (), (), head=True)


# -- mbarriers -----------------------------------------------------------------------------------


def _shared(address: Any, mask: int) -> int:
    return (address if address.__class__ is int else one(address, mask)) & WINDOW


def _per_lane(mask: int, *values: Any) -> list[tuple[int, ...]]:
    """Returns the operands lane by lane; uniform ones of a full mask still count once per lane."""
    if np.ndarray not in map(type, values):
        return [values] * mask.bit_count()
    return [tuple([v if v.__class__ is int else int(v[lane]) for v in values]) for lane in lane_list(mask)]


@instruction("mbarrier.init")
def _init(program: Any, f: Function, ins: Instruction) -> Op:
    """Executes `mbarrier.init`.

    An address that is not a multiple of 8 or is outside of shared memory is an error. So are an invalid count
    and an mbarrier at the address on which warps wait.
    """

    def run(group: Group, mask: int, address: Any, count: Any) -> None:
        for a, n in dict.fromkeys(_per_lane(mask, address, count)):
            cta = group.warp.cta.cluster.owner(a & WINDOW)
            if a % 8:
                raise fail(group, ins, f"mbarrier address {a & WINDOW:#x} is not a multiple of 8")
            offset = a & OFFSET
            if offset + 8 > len(cta.smem):
                raise fail(group, ins, f"mbarrier at {a & WINDOW:#x} is outside shared memory")
            old = cta.mbarriers.get(offset)
            if old is not None and old.parked:
                raise fail(group, ins, f"initialises {old} while warps wait on it")
            cta.grid.checks.emit(MbarrierMade(group, ins.line, old))
            cta.mbarriers[offset] = barrier = MBarrier(a & WINDOW, n, cta)
            barrier.clocks = cta.grid.checks.clocks
            cta.grid.checks.mbarrier_init(group, barrier, ins.line)
        group.effects += 1

    return Op(run, ins.operands[:2])


@instruction("mbarrier.inval")
def _inval(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, address: Any) -> None:
        cta, offset = group.warp.cta, _shared(address, mask) & OFFSET
        old = cta.mbarriers.pop(offset, None)
        cta.grid.checks.emit(MbarrierInvalidated(group, ins.line, old, offset))

    return Op(run, ins.operands[:1])


def _split_state(ins: Instruction) -> tuple[tuple[Any, ...], tuple[Operand | None, ...]]:
    """Destinations and sources of an arrive, whose state operand may be missing or a sink."""
    if isinstance(ins.operands[0], Mem):
        return (), ins.operands
    return destinations(ins), ins.operands[1:]


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(program: Any, f: Function, ins: Instruction) -> Op:
    expects, drops = "expect_tx" in ins.parts, ins.parts[1] == "arrive_drop"
    if "noComplete" in ins.parts:
        raise Unsupported(ins.opcode)
    outputs, sources = _split_state(ins)
    amount = sources[1] if len(sources) > 1 else Imm(0 if expects else 1)

    def run(group: Group, mask: int, address: Any, amount: Any) -> Any:
        state = 0
        cta = group.warp.cta
        group.effects += 1
        for a, n in _per_lane(mask, address, amount):
            barrier = cta.mbarrier(a & WINDOW)
            cta.grid.checks.mbarrier_known(group, barrier, ins.line)
            if a >> 24 & 0xFF != cta.rank_in_cluster:
                cta.grid.checks.peer_used(group, cta.cluster.owner(a & WINDOW), ins.line)
                cta.grid.checks.mbarrier_use(barrier, f"mbarrier.arrive of {group.warp}", ins.line)
                if not cta.cluster.owner(a & WINDOW).live_warps:
                    raise fail(group, ins, f"arrives at {barrier} of a CTA that has exited")
            state = barrier.phase | barrier.completed << 1
            cta.grid.checks.arrive(group, mask, barrier, ins)
            if drops:
                barrier.count -= 1
            if expects:
                barrier.tx += n
                barrier.expected = ins.line
            try:
                barrier.arrive(1 if expects else n)
            except EmulatorError as why:
                raise fail(group, ins, str(why)) from None
        return state

    return Op(run, (sources[0], amount), outputs)


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def _tx(program: Any, f: Function, ins: Instruction) -> Op:
    expects = ins.parts[1] == "expect_tx"

    def run(group: Group, mask: int, address: Any, nbytes: Any) -> None:
        group.effects += 1
        for a, n in _per_lane(mask, address, nbytes):
            barrier = group.warp.cta.mbarrier(a & WINDOW)
            group.warp.grid.checks.mbarrier_known(group, barrier, ins.line)
            barrier.expected = ins.line if expects else barrier.expected
            try:
                (barrier.expect if expects else barrier.complete)(n)
            except EmulatorError as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, ins.operands[:2])


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(program: Any, f: Function, ins: Instruction) -> Op:
    """Executes `mbarrier.try_wait` and `test_wait`, both alike.

    Returns true if the phase is complete. Otherwise the first try returns false at once. A try waits if it
    has a time limit, or if its group has had no effect since its last unsuccessful try: it polls in a loop.
    It then returns true when the phase completes, or false when only time could pass (`Scheduler`). Lanes
    with different addresses never wait.
    """
    by_parity = "parity" in ins.parts
    d = ins.operands[0]
    outputs = (d.first, d.second) if isinstance(d, Pair) else (d,)
    address, phase = ins.operands[1:3]
    hinted = len(ins.operands) > 3
    # Groups that have executed this wait without success.
    looked: WeakKeyDictionary[Group, int] = WeakKeyDictionary()

    def done(barrier: MBarrier, want: int) -> bool:
        return barrier.phase != want & 1 if by_parity else barrier.completed > want >> 1

    def run(group: Group, mask: int, address: Any, phase: Any) -> Any:
        if address.__class__ is not int:
            if int(address.min()) != int(address.max()):
                return _each_lane(group, mask, address, phase)
            address = one(address, mask)
        barrier = group.warp.cta.mbarrier(address & WINDOW)
        checks = group.warp.grid.checks
        checks.mbarrier_known(group, barrier, ins.line)
        want = phase if phase.__class__ is int else one(phase, mask)
        if done(barrier, want):
            if group.token is not None:
                group.token = None
            checks.leave(group, mask, barrier, ins)
            checks.completed(group, barrier)
            return True
        timed_out = group.token == "timeout"
        if timed_out and group in barrier.parked:
            barrier.parked.remove(group)  # it polls again, or times out
        if timed_out or not (hinted or looked.get(group) == group.effects):
            group.token = None
            looked[group] = group.effects
            return False
        group.token = "poll"
        barrier.parked.append(group)
        group.warp.grid.scheduler.poll(group, f"{barrier}, parity {want & 1}")
        return BLOCK_RESULT

    def _each_lane(group: Group, mask: int, address: Any, phase: Any) -> Any:
        out = np.zeros(32, np.bool_)
        for lane in lane_list(mask):
            barrier = group.warp.cta.mbarrier(one(address, 1 << lane) & WINDOW)
            checks = group.warp.grid.checks
            checks.mbarrier_known(group, barrier, ins.line)
            out[lane] = done(barrier, one(phase, 1 << lane))
            if out[lane]:
                checks.leave(group, 1 << lane, barrier, ins)
                checks.completed(group, barrier)
        return out

    return Op(run, (address, phase), outputs, head=True)  # type: ignore[arg-type]


@instruction("mbarrier.pending_count")
def _pending(program: Any, f: Function, ins: Instruction) -> Op:
    raise Unsupported(ins.opcode)


# -- fences --------------------------------------------------------------------------------------


@instruction("fence", "membar")
def _fence(program: Any, f: Function, ins: Instruction) -> Op:
    """Executes fences.

    These make initialisations of mbarriers visible: `fence.mbarrier_init`, fences of scope cluster, gpu or
    sys, and `fence.proxy.async` (except for `.global` alone).
    """
    if ins.opcode.startswith("fence.proxy.async"):
        spaces = [p for p in ins.parts if p in ("global", "shared::cta", "shared::cluster")]

        def proxy(group: Group, mask: int) -> None:
            group.warp.grid.checks.proxy_fence(group, spaces)
            if spaces != ["global"]:
                group.warp.grid.checks.mbarrier_fence(group)

        return Op(proxy)

    if ins.opcode == "fence.proxy.alias":
        return Op(lambda group, mask: group.warp.agent.fence_alias())

    if "tensormap::generic" in ins.opcode and "acquire" in ins.parts and ins.operands[-1] != Imm(128):
        raise Unsupported(f"{ins.opcode} of other than 128 bytes")

    orders_init = "mbarrier_init" in ins.parts or {"cluster", "gpu", "sys"} & set(ins.parts)

    def run(group: Group, mask: int, *operands: Any) -> None:
        group.warp.grid.checks.fence(group, ins)
        if orders_init:
            group.warp.grid.checks.mbarrier_fence(group)

    return Op(run, tuple(o for o in ins.operands if not isinstance(o, Mem)))
