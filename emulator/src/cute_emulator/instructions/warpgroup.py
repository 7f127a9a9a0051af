"""Tensor-core instructions with register operands: wgmma, mma, ldmatrix, stmatrix (PTX ISA 9.7.14, 9.7.15).

A `wgmma.mma_async` is issued once for its warpgroup, when all four warps have executed it. Its product is an
event of the async engine (`machine.asyncq`); `machine.wgmmas` contains those in flight. Until the wait their
accumulator registers contain `POISON`, a NaN.
"""

from __future__ import annotations

from functools import lru_cache
from operator import is_
from typing import Any

import numpy as np

from cute_emulator.instructions.convergence import gathered
from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported
from cute_emulator.instructions.registry import destinations, instruction
from cute_emulator.instructions.sync import fail, within
from cute_emulator.machine.access import Access
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.events import WgmmaChanged, WgmmaUnfenced
from cute_emulator.machine.shared_races import Unit
from cute_emulator.machine.warp import Group, Warp
from cute_emulator.machine.wgmmas import Accumulator, Product
from cute_emulator.numbers.lanes import FULL, LANES, as_array, one
from cute_emulator.ptx.ir import Function, Imm, Instruction, Reg, Vec
from cute_emulator.units import mma
from cute_emulator.units.wgmma import WARP_ROWS, Wgmma

POISON = 0x7FFFDEAD  # a NaN, in accumulator registers that are in flight


def rows_of(values: Any) -> np.ndarray:
    """Returns registers of a warp as `uint32 [registers, 32]`."""
    values = values if isinstance(values, tuple | list) else (values,)
    if int in map(type, values):
        values = [as_array(v, 32) for v in values]
    return np.concatenate(values).reshape(-1, LANES)


# -- wgmma ---------------------------------------------------------------------------------------


def _unit(warp: Warp) -> Unit:
    """Returns the unit of a warpgroup's wgmmas, as readers of shared memory."""
    unit = warp.wgmmas.unit
    if unit is None:
        cta, group = warp.cta, warp.index // 4
        name = f"warpgroup {group} of {cta}"
        unit = warp.wgmmas.unit = cta.cluster.unit(cta.wgmma_units, str(group), "a wgmma", name, "wgmma")
    return unit


@instruction("wgmma.fence")
def _fence(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        group.warp.wgmmas.fenced = True

    return Op(run)


@instruction("wgmma.mma_async")
def _wgmma(program: Any, f: Function, ins: Instruction) -> Op:
    d, a, b, scale_d = ins.operands[:4]
    assert isinstance(d, Vec)
    shape, in_registers = _static(ins), isinstance(a, Vec)
    registers = tuple(r for r in d.items if isinstance(r, Reg))
    slots = tuple(program.base + r.slot for r in registers)
    a_slots = [program.base + r.slot for r in a.items if isinstance(r, Reg)] if isinstance(a, Vec) else []
    decode = lru_cache(maxsize=256)(shape.decode)  # a mainloop reuses the same stages

    def run(group: Group, mask: int, a: Any, b: Any, scale_d: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        warp, cta = group.warp, group.warp.cta
        key = (warp.index // 4, warp.wgmmas.sequence)
        warp.wgmmas.sequence += 1
        product = cta.products.get(key)
        if product is None:
            accumulator = warp.wgmmas.flying.get(slots) or Accumulator(shape)
            try:
                product = Product(accumulator, shape, decode(None if in_registers else one(a, 1), one(b, 1)))
            except ValueError as why:
                raise fail(group, ins, str(why)) from None
            within(group, ins, cta, product.operands.spans)
            product.line = ins.line
            product.reads_d = bool(scale_d if scale_d.__class__ in (bool, int) else scale_d[0])
            cta.products[key] = product
            _check_proxy(group, product, ins.line)
        _note_reads(warp, product, ins.line)
        product.a_held[warp.index % 4] = {s: group.R[s] for s in a_slots}
        _hand_over(group, product, slots, rows_of(a) if in_registers else None, ins.line)
        if product.warps == 4:
            del cta.products[key]
            engine = cta.grid.engine
            if not (isinstance(engine.held, _Products) and engine.held.take(product)):
                engine.hold(("wgmma", cta, warp.index // 4), _Products(group, ins, product))
        return None

    return Op(run, (a, b, scale_d), (), head=True, uses=registers, defs=registers)


_shape = lru_cache(Wgmma)  # equal K steps share one object


def _static(ins: Instruction) -> Wgmma:
    """Returns the static part of an instruction: shape, types, and the immediates after its operands."""
    size = next(p for p in ins.parts if p.startswith("m64n"))
    types = ins.parts[ins.parts.index(size) + 1 :]
    d_type, a_type, b_type = types[:3]
    if "sp" in ins.parts or a_type == "b1":
        raise Unsupported(ins.opcode)
    numbers = [o.value for o in ins.operands[4:] if isinstance(o, Imm)] or [1, 1]  # integers have none
    negations, transposed = numbers[:2], numbers[2:]
    return _shape(
        int(size[4:].split("k")[0]), a_type, b_type, d_type,
        a_mn_major=bool(transposed[0]) if transposed and not isinstance(ins.operands[1], Vec) else False,
        b_mn_major=bool(transposed[-1]) if transposed else False,
        negate_a=negations[0] == -1, negate_b=negations[1] == -1, saturate="satfinite" in ins.parts,
    )  # fmt: skip


def _check_proxy(group: Group, product: Product, line: int) -> None:
    """Checks that memory which a product reads was fenced after ordinary stores."""
    cta = group.warp.cta
    checks = cta.grid.checks
    if "proxy" in checks.enabled and cta.written_in(product.operands.spans):
        for tile, form in product.shape.smem_tiles(product.operands.a, product.operands.b):
            if cta.written_in([tile.span(*form)]):
                checks.smem_read(group, FULL, cta, tile.chunk_addresses(*form) >> 4, "wgmma", line)


def _note_reads(warp: Warp, product: Product, line: int) -> None:
    """Records in the race detector the memory that a product reads: once for all K steps of a group."""
    shared, state = warp.grid.checks.shared, warp.wgmmas
    if shared is None:
        return
    if not product.warps:
        product.number = state.commits + 1
    every = product.operands.atoms
    if every in state.recorded:
        return
    state.recorded.add(every)
    for atoms in every:
        if atoms not in state.recorded:
            state.recorded.add(atoms)
            by = _unit(warp).number, product.number, warp.index // 4 & 1
            shared.async_read(warp.agent, warp.cta, slice(*atoms), line, *by)


def _hand_over(
    group: Group, product: Product, slots: tuple[int, ...], a: np.ndarray | None, line: int
) -> None:
    """Issues a warp's part of a product; `a` contains the registers of A.

    D's registers belong to the product until it is waited for.
    """
    warp, R, state = group.warp, group.R, group.warp.wgmmas
    w, flying = warp.index % 4, slots in state.flying
    before = [] if flying else [R[s] for s in slots]
    returned = product.reads_d and all(map(is_, before, map(state.returned.get, slots)))
    touched = not flying and not returned
    if (touched or a is not None) and not state.fenced:
        warp.grid.checks.emit(WgmmaUnfenced(warp, line))
    if not flying:
        state.flying[slots] = product.accumulator
        if product.reads_d:
            product.accumulator.parts[w] = rows_of(before)
        for s in slots:
            R[s] = POISON
    product.a_parts[w] = a
    product.warps += 1
    state.open.append(product)


def _changed(now: Any, before: Any) -> bool:
    """Returns whether a register has another value, uniform or by lane."""
    return now is not before and bool(np.any(now != before))


class _Products(Event):
    """One wgmma of a warpgroup, or several into one accumulator."""

    def __init__(self, group: Group, ins: Instruction, product: Product) -> None:
        cta, what = group.warp.cta, f"the wgmma of line {ins.line}"
        size = 16 * 4 * WARP_ROWS * product.shape.n  # K is 32 bytes, whatever the type
        super().__init__(self._multiply, cta.grid, cta, what, "tensor", line=ins.line, size=size)
        self._group, self._ins = group, ins
        self._products = [product]

    def take(self, product: Product) -> bool:
        """Adds another product to this event if it continues the event's products; returns whether it did."""
        continues = product.continues(self._products[0])
        if continues:
            self._products.append(product)
        return continues

    def _multiply(self) -> None:
        first, cta = self._products[0], self._group.warp.cta
        shape, accumulator = first.shape, first.accumulator
        try:
            b = shape.operand_b(cta.smem, *[p.operands.b for p in self._products])
            if first.operands.a is None:
                parts = [shape.operand_a_registers(p) for p in first.a_parts if p is not None]
                a = np.concatenate(parts)
            else:
                a = shape.operand_a(
                    cta.smem, *[p.operands.a for p in self._products if p.operands.a is not None]
                )
        except (ValueError, IndexError) as why:
            raise fail(self._group, self._ins, str(why)) from None
        if first.reads_d and accumulator.matrix is None:
            before = [mma.c_matrix(p, shape.d_type) for p in accumulator.parts if p is not None]
            accumulator.matrix = np.concatenate(before)
        sums = cta.grid.machine.sums
        for n, product in enumerate(self._products):  # K steps are added one by one: each sum is rounded
            step = slice(n * shape.k, (n + 1) * shape.k)
            d = accumulator.matrix if product.reads_d else None
            accumulator.matrix = shape.accumulate(a[:, step], b[:, step], d, sums)
            product.done, product.end = True, self.end
        for warp in cta.warps:
            warp.wgmmas.wake()


@instruction("wgmma.commit_group")
def _commit(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        state = group.warp.wgmmas
        state.groups.append(state.open)
        state.open = []
        state.commits += 1
        state.recorded.clear()

    return Op(run)


@instruction("wgmma.wait_group")
def _wait(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int, allowed: int) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        warp, state = group.warp, group.warp.wgmmas
        warp.grid.engine.settle()
        due = [p for g in list(state.groups)[: max(0, len(state.groups) - allowed)] for p in g]
        if not all(p.done for p in due):
            state.park(group, "its wgmma groups")
            return BLOCK_RESULT
        clocks = warp.grid.checks.clocks
        if clocks is not None:
            clocks.join(max((p.end for p in due), default=0), "its wgmma groups")
        if len(state.groups) > allowed:
            state.fenced = False
        if due and warp.grid.checks.shared is not None:
            warp.agent.join_nearby(_unit(warp).number, max(p.number for p in due))
        while len(state.groups) > allowed:
            state.groups.popleft()
        w = warp.index % 4
        for product in due:
            if any(_changed(group.R[s], value) for s, value in product.a_held[w].items()):
                warp.grid.checks.emit(WgmmaChanged(warp, product.line, "A"))
        busy = {id(p.accumulator) for g in (*state.groups, state.open) for p in g}
        for slots, accumulator in list(state.flying.items()):
            if id(accumulator) in busy:
                continue
            assert accumulator.matrix is not None
            if any(group.R[s] is not POISON and _changed(group.R[s], POISON) for s in slots):
                lines = [p.line for p in due if p.accumulator is accumulator]
                line = lines[-1] if lines else ins.line
                warp.grid.checks.emit(WgmmaChanged(warp, line, "D"))
            part = accumulator.matrix[WARP_ROWS * w : WARP_ROWS * (w + 1)]
            for slot, row in zip(slots, mma.c_registers(part, accumulator.shape.d_type), strict=True):
                group.R[slot] = state.returned[slot] = row
            del state.flying[slots]
        return None

    return Op(run, (ins.operands[0],), (), head=True)


# -- warp-level matrices -------------------------------------------------------------------------


def _mma_scaled(ins: Instruction) -> Op:
    """Returns the operation of operands with a factor per block of K (9.7.14.5).

    One or two lanes of every four hold the factors.
    """
    vector = next((p for p in ins.parts if p.startswith("scale_vec::")), "scale_vec::1X")
    shape = next(p for p in ins.parts if p.startswith("m16n8k"))
    types = ins.parts[ins.parts.index("col") + 1 :]
    packed, count = shape == "m16n8k64", int(vector[-2])
    wanted = ("f32", "e2m1", "e2m1", "f32") if packed else ("f32", types[1], types[2], "f32")
    fp8 = {types[1], types[2]} <= {"e4m3", "e5m2"}
    if types[:4] != wanted or types[4] not in ("ue8m0", "ue4m3") or not (packed or fp8):
        raise Unsupported(ins.opcode)
    _, a_type, b_type, _, factor = types
    flat = [o for x in ins.operands[4:] for o in (x.items if isinstance(x, Vec) else (x,))]

    def run(
        group: Group, mask: int, a: Any, b: Any, c: Any,
        scale_a: Any, byte_a: Any, thread_a: Any, scale_b: Any, byte_b: Any, thread_b: Any,
    ) -> Any:  # fmt: skip
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        at = [one(x, mask) for x in (byte_a, thread_a, byte_b, thread_b)]
        if at[0] + count > 4 or at[2] + count > 4 or at[1] > 1 or at[3] > 3:
            raise fail(group, ins, f"bytes and lanes of the scale factors {at}")
        factors_a = mma.scale_factors(as_array(scale_a, 32), 2 * at[1], 2, at[0], count, factor)
        factors_b = mma.scale_factors(as_array(scale_b, 32), at[3], 1, at[2], count, factor)
        return list(
            mma.mma_sync_scaled(
                rows_of(a), rows_of(b), rows_of(c), a_type, b_type, factors_a, factors_b, packed
            )
        )

    return Op(run, (*ins.operands[1:4], *flat), destinations(ins), head=True)


@instruction("mma.sync")
def _mma(program: Any, f: Function, ins: Instruction) -> Op:
    if "block_scale" in ins.parts:
        return _mma_scaled(ins)
    types = [p for p in ins.parts if p in ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "s32", "s8", "u8")]
    saturate = "satfinite" in ins.parts
    if not ins.parts[3].startswith("m16n8k") or len(types) != 4 or ins.parts[4:6] != ("row", "col"):
        raise Unsupported(ins.opcode)
    d_type, a_type, b_type, _ = types

    def run(group: Group, mask: int, a: Any, b: Any, c: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        return list(mma.mma_sync(rows_of(a), rows_of(b), rows_of(c), a_type, b_type, d_type, saturate))

    return Op(run, ins.operands[1:4], destinations(ins), head=True)


def _matrix_access(ins: Instruction, store: bool) -> tuple[Access, int]:
    """Returns the access, and the number of lanes that provide the address of a row of 16 bytes."""
    trans = "trans" in ins.parts
    rows = {("m8n8", "b16"): 8}
    if trans:
        rows["m16n8" if store else "m16n16", "b8"] = 8 if store else 16
    shape = next((p for p in ins.parts if p[0] == "m" and p[1].isdigit()), ""), ins.parts[-1]
    if shape not in rows or any(p.startswith("b8x16") for p in ins.parts):
        raise Unsupported(ins.opcode)
    count = int(next(p for p in ins.parts if p in ("x1", "x2", "x4"))[1:])
    return Access(ins, "shared", 4, 4, store), count * rows[shape]


@instruction("ldmatrix")
def _ldmatrix(program: Any, f: Function, ins: Instruction) -> Op:
    access, num_rows = _matrix_access(ins, store=False)
    trans, of_bytes = "trans" in ins.parts, ins.parts[-1] == "b8"
    outputs = destinations(ins)

    def run(group: Group, mask: int, address: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        rows = access.load(group, (1 << num_rows) - 1, "shared", _lane_addresses(address))
        words = np.stack(rows, axis=1)[:num_rows]
        out = list(mma.ldmatrix_bytes(words) if of_bytes else mma.ldmatrix(words, trans))
        return out if len(out) > 1 else out[0]

    return Op(run, (ins.operands[1],), outputs, head=True)


@instruction("stmatrix")
def _stmatrix(program: Any, f: Function, ins: Instruction) -> Op:
    access, num_rows = _matrix_access(ins, store=True)
    trans, of_bytes = "trans" in ins.parts, ins.parts[-1] == "b8"

    def run(group: Group, mask: int, address: Any, values: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        registers = rows_of(values)
        rows = mma.stmatrix_bytes(registers) if of_bytes else mma.stmatrix(registers, trans)
        words = rows.view(np.uint32).reshape(num_rows, 4)
        access.store(group, (1 << num_rows) - 1, "shared", _lane_addresses(address), words)
        return None

    return Op(run, ins.operands[:2], (), head=True)


def _lane_addresses(address: Any) -> np.ndarray:
    return as_array(address, 32).astype(np.uint32) if address.__class__ is int else address
