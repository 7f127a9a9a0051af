"""Tensor maps that a kernel changes: `tensormap.replace`, `tensormap.cp_fenceproxy` (PTX ISA 9.7.9.26, .28).

The order of a change and a TMA operation that reads the map (`fence.proxy.tensormap`) is not checked.
"""

from __future__ import annotations

from typing import Any

from cute_emulator.instructions.bulk import threads
from cute_emulator.instructions.emit import Op, Unsupported
from cute_emulator.instructions.memory import space_of
from cute_emulator.instructions.registry import instruction
from cute_emulator.instructions.sync import fail
from cute_emulator.machine.access import Access
from cute_emulator.machine.warp import Group
from cute_emulator.machine.window import OFFSET
from cute_emulator.ptx.ir import Function, Imm, Instruction
from cute_emulator.units.tma_encode import FIELDS, field_bits


def _word(group: Group, space: str, address: int) -> int:
    """Returns the word that contains a field; rewriting its other bits is no access that could race."""
    if space == "global":
        return int.from_bytes(group.warp.grid.machine.memory.bytes_at(address, 4), "little")
    at = address & OFFSET
    return int.from_bytes(group.warp.cta.cluster.owner(address).smem[at : at + 4].tobytes(), "little")


@instruction("tensormap.replace")
def _replace(program: Any, f: Function, ins: Instruction) -> Op:
    name = ins.parts[3]
    if name not in FIELDS:
        raise Unsupported(f"field {name}")
    if (name in ("global_address", "global_stride")) != (ins.parts[-1] == "b64"):
        raise Unsupported(f"field {name} of .{ins.parts[-1]}")
    address, *place, value = ins.operands
    ordinal = place[0].value if place and isinstance(place[0], Imm) else 0
    space = space_of(ins)
    store = Access(ins, space, 4, 1, is_store=True)

    def run(group: Group, mask: int, address: Any, value: Any) -> None:
        for lane, (at, new) in threads(mask, (address, value)):
            try:
                pieces = field_bits(name, ordinal, new)
            except ValueError as why:
                raise fail(group, ins, str(why)) from None
            for word, shift, width, piece in pieces:
                where, place = store.resolve(group, 1 << lane, at + 4 * word)
                old = _word(group, where, place)
                hole = ((1 << width) - 1) << shift
                store.store(group, 1 << lane, where, place, (old & ~hole | piece << shift,))

    return Op(run, (address, value))


@instruction("tensormap.cp_fenceproxy")
def _copy(program: Any, f: Function, ins: Instruction) -> Op:
    load, store = (Access(ins, space, 8, 2, space == "global") for space in ("shared", "global"))

    def run(group: Group, mask: int, to: Any, source: Any) -> None:
        group.warp.grid.checks.fence(group, ins)  # the copy is a release
        lane, (target, start) = next(threads(mask, (to, source)))
        for at in range(0, 128, 16):
            words = load.load(group, 1 << lane, "shared", start + at)
            store.store(group, 1 << lane, "global", target + at, tuple(map(int, words)))

    return Op(run, ins.operands[:2])
