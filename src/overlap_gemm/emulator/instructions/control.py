"""Calls, printf, trap, sleeping and programmatic launch (PTX ISA 9.7.12, 9.7.14, 9.7.19)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from overlap_gemm.emulator.errors import EmulatorError, KernelTrap
from overlap_gemm.emulator.instructions.convergence import gathered
from overlap_gemm.emulator.instructions.emit import BLOCK_RESULT, DIVERGED, Op
from overlap_gemm.emulator.instructions.registry import instruction
from overlap_gemm.emulator.machine.memory import FUNCTION
from overlap_gemm.emulator.machine.order import SCOPES
from overlap_gemm.emulator.machine.warp import Group
from overlap_gemm.emulator.numbers.lanes import FULL, lane_list, one
from overlap_gemm.emulator.ptx.ir import Args, Function, Instruction, Sym


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
    return Op(lambda group, mask: None)


@instruction("setmaxnreg")
def _setmaxnreg(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, registers: int) -> Any:
        if registers % 8 or not 24 <= registers <= 256:
            rule = "a multiple of 8 from 24 to 256 is valid"
            raise EmulatorError(f"line {ins.line}: setmaxnreg {registers}; {rule}")
        # `.sync`: waits until all lanes of the warp are here (PTX ISA, setmaxnreg).
        return None if gathered(group, mask, FULL) else BLOCK_RESULT

    return Op(run, (ins.operands[0],), head=True)


# -- calls ---------------------------------------------------------------------------------------


def make_call(program: Any, f: Function, ins: Instruction) -> Callable[[Group, Any, int], int]:
    """The tail of `call`: `run(group, target, item)` returns the callee's first item."""
    lists = [o for o in ins.operands if isinstance(o, Args)]
    position = next(n for n, o in enumerate(ins.operands) if not isinstance(o, Args))
    returns = lists[0].items if lists and position > 0 else ()
    arguments = lists[-1].items if lists and (position == 0 or len(lists) > 1) else ()

    def name_of(operand: Any) -> str:
        if not isinstance(operand, Sym):
            raise EmulatorError(f"line {ins.line}: call argument {operand} is no .param variable")
        return operand.name

    def run(group: Group, target: Any, item: int) -> int:
        name = target
        if target.__class__ is not str:
            index = one(target, group.mask) - FUNCTION
            if not 0 <= index < len(program.functions):
                raise EmulatorError(
                    f"{group.where()}, line {ins.line}: call of {target:#x}, which is no function"
                )
            name = program.functions[index]
        handler = group.warp.grid.machine.intercepts.get(name) or BUILTIN.get(name)
        if handler is not None:
            return _intercepted(group, handler, item)
        if name not in program.module.functions:
            raise EmulatorError(f"{group.where()}, line {ins.line}: call of the external function {name}")
        callee = program.unit(name)
        group.grow()
        _copy(
            group, [(f.name, name_of(a)) for a in arguments], [(name, p.name) for p in callee.function.params]
        )
        group.stack = (*group.stack, returning(name, callee, item))
        return int(callee.start)

    continuations: dict[tuple[str, int], int] = {}

    def returning(name: str, callee: Any, item: int) -> int:
        """An item that copies the results back and goes on after the call."""
        key = (name, item)
        if key not in continuations:
            pairs = [(name, p.name) for p in callee.function.returns]
            targets = [(f.name, name_of(r)) for r in returns]

            def back(group: Group) -> int:
                _copy(group, pairs, targets)
                return item + 1

            continuations[key] = program.append(back)
        return continuations[key]

    def _copy(group: Group, sources: list[tuple[str, str]], targets: list[tuple[str, str]]) -> None:
        for source, target in zip(sources, targets, strict=True):
            have = program.pieces(*source)
            for piece, slot in program.pieces(*target).items():
                if piece not in have:
                    raise EmulatorError(
                        f"line {ins.line}: parameter {target[1]} is read in pieces that were not stored"
                    )
                group.R[slot] = group.R[have[piece]]

    def _intercepted(group: Group, handler: Callable[..., Any], item: int) -> int:
        values = []
        for a in arguments:
            pieces = sorted(program.pieces(f.name, name_of(a)).items())
            values.append(group.R[pieces[0][1]] if len(pieces) == 1 else tuple(group.R[s] for _, s in pieces))
        result = handler(group, *values)
        if result is BLOCK_RESULT:
            # The call is the end of its item, whose straight-line part must not run twice.
            group.pc = program.append(lambda g: _intercepted(g, handler, item))
            return DIVERGED
        for r in returns:
            for slot in program.pieces(f.name, name_of(r)).values():
                group.R[slot] = result if result is not None else 0
        return item + 1

    return run


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
        base = one(arguments, 1 << lane) & 0xFFFFFFFF

        def read(offset: int, size: int, lane: int = lane, base: int = base) -> bytes:
            row = warp.local_rows(1)[lane]
            return bytes(row[base + offset : base + offset + size])

        line = format_printf(string(one(text, 1 << lane)), read, string)
        warp.grid.machine.printed(warp.grid.launch.rank, line)
    return 0


def _nvshmem_update_mem(group: Group) -> None:
    """How NVSHMEM ends a wait: a fence of gpu scope, on which it relies beyond the GPU; taken at its word."""
    group.warp.agent.fence(SCOPES.index("sys"))


BUILTIN: dict[str, Callable[..., Any]] = {
    "vprintf": _vprintf,
    "_Z36nvshmemi_transfer_syncapi_update_memv": _nvshmem_update_mem,
}
