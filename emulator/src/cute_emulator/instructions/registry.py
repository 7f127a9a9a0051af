"""Registry of instruction implementations: each modelled instruction is registered here, once.

An instruction is either written into the translated Python, or called as an `Op`. `inline` registers the
first kind by the opcode's first part: arithmetic. `instruction` registers a factory of the second kind by the
longest prefix of the opcode: all instructions that access the machine. `inline` comes first if both match.

A name that is registered twice raises an `AssertionError` at import. A new module must be imported in
`instructions/__init__.py`. An instruction without an implementation raises `UnsupportedInstruction` when a
lane executes it. So does one whose factory raises an error of `MALFORMED`, such as a `ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cute_emulator.errors import UnsupportedInstruction
from cute_emulator.instructions.emit import Emitter, Op, Unsupported
from cute_emulator.ptx.ir import Function, Instruction, Pair, Reg, Vec

if TYPE_CHECKING:
    from cute_emulator.machine.warp import Group
    from cute_emulator.translate.program import Program

Factory = Callable[["Program", Function, Instruction], Op]
F = TypeVar("F")
Emit = Callable[[Emitter, Instruction], None]
FACTORIES: dict[str, Factory] = {}
INLINE: dict[str, Emit] = {}


def inline(*names: str) -> Callable[[Emit], Emit]:
    """Registers an emitter of the instructions of these names (opcodes' first parts)."""
    return _registers(INLINE, names)


def instruction(*prefixes: str) -> Callable[[Factory], Factory]:
    """Registers a factory for opcodes that begin with these dotted prefixes."""
    return _registers(FACTORIES, prefixes)


def _registers(table: dict[str, F], names: tuple[str, ...]) -> Callable[[F], F]:
    def register(f: F) -> F:
        for name in names:
            assert name not in table, f"{name} is registered twice"
            table[name] = f
        return f

    return register


def make(program: Program, function: Function, ins: Instruction) -> Op:
    """Returns the `Op` of an instruction; if it is not modelled, one that raises when executed."""
    parts = ins.parts
    for n in range(len(parts), 0, -1):
        prefix = ".".join(parts[:n])
        factory = FACTORIES.get(prefix) or FACTORIES.get(prefix.rpartition("::")[0])
        if factory is not None:
            try:
                return factory(program, function, ins)
            except MALFORMED as why:
                return Op(unsupported(ins, reason(ins, why)))
    return Op(unsupported(ins, ins.opcode))


MALFORMED = (Unsupported, LookupError, TypeError, ValueError, AssertionError, StopIteration)
"""Errors of a factory or an emitter for an instruction that is not modelled, or that is not PTX."""


def reason(ins: Instruction, why: Exception) -> str:
    """Returns the part of an instruction that is not modelled."""
    return str(why) if isinstance(why, Unsupported) else f"{ins.opcode} with these operands"


def unsupported(ins: Instruction, why: str) -> Callable[..., Any]:
    """Returns an implementation that raises an error with the instruction and its line."""

    def run(group: Group, mask: int, *inputs: Any) -> Any:
        raise UnsupportedInstruction(f"{group.where()}, line {ins.line}: {ins.text}: {why} is not modelled")

    return run


def destinations(ins: Instruction) -> tuple[Reg | None, ...]:
    """Returns the registers of the first operand."""
    d = ins.operands[0]
    if isinstance(d, Vec):
        items = d.items
    elif isinstance(d, Pair):
        items = (d.first, d.second)
    else:
        items = (d,)
    out = []
    for item in items:
        if item is not None and not isinstance(item, Reg):
            raise Unsupported(f"destination {item}")
        out.append(item)
    return tuple(out)
