"""Warp-wide instructions: shuffles, votes, elections, reductions (PTX ISA 9.7.9.6, 9.7.13.8 to .14).

A `.sync` instruction waits until every live lane of its member mask has arrived. By the ISA its behaviour is
undefined if the executing lane is not in the mask; this is a finding. What `shfl.sync` reads from a lane that
does not take part is undefined, too. It is a finding if the mask names the lane and the lane has exited.
Other such reads yield poison, because reductions have some whose results are unused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported
from cute_emulator.instructions.registry import destinations, instruction
from cute_emulator.machine.events import ExitedLaneRead, LanesNotNamed
from cute_emulator.machine.warp import Group
from cute_emulator.numbers import formats
from cute_emulator.numbers.lanes import (
    DTYPE,
    FULL,
    LANE_IDS,
    as_array,
    bits,
    first_lane,
    lane_array,
    lane_list,
    one,
)
from cute_emulator.ptx.ir import Function, Imm, Instruction

_LANES = LANE_IDS.astype(np.int64)


POISON = np.uint32(0xFFFFFFFF)


def gathered(group: Group, mask: int, members: int, ins: Instruction | None = None) -> bool:
    """Returns whether all live lanes of `members` have arrived; parks the group otherwise.

    Arrived lanes that are not members are reported, for an instruction `ins`.
    """
    if mask & ~members and ins is not None:
        _not_named(group, mask, members, ins)
    missing = members & group.warp.live & ~mask
    if missing:
        group.park(f"lanes {missing:#010x} of its warp to reach this instruction")
        return False
    return True


def _not_named(group: Group, mask: int, members: int, ins: Instruction) -> None:
    event = LanesNotNamed(group, ins.line, mask & ~members, members & FULL, ins.parts[0])
    group.warp.grid.checks.emit(event)


@instruction("shfl.sync")
def _shfl(program: Any, f: Function, ins: Instruction) -> Op:
    mode = ins.parts[2]
    if mode not in ("idx", "up", "down", "bfly"):
        raise Unsupported(f"shfl.{mode}")
    outputs = destinations(ins)
    pred = len(outputs) > 1
    a, b, c = ins.operands[1:4]
    plain = mode == "idx" and isinstance(c, Imm) and c.value == 31 and not pred

    def run(group: Group, mask: int, a: Any, b: Any, c: Any, members: Any) -> Any:
        want = members if members.__class__ is int else _union(members, mask)
        if (want & group.warp.live) != mask and not gathered(group, mask, want, ins):
            return BLOCK_RESULT
        if mask == FULL:
            if plain and b.__class__ is int:
                return a if a.__class__ is int else int(a[b & 31])
            values, valid, _ = _shuffle(mode, a, b, c)
        else:
            values, valid, source = _shuffle(mode, a, b, c)
            values = _without_absent(group, mask, want, ins, values, source)
        return (values, valid) if pred else values

    return Op(run, ins.operands[1:5], outputs, head=True)


def _union(members: Any, mask: int) -> int:
    """Returns the union of some lanes' masks: parts of a warp may shuffle concurrently."""
    return int(np.bitwise_or.reduce(as_array(members, 32)[lane_array(mask)]))


def _without_absent(group: Group, mask: int, want: int, ins: Instruction, values: Any, source: Any) -> Any:
    """Poisons values read from lanes that do not take part.

    Reports those that the mask names but that exited.
    """
    absent = lane_array(mask) & ~lane_array(mask & want)[source]
    if not absent.any():
        return values
    left = want & ~group.warp.live
    readers = [int(lane) for lane in np.flatnonzero(absent) if left >> int(source[lane]) & 1]
    if readers:
        event = ExitedLaneRead(group, ins.line, readers[0], int(source[readers[0]]), want & FULL)
        group.warp.grid.checks.emit(event)
    return np.where(absent, POISON, values)


def _shuffle(mode: str, a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
    """Returns each lane's value, whether its source is in range, and the source."""
    key = [x if x.__class__ is int else x.tobytes() for x in (b, c)]
    valid, source = _sources(mode, *key)
    return as_array(a, 32)[source], valid, source


@lru_cache(maxsize=1024)
def _sources(mode: str, amounts: int | bytes, controls: int | bytes) -> tuple[Any, Any]:
    """Returns whether each lane's source is in range, and the source."""
    b, c = (
        np.frombuffer(x, np.uint32) if isinstance(x, bytes) else as_array(x, 32) for x in (amounts, controls)
    )
    lane, amount, control = _LANES, b.astype(np.int64) & 31, c.astype(np.int64)
    clamp, segment = control & 31, control >> 8 & 31
    low = lane & segment
    high = low | (clamp & ~segment)
    source = {"idx": low | (amount & ~segment), "up": lane - amount, "down": lane + amount}.get(mode)
    source = lane ^ amount if source is None else source
    valid = source >= high if mode == "up" else source <= high
    source = np.where(valid, source, lane)
    valid.setflags(write=False)
    return valid, source


@instruction("vote.sync")
def _vote(program: Any, f: Function, ins: Instruction) -> Op:
    mode = ins.parts[2]
    if mode not in ("ballot", "any", "all", "uni"):
        raise Unsupported(f"vote.{mode}")

    def run(group: Group, mask: int, p: Any, members: Any) -> Any:
        want = one(members, mask)
        if not gathered(group, mask, want, ins):
            return BLOCK_RESULT
        yes, everyone = bits(p) & want & mask, want & mask
        if mode == "ballot":
            return yes
        if mode == "any":
            return yes != 0
        if mode == "all":
            return yes == everyone
        return yes in (0, everyone)

    return Op(run, ins.operands[1:3], destinations(ins), head=True)


@instruction("match")
def _match(program: Any, f: Function, ins: Instruction) -> Op:
    every = ins.parts[1] == "all"
    outputs = destinations(ins)

    def run(group: Group, mask: int, a: Any, members: Any) -> Any:
        want = one(members, mask)
        if not gathered(group, mask, want, ins):
            return BLOCK_RESULT
        lanes = lane_list(want & mask)
        values = {n: one(a, 1 << n) for n in lanes}
        if every:
            same = len(set(values.values())) == 1
            out = want & mask if same else 0
            return (out, same) if len(outputs) > 1 else out
        masks = np.zeros(32, np.uint32)
        for n in lanes:
            masks[n] = sum(1 << k for k in lanes if values[k] == values[n])
        return masks

    return Op(run, ins.operands[1:3], outputs, head=True)


@instruction("activemask")
def _activemask(program: Any, f: Function, ins: Instruction) -> Op:
    return Op(lambda group, mask: mask, (), destinations(ins))


@lru_cache(maxsize=256)
def _elected(lanes: int) -> tuple[int, Any]:
    """Returns the lowest of some lanes, and the predicate of that lane; uniform if it is the only lane."""
    leader = first_lane(lanes)
    return leader, lanes == 1 << leader or lane_array(1 << leader)


@instruction("elect")
def _elect(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, members: Any) -> Any:
        if members.__class__ is not int:
            members = one(members, mask)
        if (members & group.warp.live) != mask and not gathered(group, mask, members, ins):
            return BLOCK_RESULT
        return _elected(members & mask)

    return Op(run, (ins.operands[1],), destinations(ins), head=True)


_REDUCE: dict[str, Callable[[Any], Any]] = {
    "add": lambda v: v.sum(dtype=v.dtype), "min": np.min, "max": np.max,
    "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
}  # fmt: skip


def _extreme(values: Any, least: bool, nan: bool) -> int:
    """Returns the pattern of the least or largest of singles: NaN is canonical, -0 below +0."""
    if nan:
        out = (np.minimum if least else np.maximum).reduce(values)
    else:
        out = (np.fmin if least else np.fmax).reduce(values)
    if np.isnan(out):
        return int(formats.CANONICAL_NAN_F32)
    if out == 0:
        minus = np.signbit(values[values == 0])
        return 1 << 31 if (minus.any() if least else minus.all()) else 0
    return int(out.view(np.uint32))


@instruction("redux")
def _redux(program: Any, f: Function, ins: Instruction) -> Op:
    operation, kind = ins.parts[2], ins.parts[-1]
    absolute, nan = "abs" in ins.parts, "NaN" in ins.parts
    dtype = {"u32": np.uint32, "b32": np.uint32, "s32": np.int32, "f32": np.float32}.get(kind)
    if dtype is None or operation not in (("min", "max") if kind == "f32" else _REDUCE):
        raise Unsupported(ins.opcode)

    def run(group: Group, mask: int, a: Any, members: Any) -> Any:
        want = one(members, mask)
        if not gathered(group, mask, want, ins):
            return BLOCK_RESULT
        values = as_array(a, 32)[lane_array(want & mask)].view(dtype)
        if absolute:
            values = np.abs(values)
        if kind == "f32":
            return _extreme(values, operation == "min", nan)
        return int(np.asarray(_REDUCE[operation](values)).astype(dtype).view(DTYPE[32]))

    return Op(run, ins.operands[1:3], destinations(ins), head=True)


@instruction("bar.warp.sync")
def _bar_warp(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, members: Any) -> Any:
        want = one(members, mask) & FULL
        warp = group.warp
        if group.token == "passed":
            group.token = None
            return None
        if mask & ~want:
            _not_named(group, mask, want, ins)
        waiting = warp.meeting
        group.token = "arrived"
        waiting[group] = want
        here = 0
        for other in waiting:
            here |= other.mask
        if want & warp.live & ~here:
            group.park(f"bar.warp.sync of lanes {want & warp.live & ~here:#010x}")
            return BLOCK_RESULT
        warp.unsynced.meet(want, warp.live)
        met = [other for other in waiting if other is not group and other.place == group.place]
        for other in waiting:
            other.token = "passed"
            other.wake()
        waiting.clear()
        if met and not warp.grid.scheduler.schedule.lanes:
            for other in met:
                group.absorb(other, warp.grid.program.live_in(group.pc))
                warp.groups.remove(other)
            return BLOCK_RESULT  # the group executes this again with all these lanes, and passes
        group.token = None
        return None

    return Op(run, (ins.operands[0],), (), head=True)
