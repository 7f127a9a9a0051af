"""ld, st, atom, red and prefetches (PTX ISA 9.7.9.8 to 9.7.9.27, 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported, width_of
from cute_emulator.instructions.registry import destinations, instruction
from cute_emulator.machine.access import Access
from cute_emulator.machine.store_run import store_run
from cute_emulator.machine.warp import Group
from cute_emulator.machine.watching import granules
from cute_emulator.numbers import fmath, formats
from cute_emulator.numbers.lanes import DTYPE, MASK, lane_list, merge_as, one, resize, signed
from cute_emulator.ptx.ir import TYPE_BYTES, Function, Instruction, Mem, Reg, Sym, Vec

_SPACES = ("global", "shared", "local", "param", "const")


def space_of(ins: Instruction) -> str:
    """Returns the state space of a memory instruction, "" for generic."""
    for part in ins.parts:
        name = part.split("::")[0]
        if name in _SPACES:
            return name
    return ""


def shape_of(ins: Instruction) -> tuple[str, int, int]:
    """Returns (type, bytes of an element, elements)."""
    kind = next((p for p in reversed(ins.parts) if p in TYPE_BYTES), None)
    if kind is None:
        raise Unsupported(ins.opcode)
    count = next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    return kind, TYPE_BYTES[kind], count


def _fit(value: Any, source: int, reg: Reg, sign: bool) -> Any:
    width = width_of(reg)
    return value if width == source else resize(value, source, width, sign)


@instruction("ld", "ldu")
def _ld(program: Any, f: Function, ins: Instruction) -> Op:
    kind, width, count = shape_of(ins)
    outputs, address = destinations(ins), ins.operands[1]
    assert isinstance(address, Mem)
    space = space_of(ins)
    if space == "param" and isinstance(address.base, Sym) and not _is_entry_param(f, address.base.name):
        return _ld_call_param(program, f, ins, address, outputs, width, count)
    if kind == "b128":
        count, width = 2, 8
    access = Access(ins, space, width, count, is_store=False)
    sign, bits = kind[0] == "s", 8 * width
    regs = [r if r is not None and kind != "b128" and width_of(r) != bits else None for r in outputs]
    convert = any(r is not None for r in regs)
    polling = access.strong

    def run(group: Group, mask: int, address: Any) -> Any:
        where, at = access.resolve(group, mask, address)
        value = access.load(group, mask, where, at)
        stale = group.warp.agent.stale
        if polling and not stale and _parked(group, ins, mask, where, at, value, access.size):
            return BLOCK_RESULT
        if polling:
            group.warp.grid.checks.strong_load(group, ins, mask, where, at)
        if convert:
            parts = (value,) if count == 1 else value
            parts = tuple(
                v if r is None else _fit(v, bits, r, sign) for v, r in zip(parts, regs, strict=True)
            )
            return parts[0] if count == 1 else parts
        return value

    return Op(run, (address,), outputs, head=polling)


_PATIENCE = 256  # polls of an unchanged address by a loop that counts, before the group is parked


def _parked(
    group: Group, ins: Instruction, mask: int, space: str, address: Any, value: Any, size: int
) -> bool:
    """Parks a group that polls in a loop without progress."""
    parts = value if value.__class__ is tuple else (value,)
    seen = tuple(v if v.__class__ is int else v.tobytes() for v in parts)
    where = address if address.__class__ is int else address.tobytes()
    key = (where, seen, group.effects)
    R = group.R
    state = [R[slot] for slot in group.warp.grid.program.live_in(group.pc)]
    poll = group.polls.get(ins.line)
    if poll is None or poll.key != key:
        if poll is not None:
            group.polls.clear()
        group.polls[ins.line] = Poll(key, state, space, address, mask, size, parts)
        return False
    poll.visits += 1
    if poll.visits < _PATIENCE and not all(
        a is b or (_plain(a) and a == b) for a, b in zip(state, poll.state, strict=True)
    ):
        poll.state = state
        return False
    machine = group.warp.grid.machine
    for p in group.polls.values():
        watch = machine.watch if p.space == "global" else group.warp.cta.cluster.watch
        for granule in granules(p.address, p.mask, p.size):
            watch.setdefault(granule, []).append(group)
    places = ", ".join(p.describe(machine) for p in group.polls.values())
    group.polls.clear()
    group.warp.grid.scheduler.poll(group, f"a change at {places}", counting=poll.visits >= _PATIENCE)
    return True


@dataclass
class Poll:
    """Last result of a polling load."""

    key: tuple[Any, ...]
    state: list[Any]
    space: str
    address: Any
    mask: int
    size: int
    parts: tuple[Any, ...]
    visits: int = 0

    def describe(self, machine: Any) -> str:
        """Returns the polled address and the value that the first lane read."""
        address = one(self.address, self.mask)
        owner = machine.memory.lookup(address) if self.space == "global" else None
        inside = f" of {owner}" if owner is not None else ""
        values = ", ".join(f"{one(part, self.mask):#x}" for part in self.parts)
        return f"{self.space} {address:#x}{inside}, read {values}"


def _plain(value: Any) -> bool:
    return value.__class__ is int or value.__class__ is bool


def _is_entry_param(f: Function, name: str) -> bool:
    return f.is_entry and any(p.name == name for p in f.params)


def _ld_call_param(
    program: Any, f: Function, ins: Instruction, address: Mem, outputs: Any, width: int, count: int
) -> Op:
    assert isinstance(address.base, Sym)
    kind = shape_of(ins)[0]
    at = address.base.offset + address.offset
    slots = [program.param_slot(f.name, address.base.name, at + n * width, width) for n in range(count)]

    def run(group: Group, mask: int) -> Any:
        parts = tuple(
            0 if r is None else _fit(group.R[s], 8 * width, r, kind[0] == "s")
            for s, r in zip(slots, outputs, strict=True)
        )
        return parts[0] if len(parts) == 1 else parts

    return Op(run, (), outputs)


@instruction("st")
def _st(program: Any, f: Function, ins: Instruction) -> Op:
    kind, width, count = shape_of(ins)
    address, source = ins.operands[:2]
    assert isinstance(address, Mem)
    space = space_of(ins)
    if space == "param":
        return _st_call_param(program, f, ins, address, source, width, count)
    if kind == "b128":
        count, width = 2, 8
    access = Access(ins, space, width, count, is_store=True)
    single = count == 1
    if space == "shared" and (width, count) == (4, 4) and not access.strong:
        return Op(Store(access), (address, source), (), joins=True)

    def run(group: Group, mask: int, address: Any, values: Any) -> None:
        where, at = access.resolve(group, mask, address)
        if access.strong:
            group.warp.grid.checks.strong_store(group, ins, mask, where, at)
        access.store(group, mask, where, at, (values,) if single else values)

    return Op(run, (address, source), (), head=access.strong)


class Store:
    """Ordinary store of four registers to shared memory; `stores` executes several in a row."""

    def __init__(self, access: Access) -> None:
        self.access = access

    def __call__(self, group: Group, mask: int, address: Any, values: tuple[Any, ...]) -> None:
        """Executes the store."""
        self.access.store(group, mask, "shared", address, values)


def stores(
    group: Group, several: tuple[Store, ...], addresses: tuple[Any, ...], values: tuple[tuple[Any, ...], ...]
) -> None:
    """Executes consecutive stores."""
    if not store_run(group, [store.access for store in several], addresses, values):
        for store, address, each in zip(several, addresses, values, strict=True):
            store(group, group.mask, address, each)


def _st_call_param(
    program: Any, f: Function, ins: Instruction, address: Mem, source: Any, width: int, count: int
) -> Op:
    assert isinstance(address.base, Sym)
    at = address.base.offset + address.offset
    slots = [program.param_slot(f.name, address.base.name, at + n * width, width) for n in range(count)]
    operands = source.items if isinstance(source, Vec) else (source,)

    def run(group: Group, mask: int, *values: Any) -> None:
        for slot, value in zip(slots, values, strict=True):
            if value.__class__ is int or value.dtype.itemsize > width:
                value = value & MASK[8 * width]
            if mask != group.mask:
                value = merge_as(8 * max(2, width), mask, value, group.R[slot])
            group.R[slot] = value

    return Op(run, operands)


# -- atomics -------------------------------------------------------------------------------------


_FLOAT: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "min": fmath.fmin, "max": fmath.fmax}


def _float_op(name: str, kind: str) -> Callable[[int, int], int]:
    if name not in _FLOAT:
        raise Unsupported(f"{name} of .{kind}")
    parts = 2 if kind.endswith("x2") else 1
    if kind in ("f32", "f64"):
        dtype, bits = (np.float32, np.uint32) if kind == "f32" else (np.float64, np.uint64)

        def plain(old: int, new: int) -> int:
            a, b = np.array([old, new], bits).view(dtype)
            out = _FLOAT[name](a, b)
            return int(np.asarray(out, dtype).view(bits))

        return plain
    element = kind.removesuffix("x2")
    narrow = formats.f32_to_bf16 if element == "bf16" else formats.f32_to_f16

    def halves(old: int, new: int) -> int:
        out = 0
        for n in range(parts):
            pair = np.array([old >> 16 * n & 0xFFFF, new >> 16 * n & 0xFFFF], np.uint16)
            a, b = formats.widen(pair, element)
            result = _FLOAT[name](a, b)
            out |= int(narrow(np.asarray(result, np.float32))) << 16 * n
        return out

    return halves


def _flushed(add: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Returns `atom.add.f32` of global memory, which flushes subnormals; that of shared memory does not."""

    def flush(pattern: int) -> int:
        return pattern if pattern & 0x7F800000 else pattern & 0x80000000

    return lambda old, new: flush(add(flush(old), flush(new)))


_OPERATIONS = frozenset(("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas"))


def operation_of(ins: Instruction) -> str:
    """Returns the operation of an atomic or a reduction, such as `add`."""
    name = next((p for p in ins.parts if p in _OPERATIONS), None)
    if name is None:
        raise Unsupported(ins.opcode)
    return name


def combine(name: str, kind: str) -> Callable[[int, int], int]:
    """Returns the function of an atomic or reduction on bit patterns: `f(old, operand)`."""
    if kind.startswith(("f", "bf")):
        return _float_op(name, kind)
    width = 8 * TYPE_BYTES[kind]
    mask, sign = MASK[width], kind[0] == "s"

    def number(x: int) -> int:
        return int(signed(x, width)) if sign else x

    table: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: (a + b) & mask,
        "min": lambda a, b: a if number(a) <= number(b) else b,
        "max": lambda a, b: a if number(a) >= number(b) else b,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "exch": lambda a, b: b,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    }  # fmt: skip
    if name not in table:
        raise Unsupported(name)
    return table[name]


@instruction("atom", "red")
def _atom(program: Any, f: Function, ins: Instruction) -> Op:
    if "async" in ins.parts:
        raise Unsupported(ins.opcode)
    kind, width, count = shape_of(ins)
    name = operation_of(ins)
    returns = ins.parts[0] == "atom"
    address, *sources = ins.operands[1:] if returns else ins.operands
    assert isinstance(address, Mem)
    access = Access(ins, space_of(ins), width, count, is_store=True)
    pair_size = 8 * width
    function = None if name == "cas" else combine(name, kind)
    flushing = _flushed(function) if (name, kind) == ("add", "f32") and function is not None else function
    outputs = destinations(ins) if returns else ()
    regs = [None if r is None or width_of(r) == max(16, pair_size) else r for r in outputs]

    def run(group: Group, mask: int, address: Any, operand: Any, swap: Any = None) -> Any:
        where, at = access.resolve(group, mask, address)
        operands = operand if count > 1 else (operand,)
        old = np.zeros((count, 32), DTYPE[pair_size])
        changed = False
        group.warp.grid.checks.atomic(group, ins, mask, where, at)
        apply = flushing if where == "global" else function
        for lane in lane_list(mask):
            lane_mask, place = 1 << lane, one(at, 1 << lane)
            before = access.load(group, lane_mask, where, place)
            before = before if count > 1 else (before,)
            after = []
            for n, b in enumerate(before):
                value = one(operands[n], lane_mask) & MASK[pair_size]
                old[n, lane] = b
                if apply is not None:
                    after.append(apply(b, value))
                else:
                    after.append(one(swap, lane_mask) & MASK[pair_size] if b == value else b)
            if tuple(after) != tuple(before):
                changed = True
                access.store(group, lane_mask, where, place, tuple(after))
        if returns and not changed and _parked(group, ins, mask, where, at, old[0], access.size):
            return BLOCK_RESULT
        if changed:
            group.polls.clear()
        if not returns:
            return None
        values = [_uniform(old[n], mask) for n in range(count)]
        values = [
            v if r is None else resize(v, pair_size, width_of(r)) for v, r in zip(values, regs, strict=True)
        ]
        return values[0] if count == 1 else tuple(values)

    return Op(run, (address, *sources[:2]), outputs, head=True)


def _uniform(row: np.ndarray, mask: int) -> Any:
    return int(row[mask.bit_length() - 1]) if mask & (mask - 1) == 0 else row


# -- hints ---------------------------------------------------------------------------------------


@instruction("prefetch", "prefetchu", "applypriority")
def _hint(program: Any, f: Function, ins: Instruction) -> Op:
    return Op(lambda group, mask: None)


@instruction("createpolicy")
def _createpolicy(program: Any, f: Function, ins: Instruction) -> Op:
    return Op(lambda group, mask: 0, (), destinations(ins)[:1])
