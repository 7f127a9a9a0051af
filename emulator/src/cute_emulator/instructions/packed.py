"""`add`, `min` and `max` of two 16-bit integers in one register (PTX ISA 9.7.1.1, 9.7.1.13, 9.7.1.14)."""

from __future__ import annotations

from cute_emulator.instructions.emit import Emitter
from cute_emulator.instructions.registry import Emit
from cute_emulator.instructions.scalar import only, type_of
from cute_emulator.ptx.ir import Instruction

PAIRS = ("u16x2", "s16x2")


def or_pairs(name: str, integer: Emit) -> Emit:
    """Returns an emitter of `name` for pairs that delegates other types to `integer`."""

    def emit(e: Emitter, ins: Instruction) -> None:
        if type_of(ins) not in PAIRS:
            integer(e, ins)
            return
        only(ins, "relu")
        d, a, b = ins.operands
        value = f"pairwise('{name}', {e.i(a, 32)}, {e.i(b, 32)}, {type_of(ins)[0] == 's'})"
        if "relu" in ins.parts:
            value = f"pairwise('max', {e.new(value)}, 0, True)"
        e.assign(d, value, 32)

    return emit
