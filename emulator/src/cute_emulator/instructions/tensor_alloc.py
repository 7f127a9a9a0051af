"""Allocation of tensor memory (PTX ISA 9.7.16.7).

The number of columns is a power of two from 32 to 512. If the SM has too few free columns, `tcgen05.alloc`
waits until its resident CTAs have freed enough (`machine.pools`). Another number of columns is an error, and
so is an `alloc` of a CTA after its `relinquish_alloc_permit`. A `dealloc` of columns that are not part of one
allocation is an error, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_emulator.instructions.convergence import gathered
from cute_emulator.instructions.emit import BLOCK_RESULT, Op
from cute_emulator.instructions.registry import instruction
from cute_emulator.instructions.sync import fail
from cute_emulator.instructions.tensor import cells_of, group_of, grouped, of_all, touch
from cute_emulator.machine.events import TensorMemoryAllocated
from cute_emulator.machine.pools import COLUMNS, allocate
from cute_emulator.machine.warp import Group
from cute_emulator.machine.window import OFFSET
from cute_emulator.numbers.lanes import FULL, one
from cute_emulator.ptx.ir import Function, Instruction


@instruction("tcgen05.alloc")
def _alloc(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, address: Any, columns: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        cta, n = group.warp.cta, of_all(group, ins, columns, mask, "nCols")
        if n & (n - 1) or not 32 <= n <= COLUMNS:
            raise fail(group, ins, f"{n} columns; a power of two from 32 to 512 is valid")
        if not cta.may_alloc:
            raise fail(group, ins, "allocates after tcgen05.relinquish_alloc_permit")
        first = allocate([cta, *(c for c in group_of(cta, ins) if c is not cta)], n)
        if first is None:
            taken = f"{int(cta.columns.taken.sum())} of SM {cta.sm}'s {COLUMNS} are taken"
            cta.columns.park(group, f"{n} free columns of tensor memory; {taken}")
            return BLOCK_RESULT
        cta.tmem_owner[first : first + n] = first + 1
        cta.tmem_alloc_line = ins.line
        grouped(group, ins)
        if "cta_group::2" in ins.parts:
            cta.grid.checks.emit(TensorMemoryAllocated(group, ins.line))
        offset = one(address, mask) & OFFSET
        if cta.grid.checks.shared is not None:
            cta.grid.checks.shared.word(group.warp.agent, cta, ins.line, False, offset, 4, True)
        cta.tensor_cells.settle()
        cta.tensor_cells.entries[:, :, first : first + n] = 0
        cta.smem[offset : offset + 4] = np.frombuffer(first.to_bytes(4, "little"), np.uint8)
        return None

    return Op(run, ins.operands[:2], (), head=True)


@instruction("tcgen05.dealloc")
def _dealloc(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, address: Any, columns: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        cta, n, first = group.warp.cta, one(columns, mask), one(address, mask) & 0xFFFF
        if not (cta.tmem_owner[first : first + n] == first + 1).all():
            raise fail(group, ins, f"columns {first}..{first + n - 1} are not one allocation")
        grouped(group, ins)
        cta.grid.engine.settle()
        cta.grid.checks.tmem_use(
            cta, ("ld", "st"), first, n, (0, 1), f"tcgen05.dealloc of {group.warp}", ins.line
        )
        touch(group, cta, cells_of(first, n), ins.line, True, frees=True)
        cta.tmem_owner[first : first + n] = 0
        cta.tmem_freed[first : first + n] = group.warp.index + 1, ins.line
        cta.columns.free(first, n)
        return None

    return Op(run, ins.operands[:2], (), head=True)


@instruction("tcgen05.relinquish_alloc_permit")
def _relinquish(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        grouped(group, ins)
        group.warp.cta.may_alloc = False

    return Op(run)
