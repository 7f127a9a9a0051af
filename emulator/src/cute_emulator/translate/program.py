"""Translation of a PTX module into items, the units that the scheduler runs.

An item is a Python function of a group: an optional instruction that may wait, then straight-line
instructions, then an optional branch. An item returns the next item's number, or `BLOCK`, `DIVERGED` or
`EXITED`. A function is translated at its first call, so that large modules load fast. An instruction that is
not modelled is translated to a call that raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from cute_emulator import instructions
from cute_emulator.errors import EmulatorError, UnsupportedInstruction
from cute_emulator.instructions import INLINE, MALFORMED, reason
from cute_emulator.instructions.emit import (
    DIVERGED,
    EXITED,
    Emitter,
    Op,
    namespace,
    width_of,
)
from cute_emulator.instructions.memory import stores
from cute_emulator.machine.memory import CONST, FUNCTION, PARAM
from cute_emulator.machine.window import SMEM_BASE
from cute_emulator.numbers import bits, fmath
from cute_emulator.numbers.lanes import FULL
from cute_emulator.numbers.lanes import bits as lane_bits
from cute_emulator.ptx.ir import Function, Instruction, Module, Reg, Sym
from cute_emulator.ptx.parse import parse
from cute_emulator.source import place
from cute_emulator.translate.flow import TERMINATORS, Flow, Step, registers_of

if TYPE_CHECKING:
    from cute_emulator.machine.warp import Group


@dataclass
class _Unit:
    """Translated function, with its first item and the base of its registers."""

    function: Function
    base: int
    start: int
    end: int = 0


class Program:
    """Items of a module, for one entry.

    Attributes:
        code: The items.
        cost: Instructions in each item.
        start: First item of the entry.
        initial: Register file of a fresh warp.
        widths: Bits of each register (0: predicate).
        static_smem: Bytes of static shared memory; dynamic shared memory follows.
        smem_names: The source's names of offsets in shared memory, by its end and the offset (`Cta.called`).
        base: Place in the register file of the first register of the function being translated.
        callees: The function that each item made for a call returns from.
    """

    def __init__(self, ptx: str, entry: str) -> None:
        self.module: Module = parse(ptx)
        if entry not in self.module.functions:
            raise KeyError(f"no .entry {entry} in this PTX module")
        self.base = 0
        self.code: list[Any] = []
        self.cost: list[int] = []
        self.initial: list[Any] = []
        self.widths: list[int] = []
        self._live_in: list[tuple[int, ...]] = []
        self._lines: list[tuple[Instruction, ...]] = []
        self._units: dict[str, _Unit] = {}
        self.callees: dict[int, str] = {}
        self._slots: dict[tuple[str, str, int, int], int] = {}
        self._hammocks: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.entry = self.module.functions[entry]
        self.smem_symbols, self.static_smem = self._shared(self.entry)
        self.smem_names: dict[tuple[int, int], str] = {}
        self.local_symbols: dict[str, int] = {}
        self.local_bytes = 0
        self.param_symbols, self.param_bytes = self._params(self.entry)
        self.functions = [*self.module.functions, *sorted(self.module.declared)]
        self.start = self.unit(entry).start

    # -- addresses -------------------------------------------------------------------------------

    def _shared(self, entry: Function) -> tuple[dict[str, int], int]:
        symbols, offset, dynamic = {}, SMEM_BASE, []
        for v in (
            *self.module.variables.values(),
            *(v for f in self.module.functions.values() if f is entry or not f.is_entry for v in f.variables),
        ):
            if v.space == "shared":
                if v.extern:
                    dynamic.append(v)
                    continue
                offset = -(-offset // v.align) * v.align
                symbols[v.name] = offset
                offset += v.nbytes
        align = max((v.align for v in dynamic), default=1)
        static = offset - SMEM_BASE
        offset = -(-offset // align) * align
        for v in dynamic:
            symbols[v.name] = offset
        return symbols, (offset - SMEM_BASE if dynamic else static)

    @staticmethod
    def _params(entry: Function) -> tuple[dict[str, int], int]:
        symbols, offset = {}, 0
        for p in entry.params:
            offset = -(-offset // p.align) * p.align
            symbols[p.name] = offset
            offset += p.nbytes
        return symbols, offset

    def symbol_addresses(self) -> dict[str, int]:
        """Addresses that do not depend on the launch."""
        out = {n: PARAM + o for n, o in self.param_symbols.items()}
        out.update({n: FUNCTION + i for i, n in enumerate(self.functions)})
        out.update(self.local_symbols)
        offset = 0
        for v in self.module.variables.values():
            if v.space == "const":
                offset = -(-offset // v.align) * v.align
                out[v.name] = CONST + offset
                offset += v.nbytes
        return out

    def instructions_of(self, item: int) -> tuple[Instruction, ...]:
        """Returns the instructions of an item."""
        return self._lines[item]

    def translated(self) -> list[Function]:
        """Returns the functions that were translated: the entry, and those that it called."""
        return [unit.function for unit in self._units.values()]

    # -- translation -----------------------------------------------------------------------------

    def unit(self, name: str) -> _Unit:
        """Returns a function's unit; translates the function at the first call."""
        if name not in self._units:
            self._translate(self.module.functions[name])
        return self._units[name]

    def param_slot(self, function: str, name: str, offset: int, width: int) -> int:
        """Returns the register of a piece of a call parameter."""
        key = (function, name, offset, width)
        if key not in self._slots:
            self._slots[key] = len(self.initial)
            self.initial.append(0)
            self.widths.append(8 * max(2, width))
        return self._slots[key]

    def pieces(self, function: str, name: str) -> dict[tuple[int, int], int]:
        """Returns the registers of a call parameter's pieces, by (offset, bytes)."""
        return {k[2:]: slot for k, slot in self._slots.items() if k[:2] == (function, name)}

    def _translate(self, f: Function) -> None:
        base = self.base = len(self.initial)
        self.initial.extend([0] * f.registers)
        self.widths.extend([64] * f.registers)
        for v in f.variables:
            if v.space == "local":
                self.local_bytes = -(-self.local_bytes // v.align) * v.align
                self.local_symbols[v.name] = self.local_bytes
                self.local_bytes += v.nbytes
        start = len(self.code)
        unit = self._units[f.name] = _Unit(f, base, start)
        flow = Flow(f, [self._step(f, ins) for ins in f.instructions], start)
        for item, written in flow.hammocks().items():
            self._hammocks[item] = item + 1, tuple(sorted(base + slot for slot in written))
        names = namespace() | fmath.FUNCTIONS | bits.FUNCTIONS | {"stores": stores}
        symbols = self.symbol_addresses()
        text = []
        for n, (steps, before, after) in enumerate(zip(flow.items, flow.live_in, flow.live_out, strict=True)):
            emitter = Emitter(base, symbols, self.smem_symbols, names)
            text.append(
                self._item(emitter, f, start + n, steps, flow.targets, {base + slot for slot in after})
            )
            self.cost.append(len(steps))
            self._lines.append(tuple(s.ins for s in steps))
            self._live_in.append(tuple(sorted(base + slot for slot in before)))
        for source in text:
            exec(_compiled(source), names)  # noqa: S102
        self.code.extend(names[f"item{start + n}"] for n in range(len(text)))
        self.append(_fell_off)
        unit.end = len(self.code)

    def _step(self, f: Function, ins: Instruction) -> Step:
        for r in (r for o in ins.operands for r in registers_of(o)):
            self.widths[self.base + r.slot] = width_of(r)
            if r.type == "pred":
                self.initial[self.base + r.slot] = False
        name = ins.parts[0]
        if name in TERMINATORS:
            op: Op | None = instructions.make(self, f, ins) if name in ("trap", "brkpt") else None
            uses = [r for o in ins.operands for r in registers_of(o)] if name != "call" else []
            if name == "call" and isinstance(target := _call_target(ins), Reg):
                uses = [target]
            defs: list[Reg] = []
        elif name in INLINE:
            op = None
            defs, uses = registers_of(ins.operands[0]), [r for o in ins.operands[1:] for r in registers_of(o)]
        else:
            op = instructions.make(self, f, ins)
            uses = [r for o in op.inputs for r in registers_of(o)] + list(op.uses)
            defs = [r for r in op.outputs if r is not None] + list(op.defs)
        if ins.guard is not None:
            uses = [*uses, ins.guard, *defs]
        return Step(ins, op, tuple(r.slot for r in uses), tuple(r.slot for r in defs))

    def _item(
        self, e: Emitter, f: Function, number: int, steps: list[Step], targets: dict[str, int], live: set[int]
    ) -> str:
        tail = steps[-1] if steps[-1].ends_item else None
        for s in steps[: -1 if tail else None]:
            self._emit(e, s)
        if tail is None:
            e.flush(live)
            e.lines.append(f"return {number + 1}")
        else:
            self._tail(e, f, number, tail, targets, live)
        return e.source(f"item{number}")

    def _emit(self, e: Emitter, s: Step) -> None:
        ins = s.ins
        if ins.guard is not None:
            value = e.p(ins.guard)
            e.guard = e.new(f"{value} ^ True") if ins.guard_negated else value
        saved = len(e.lines), dict(e.forms), dict(e.defs)
        try:
            if s.op is not None:
                e.call(s.op, ins)
            else:
                INLINE[ins.parts[0]](e, ins)
        except MALFORMED as why:
            del e.lines[saved[0] :]
            e.forms, e.defs = saved[1], saved[2]
            e.call(Op(instructions.unsupported(ins, reason(ins, why))), ins)
        finally:
            e.guard = None

    def _tail(
        self, e: Emitter, f: Function, number: int, s: Step, targets: dict[str, int], live: set[int]
    ) -> None:
        ins, name = s.ins, s.ins.parts[0]
        taken = "True" if ins.guard is None else e.p(ins.guard)
        if ins.guard is not None and ins.guard_negated:
            p, taken = taken, e.new(f"{taken} ^ True")
            e.opposites[taken] = p
        if name == "bra":
            assert isinstance(ins.operands[0], Sym)
            target = targets[ins.operands[0].name]
            e.flush(live)
            if ins.guard is None:
                e.lines.append(f"return {target}")
                return
            flip = taken in e.opposites
            p = e.opposites[taken] if flip else taken
            yes, no = (number + 1, target) if flip else (target, number + 1)
            e.lines.append(f"if {p}.__class__ is bool: return {yes} if {p} else {no}")
            e.lines.append(f"return branch(g, {p}, {number}, {target}, {FULL if flip else 0})")
            e.names["branch"] = self.branch
            return
        if ins.guard is not None and name not in ("ret", "exit", "trap", "brkpt"):
            e.flush(live)
            e.guard = taken
            e.call(Op(instructions.unsupported(ins, "a guard on this control instruction")), ins)
            e.lines.append(f"return {number + 1}")
        elif name == "brx":
            table = ins.operands[1]
            assert isinstance(table, Sym)
            index = e.i(ins.operands[0], 32)
            e.flush(live)
            places = e.constant(tuple(targets[t] for t in f.branch_targets[table.name]))
            e.names["switch"] = self.switch
            e.lines.append(f"return switch(g, {index}, {places})")
        elif name in ("ret", "exit"):
            e.flush(live)
            e.names["leave"] = self.leave
            e.lines.append(f"return leave(g, {taken}, {number}, {name == 'exit' or f.is_entry})")
        elif name == "call":
            callee = _call_target(ins)
            value = e.i(callee) if isinstance(callee, Reg) else repr(callee.name)
            e.flush(live)
            call = e.constant(instructions.Call(self, f, ins), "h")
            e.lines.append(f"return {call}(g, {value}, {number})")
        else:
            e.flush(live)
            e.guard = taken if ins.guard is not None else None
            assert s.op is not None
            e.call(s.op, ins)
            e.lines.append(f"return {number + 1}")

    # -- control at run time ---------------------------------------------------------------------

    def branch(self, group: Group, p: Any, number: int, target: int, flip: int) -> int:
        """Executes a conditional branch whose predicate differs between lanes, negated by `flip`."""
        taken = (lane_bits(p) ^ flip) & group.mask
        if taken == group.mask:
            return target
        if not taken:
            return number + 1
        hammock = self._hammocks.get(number)
        scheduler = group.warp.grid.scheduler
        if hammock is not None and not scheduler.schedule.lanes:
            inside, written = hammock
            mask, R = group.mask, group.R
            before = [R[slot] for slot in written] if written else ()
            group.mask = mask & ~taken
            scheduler.items(self)[inside](group)
            scheduler.executed += self.cost[inside]
            for slot, old in zip(written, before, strict=True) if written else ():
                R[slot] = group.warp.grid.joined(slot, group.mask, R[slot], old)
            group.mask = mask
            return target
        group.split(taken, target, number + 1)
        return DIVERGED

    def switch(self, group: Group, index: Any, places: tuple[int, ...]) -> int:
        """Executes `brx.idx`."""
        if index.__class__ is int:
            values = {0: index}
        else:
            values = {lane: int(index[lane]) for lane in range(32) if group.mask >> lane & 1}
        if (last := max(values.values())) >= len(places):
            raise IndexError(f"brx.idx: index {last} is out of range, the list has {len(places)} targets")
        if index.__class__ is int:
            return places[index]
        groups: dict[int, int] = {}
        for lane, value in values.items():
            groups[places[value]] = groups.get(places[value], 0) | 1 << lane
        (first, _), *others = groups.items()
        for target, mask in others:
            group.split(mask, target, first)
        return DIVERGED if others else first

    def leave(self, group: Group, p: Any, number: int, ends: bool) -> int:
        """Executes `ret` and `exit`."""
        taken = lane_bits(p) & group.mask
        if not taken:
            return number + 1
        if taken != group.mask:
            group.split(taken, number, number + 1)
            return DIVERGED
        if ends or not group.stack:
            group.warp.exit(group)
            return EXITED
        *rest, back = group.stack
        group.stack = tuple(rest)
        return back

    def append(self, item: Any) -> int:
        """Adds an item made at run time."""
        self.code.append(item)
        self.cost.append(0)
        self._lines.append(())
        self._live_in.append(())
        return len(self.code) - 1

    # -- for the scheduler and messages ----------------------------------------------------------

    def live_in(self, item: int) -> tuple[int, ...]:
        """Returns the registers live at an item; inside calls the callers' registers are live, too."""
        return self._live_in[item] if not self._called(item) else tuple(range(len(self.initial)))

    def _called(self, item: int) -> bool:
        return item >= self._units[self.entry.name].end

    def text_at(self, item: int) -> str:
        """Returns the first instruction of an item."""
        lines = self._lines[item]
        if not lines:
            return "the end of the function"
        return f"line {self.place(lines[0].line)}: {_short(lines[0].text)}"

    def place(self, line: int) -> str:
        """Returns a PTX line, with the line of the Python source if it is known."""
        return place(self.module.text, line)

    def locate(self, error: Exception, group: Group, item: int) -> EmulatorError:
        """Wraps an unexpected exception with its place."""
        lines = self._lines[item]
        span = f"lines {self.place(lines[0].line)} to {lines[-1].line}" if lines else "?"
        return EmulatorError(
            f"{group.where()}, {span} ({_short(lines[0].text)}): {type(error).__name__}: {error}",
            lines[0].line if lines else 0,
        )


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _call_target(ins: Instruction) -> Reg | Sym:
    for operand in ins.operands:
        if isinstance(operand, Reg | Sym):
            return operand
    raise UnsupportedInstruction(f"line {ins.line}: {ins.text}: no call target")


def _fell_off(group: Group) -> int:
    group.warp.exit(group)
    return EXITED


@lru_cache(maxsize=8192)
def _compiled(source: str) -> CodeType:
    """Compiles an item's source, cached.

    Modules that differ in one instruction, as mutations do, share most items.
    """
    return compile(source, "<ptx>", "exec")


@lru_cache(maxsize=32)
def program(ptx: str, entry: str) -> Program:
    """Returns the translated entry, cached."""
    return Program(ptx, entry)
