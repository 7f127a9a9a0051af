"""Calls, printf, trap, sleeping and programmatic launch (PTX ISA 9.7.12, 9.7.13.13, 9.7.19)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from cute_emulator.errors import EmulatorError, KernelTrap
from cute_emulator.instructions.convergence import gathered
from cute_emulator.instructions.emit import BLOCK_RESULT, DIVERGED, Op
from cute_emulator.instructions.registry import instruction
from cute_emulator.machine.memory import FUNCTION
from cute_emulator.machine.order import SCOPES
from cute_emulator.machine.pools import Registers
from cute_emulator.machine.residency import REGISTERS_PER_SM
from cute_emulator.machine.warp import Group
from cute_emulator.machine.window import WINDOW
from cute_emulator.numbers.lanes import FULL, lane_list, one
from cute_emulator.ptx.ir import Args, Function, Instruction, Sym


@instruction("trap", "brkpt")
def _trap(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        lanes = lane_list(mask)
        place = group.warp.grid.program.place(ins.line)
        where = f"{group.where()}, line {place}: trap in lane(s) {lanes[0]}..{lanes[-1]}"
        raise KernelTrap(where, ins.line)

    return Op(run)


@instruction("nanosleep")
def _nanosleep(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, duration: Any) -> Any:
        if group.token == "slept":
            group.token = None
            return None
        scheduler = group.warp.grid.scheduler
        group.token = "slept"
        scheduler.sleep(group, scheduler.clock + max(1, one(duration, mask)))
        return BLOCK_RESULT

    return Op(run, (ins.operands[0],), (), head=True)


@instruction("griddepcontrol")
def _griddepcontrol(program: Any, f: Function, ins: Instruction) -> Op:
    if ins.parts[1] == "launch_dependents":
        return Op(lambda group, mask: group.warp.grid.trigger(group.warp.cta), head=True)

    def wait(group: Group, mask: int) -> Any:
        before = group.warp.grid.prerequisite
        if before is not None and not before.is_over:
            before.over.park(group, f"the end of {before}, its prerequisite")
            return BLOCK_RESULT
        group.warp.grid.checks.prerequisites_done(group)
        return None

    return Op(wait, head=True)


@instruction("setmaxnreg")
def _setmaxnreg(program: Any, f: Function, ins: Instruction) -> Op:
    name = f"{ins.parts[1]} {{}}"

    def run(group: Group, mask: int, registers: int) -> Any:
        if registers % 8 or not 24 <= registers <= 256:
            rule = "a multiple of 8 from 24 to 256 is valid"
            raise EmulatorError(f"line {ins.line}: setmaxnreg {registers}; {rule}")
        # `.sync`: waits until all lanes of the warp are here (PTX ISA, setmaxnreg).
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        warp, cta, need = group.warp, group.warp.cta, group.warp.grid.footprint
        if cta.registers is None:
            total = need.registers or REGISTERS_PER_SM
            cta.registers = Registers(total, len(cta.warps), total // need.threads)
        if not cta.registers.change(warp, registers, ins.line, name.format(registers)):
            have = cta.registers.each[warp.index]
            free = f"{cta.registers.free} of the CTA's {need.registers} are free"
            cta.registers.park(group, f"{32 * (registers - have)} registers; {free}")
            return BLOCK_RESULT
        return None

    return Op(run, (ins.operands[0],), head=True)


# -- calls ---------------------------------------------------------------------------------------


Param = tuple[str, str]
""".param variable: its function and its name."""


class Call:
    """Tail of a `call`: maps the target and the call's item to the callee's first item."""

    def __init__(self, program: Any, caller: Function, ins: Instruction) -> None:
        self._program, self._caller, self._line = program, caller.name, ins.line
        target = next(n for n, o in enumerate(ins.operands) if not isinstance(o, Args))
        self._results = [x for o in ins.operands[:target] if isinstance(o, Args) for x in o.items]
        self._arguments = [x for o in ins.operands[target:] if isinstance(o, Args) for x in o.items]
        self._returns: dict[tuple[str, int], int] = {}

    def __call__(self, group: Group, target: Any, item: int) -> int:
        """Calls `target`, the name of a function, or an address by lane."""
        program, name = self._program, self._name(group, target)
        handler = group.warp.grid.machine.intercepts.get(name) or BUILTIN.get(name)
        if handler is not None:
            return self._intercepted(group, handler, item)
        if name not in program.module.functions:
            raise EmulatorError(
                f"{group.where()}, line {self._line}: call of {name}, which has no definition"
            )
        callee = program.unit(name)
        if name in (program.entry.name, *map(program.callees.get, group.stack)):
            raise EmulatorError(
                f"{group.where()}, line {self._line}: {name} calls itself, which is not modelled"
            )
        group.grow()
        self._copy(
            group, self._variables_of(self._arguments), [(name, p.name) for p in callee.function.params]
        )
        group.stack = (*group.stack, self._return_item(callee.function, item))
        return int(callee.start)

    def _name(self, group: Group, target: Any) -> str:
        if target.__class__ is str:
            return str(target)
        functions, index = self._program.functions, one(target, group.mask) - FUNCTION
        if not 0 <= index < len(functions):
            what = f"call of {one(target, group.mask):#x}, which is not the address of a function"
            raise EmulatorError(f"{group.where()}, line {self._line}: {what}")
        return str(functions[index])

    def _variables_of(self, operands: list[Any]) -> list[Param]:
        """Returns the caller's variables that a list of operands names."""
        for operand in operands:
            if not isinstance(operand, Sym):
                raise EmulatorError(f"line {self._line}: call argument {operand} is not a .param variable")
        return [(self._caller, operand.name) for operand in operands]

    def _copy(self, group: Group, sources: list[Param], targets: list[Param]) -> None:
        for source, target in zip(sources, targets, strict=True):
            have = self._program.pieces(*source)
            for piece, slot in self._program.pieces(*target).items():
                if piece not in have:
                    raise EmulatorError(
                        f"line {self._line}: parameter {target[1]} is read in pieces that were not stored"
                    )
                group.R[slot] = group.R[have[piece]]

    def _return_item(self, callee: Function, item: int) -> int:
        """Returns an item that copies the results back and continues after the call."""
        key = (callee.name, item)
        if key not in self._returns:
            results, targets = (
                [(callee.name, p.name) for p in callee.returns],
                self._variables_of(self._results),
            )

            def back(group: Group) -> int:
                self._copy(group, results, targets)
                return item + 1

            self._returns[key] = self._program.append(back)
            self._program.callees[self._returns[key]] = callee.name
        return self._returns[key]

    def _intercepted(self, group: Group, handler: Callable[..., Any], item: int) -> int:
        """Calls a function that the emulator implements."""
        program, values = self._program, []
        for param in self._variables_of(self._arguments):
            pieces = [group.R[slot] for _, slot in sorted(program.pieces(*param).items())]
            values.append(pieces[0] if len(pieces) == 1 else tuple(pieces))
        result = handler(group, *values)
        if result is BLOCK_RESULT:
            # The call is the end of its item, whose straight-line part must not run twice.
            group.pc = program.append(lambda g: self._intercepted(g, handler, item))
            return DIVERGED
        for param in self._variables_of(self._results):
            for slot in program.pieces(*param).values():
                group.R[slot] = result if result is not None else 0
        return item + 1


# -- printf --------------------------------------------------------------------------------------

_SPEC = re.compile(r"%[-+ #0]*(?:\d+|\*)?(?:\.\d+)?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGaAcsp%])")


def format_printf(text: str, read: Callable[[int, int], bytes], string: Callable[[int], str]) -> str:
    """Formats as C does; `read(offset, bytes)` reads the arguments, `string(address)` a C string."""
    at = 0

    def convert(m: re.Match[str]) -> str:
        nonlocal at
        length, kind = m.groups()
        if kind == "%":
            return "%"
        size = 8 if kind in "eEfFgGaAsp" or length in ("l", "ll", "z", "j", "t") else 4
        at = -(-at // size) * size
        raw = read(at, size)
        at += size
        spec = m.group().replace(length, "") if length else m.group()
        if kind in "eEfFgGaA":
            value: Any = struct.unpack("<d", raw)[0]
            return (spec.replace("F", "f").replace("a", "e").replace("A", "E")) % value
        if kind == "s":
            return spec % string(int.from_bytes(raw, "little"))
        if kind == "c":
            return chr(raw[0])
        value = int.from_bytes(raw, "little", signed=kind in "di")
        return f"0x{value:x}" if kind == "p" else spec.replace("u", "d") % value

    return _SPEC.sub(convert, text)


def _vprintf(group: Group, text: Any, arguments: Any) -> int:
    warp = group.warp
    memory = warp.grid.machine.memory

    def string(address: int) -> str:
        allocation = memory.find(address, 1)
        start = address - allocation.base
        return bytes(allocation.raw[start:]).split(b"\0")[0].decode(errors="replace")

    for lane in lane_list(group.mask):
        base = one(arguments, 1 << lane) & WINDOW

        def read(offset: int, size: int, lane: int = lane, base: int = base) -> bytes:
            row = warp.local_rows(1)[lane]
            return bytes(row[base + offset : base + offset + size])

        line = format_printf(string(one(text, 1 << lane)), read, string)
        warp.grid.machine.printed(line)
    return 0


def _nvshmem_update_mem(group: Group) -> None:
    """Executes the end of NVSHMEM's waits.

    It is a fence of gpu scope that NVSHMEM uses beyond the GPU; the emulator models it as .sys.
    """
    group.warp.agent.fence(SCOPES.index("sys"))


BUILTIN: dict[str, Callable[..., Any]] = {
    "vprintf": _vprintf,
    "_Z36nvshmemi_transfer_syncapi_update_memv": _nvshmem_update_mem,
}
