"""Tensor memory and tensor-core instructions of sm_100 (PTX ISA 9.7.16)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_emulator.instructions.bulk import multicast_ctas, threads
from cute_emulator.instructions.convergence import gathered
from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported
from cute_emulator.instructions.registry import destinations, instruction
from cute_emulator.instructions.sync import fail, within
from cute_emulator.machine import tensor_fences
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.events import (
    CtaGroupNamed,
    EndedCtaUsed,
    FreedTensorMemoryUsed,
    TensorMemoryUsed,
)
from cute_emulator.machine.shared_races import Unit, nearby
from cute_emulator.machine.warp import Cta, Group, Warp
from cute_emulator.machine.window import OFFSET, WINDOW
from cute_emulator.numbers.lanes import FULL, as_array, lane_list, one
from cute_emulator.ptx.ir import Function, Imm, Instruction, Mem, Vec
from cute_emulator.units import footprints, smem_desc, tcgen05, tmem
from cute_emulator.units.block_scale import BLOCKS


def pair_of(cta: Cta) -> list[Cta]:
    """Returns the CTA pair of a CTA, even rank first."""
    ctas, even = cta.cluster.ctas, cta.rank_in_cluster & ~1
    return [ctas[even], ctas[even | 1]]


def group_of(cta: Cta, ins: Instruction) -> list[Cta]:
    """Returns the CTAs on which an instruction acts, by its `.cta_group`."""
    return pair_of(cta) if "cta_group::2" in ins.parts else [cta]


def grouped(group: Group, ins: Instruction) -> None:
    """Checks the `.cta_group` of an instruction: all instructions of a kernel must have the same."""
    pair, grid = "cta_group::2" in ins.parts, group.warp.grid
    if grid.pairs is None:
        grid.pairs = pair
    elif grid.pairs is not pair:
        grid.checks.emit(CtaGroupNamed(group, ins.line, pair))


def cells_of(first: int, columns: int, halves: tuple[int, ...] = (0, 1), quarter: int | None = None) -> Any:
    """Returns cells of tensor memory for the race detector: quarter of the lanes, half of these, columns."""
    quarters = slice(None) if quarter is None else slice(quarter, quarter + 1)
    return quarters, slice(halves[0], halves[-1] + 1), slice(first, first + columns)


def touch(
    group: Group, cta: Cta, cells: Any, line: int, store: bool, unit: Unit | None = None, frees: bool = False
) -> None:
    """Records in the race detector an access of a warp, or of an async unit, to cells of tensor memory."""
    shared = cta.grid.checks.shared
    if shared is not None:
        shared.tensor(group.warp.agent, cta, cells, line, store, unit, frees)


def _access(group: Group, ins: Instruction, kind: str, at: int, lanes: int, columns: int) -> None:
    """Checks and records an access of a warp to its quarter of tensor memory."""
    warp, lane, first = group.warp, at >> 16, at & 0xFFFF
    _check_cells(group, ins, at, columns)
    warp.grid.engine.settle()
    halves = (0, 1) if lanes == 32 else (lane % 32 // 16,)
    touch(group, warp.cta, cells_of(first, columns, halves, warp.index % 4), ins.line, kind == "st")
    warp.cta.tmem_order.begin(kind, warp.index, lane, lanes, first, columns)


_PIPES = [f"tcgen05 {lane}" for lane in range(32)]


def _pipe(warp: Warp, lane: int) -> Unit:
    """Returns the unit of a thread's tensor-core operations, which are ordered among themselves.

    `tcgen05.commit` tracks only those "initiated by the executing thread" (PTX ISA 9.7.16.12).
    """
    unit = warp.agent.units.get(_PIPES[lane])
    if unit is None:
        what = "a tensor-core operation"
        unit = warp.cta.cluster.unit(warp.agent.units, _PIPES[lane], what, f"{warp}, lane {lane}", "tensor")
    return unit


# -- loads and stores ----------------------------------------------------------------------------


def of_all(group: Group, ins: Instruction, value: Any, mask: int, name: str) -> int:
    """Returns an operand that must be equal in all lanes (9.7.16.7.1, 9.7.16.8.3, 9.7.16.8.4)."""
    first = one(value, mask)
    if value.__class__ is not int and (value != first).any():
        raise fail(group, ins, f"lanes differ in {name}: {first:#x} and {int(value[value != first][0]):#x}")
    return first


def _in_warp_quarter(group: Group, address: int) -> int:
    """Returns an address in the warp's quarter of the lanes, if the address names quarter 0.

    The ISA does not state this rule. Kernels that run on GPUs depend on it (an example of CuTe DSL's
    primitives).
    """
    return address | (group.warp.index % 4) << 21 if address >> 21 == 0 else address


def _check_cells(group: Group, ins: Instruction, address: int, columns: int) -> None:
    """Checks that a warp accesses allocated columns of the lanes of its warpgroup rank (9.7.16.2.2)."""
    mine = 32 * (group.warp.index % 4)
    lane = address >> 16
    if not mine <= lane < mine + 32:
        raise fail(
            group, ins, f"lane {lane} of tensor memory; this warp can access lanes {mine} to {mine + 31}"
        )
    first = address & 0xFFFF
    cta = group.warp.cta
    if cta.tmem_owner[first : first + columns].all():
        return
    what = f"columns {first} to {first + columns - 1} of tensor memory"
    if not (cta.tmem_freed[first : first + columns, 0] > 0).all():
        raise fail(group, ins, f"{what} are not allocated")
    # The contents are unchanged: the run continues, to report further errors.
    cta.grid.checks.emit(FreedTensorMemoryUsed(group, ins.line, first, columns))


def _shape(ins: Instruction) -> tuple[str, int, bool]:
    shape = next(p for p in ins.parts if p[0].isdigit())
    repeat = int(next(p for p in ins.parts if p[0] == "x" and p[1:].isdigit())[1:])
    return shape, repeat, "pack::16b" in ins.parts or "unpack::16b" in ins.parts


@instruction("tcgen05.ld")
def _ld(program: Any, f: Function, ins: Instruction) -> Op:
    if "red" in ins.parts:
        raise Unsupported(ins.opcode)
    shape, repeat, packed = _shape(ins)
    outputs = destinations(ins)
    split = ins.operands[2].value if len(ins.operands) > 2 and isinstance(ins.operands[2], Imm) else 0
    several = len(outputs) > 1
    lanes, columns = tmem.extent(shape, repeat, packed, split)

    def run(group: Group, mask: int, address: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        at = _in_warp_quarter(group, of_all(group, ins, address, mask, "taddr"))
        _access(group, ins, "ld", at, lanes, columns)
        try:
            values = tmem.load(group.warp.cta.tmem, at, shape, repeat, packed, split)
        except ValueError as why:
            raise fail(group, ins, str(why)) from None
        return values if several else values[0]

    return Op(run, (ins.operands[1],), outputs, head=True)


@instruction("tcgen05.st")
def _st(program: Any, f: Function, ins: Instruction) -> Op:
    shape, repeat, packed = _shape(ins)
    address, *rest = ins.operands
    split = rest[0].value if isinstance(rest[0], Imm) else 0
    source = rest[-1]
    lanes, columns = tmem.extent(shape, repeat, packed, split)

    def run(group: Group, mask: int, address: Any, values: Any) -> Any:
        if not gathered(group, mask, FULL):
            return BLOCK_RESULT
        at = _in_warp_quarter(group, of_all(group, ins, address, mask, "taddr"))
        _access(group, ins, "st", at, lanes, columns)
        rows = np.stack([as_array(v, 32) for v in (values if isinstance(values, tuple) else (values,))])
        try:
            tmem.store(group.warp.cta.tmem, at, rows, shape, repeat, packed, split)
        except ValueError as why:
            raise fail(group, ins, str(why)) from None
        return None

    return Op(run, (address, source), (), head=True)


# The registers of a tcgen05.ld hold their values at once: CuTe DSL's PTX uses them before tcgen05.wait::ld
# (the assembler tracks the dependence), so a delayed delivery would reject kernels that are right on
# hardware.
@instruction("tcgen05.wait")
def _wait(program: Any, f: Function, ins: Instruction) -> Op:
    kind = ins.parts[1].split("::")[1]
    return Op(lambda group, mask: group.warp.cta.tmem_order.wait(kind, group.warp.index))


@instruction("tcgen05.fence")
def _fence(program: Any, f: Function, ins: Instruction) -> Op:
    fence = tensor_fences.before_sync if "before" in ins.opcode else tensor_fences.after_sync
    return Op(lambda group, mask: fence(group.warp.agent))


# -- matrix products -----------------------------------------------------------------------------


class _Products(Event):
    """One `tcgen05.mma`, or several into one accumulator."""

    def __init__(self, group: Group, ins: Instruction, ctas: list[Cta], product: tcgen05.Mma) -> None:
        cta = group.warp.cta
        what = f"the tcgen05.mma of line {ins.line}"
        size = 16 * product.shape.m * product.shape.n // len(ctas)  # K is 32 bytes, whatever the type
        super().__init__(self._multiply, cta.grid, cta, what, "tensor", line=ins.line, size=size)
        self._group, self._ins, self._ctas = group, ins, ctas
        self._products = [product]

    def take(self, group: Group, ctas: list[Cta], product: tcgen05.Mma) -> bool:
        """Adds another product to this event if it continues the event's products; returns whether it did."""
        if group.warp is not self._group.warp or len(ctas) != len(self._ctas):
            return False
        if not tcgen05.continues(self._products[0], product):
            return False
        self._products.append(product)
        return True

    def _multiply(self) -> None:
        group, ins = self._group, self._ins
        product = tcgen05.join(tuple(self._products)) if len(self._products) > 1 else self._products[0]
        checks = self.grid.checks
        if "tmem" in checks.enabled:
            what, ctas = f"tcgen05.mma of {group.warp}", len(self._ctas)
            for c in self._ctas:
                checks.tmem_use(c, ("ld", "st"), *product.d_cells(ctas), what, ins.line)
                checks.tmem_use(c, ("st",), *product.a_cells(), what, ins.line)
        try:
            by_instruction = self.grid.machine.sums == "bitwise"
            product.run([c.smem for c in self._ctas], [c.tmem for c in self._ctas], by_instruction)
        except (ValueError, IndexError) as why:
            raise fail(group, ins, str(why)) from None


def _note_product(group: Group, lane: int, product: tcgen05.Mma, ctas: list[Cta], line: int) -> None:
    """Records in the race detector the memory of a product: once for all K steps after one commit."""
    agent, unit, shared = group.warp.agent, _pipe(group.warp, lane), group.warp.grid.checks.shared
    assert shared is not None
    footprint = footprints.footprint(product, len(ctas))
    if not unit.first_time(footprint):
        return
    used = (footprint.d, *footprint.others)
    group.warp.grid.checks.emit(TensorMemoryUsed(group, line, tuple(ctas), used, "tcgen05.mma"))
    for c in ctas:
        for first, end in footprint.atoms:
            if unit.first_time((c.rank_in_cluster, first, end)):
                shared.async_read(agent, c, slice(first, end), line, unit.number, unit.issued)
        if unit.first_time((c.rank_in_cluster, "d", footprint.d)):
            shared.tensor(agent, c, cells_of(*footprint.d), line, True, unit)
        for cells in footprint.others:
            if unit.first_time((c.rank_in_cluster, "a", cells)):
                shared.tensor(agent, c, cells_of(*cells), line, False, unit)


@instruction("tcgen05.mma")
def _mma(program: Any, f: Function, ins: Instruction) -> Op:
    kind = next(p.split("::")[1] for p in ins.parts if p.startswith("kind::"))
    if kind not in tcgen05.KINDS or {"sp", "ws"} & set(ins.parts):
        raise Unsupported(ins.opcode)
    pair = "cta_group::2" in ins.parts
    d, a, b, descriptor, *rest = ins.operands
    block = 0
    if "block_scale" in ins.parts:
        block = next((BLOCKS[p] for p in ins.parts if p in BLOCKS), 32)
    scale_a, scale_b = (rest.pop(0), rest.pop(0)) if block else (Imm(0), Imm(0))
    disabled = rest.pop(0) if rest and isinstance(rest[0], Vec) else None
    enable, *scale = rest
    shift = scale[0] if scale else Imm(0)
    a_in_tmem = isinstance(a, Mem)

    def run(
        group: Group,
        mask: int,
        d: Any,
        a: Any,
        b: Any,
        descriptor: Any,
        disabled: Any,
        enable: Any,
        shift: Any,
        scale_a: Any,
        scale_b: Any,
    ) -> None:
        operands = d, a, b, descriptor, enable, shift, (scale_a, scale_b), disabled or ()
        grouped(group, ins)
        for lane, values in threads(mask, operands, each=True):
            issue(group, lane, *values)

    def issue(
        group: Group,
        lane: int,
        d: Any,
        a: Any,
        b: Any,
        descriptor: Any,
        enable: Any,
        shift: Any,
        scales: Any,
        off: Any,
    ) -> None:
        cta = group.warp.cta
        ctas = pair_of(cta) if pair else [cta]
        try:
            product = tcgen05.decode_mma(
                kind, len(ctas), d, a, a_in_tmem, b, descriptor, bool(enable), shift, block,
                scales if block else None, off,
            )  # fmt: skip
            spans = footprints.smem_spans(product, len(ctas))
        except ValueError as why:
            raise fail(group, ins, str(why)) from None
        checks, engine = cta.grid.checks, cta.grid.engine
        for c in ctas:
            within(group, ins, c, spans)
        if "proxy" in checks.enabled:
            for c in ctas:
                if c.written_in(spans):
                    reads = product.smem_reads(len(ctas)) >> 4
                    checks.smem_read(group, 1 << lane, c, reads, "tcgen05.mma", ins.line)
        if checks.shared is not None:
            _note_product(group, lane, product, ctas, ins.line)
        held = engine.held
        if isinstance(held, _Products) and held.take(group, ctas, product):
            return
        put = engine.enqueue if "tmem" in checks.enabled else engine.hold
        put(("tensor", cta), _Products(group, ins, ctas, product))

    return Op(run, (d, a, b, descriptor, disabled, enable, shift, scale_a, scale_b))


@instruction("tcgen05.cp")
def _cp(program: Any, f: Function, ins: Instruction) -> Op:
    shape = ".".join(p for p in ins.parts if p[0].isdigit() or p.startswith("warpx"))
    unpacks = next((int(p[1]) for p in ins.parts if p in ("b6x16_p32", "b4x16_p64")), 0)
    form = tmem.copy_source(shape)

    def run(group: Group, mask: int, address: Any, descriptor: Any) -> None:
        cta, lane = group.warp.cta, mask & -mask
        ctas = group_of(cta, ins)
        try:
            source, at = smem_desc.decode_umma(one(descriptor, lane)), one(address, lane)
            span = source.span(*form)
        except ValueError as why:
            raise fail(group, ins, str(why)) from None
        checks = cta.grid.checks
        grouped(group, ins)
        within(group, ins, cta, [span])
        cells = ((at & 0xFFFF, form[1], (0, 1)),)
        checks.emit(TensorMemoryUsed(group, ins.line, tuple(ctas), cells, "tcgen05.cp"))
        for c in ctas:
            if "proxy" in checks.enabled and c.written_in([span]):
                reads = source.chunk_addresses(*form) >> 4
                checks.smem_read(group, lane, c, reads, "tcgen05.cp", ins.line)
            if checks.shared is not None:
                unit, atoms = _pipe(group.warp, lane.bit_length() - 1), source.atoms(*form)
                checks.shared.async_read(group.warp.agent, c, atoms, ins.line, unit.number, unit.issued)
                touch(group, c, cells_of(at & 0xFFFF, form[1]), ins.line, True, unit)

        def copy() -> None:
            for c in ctas:
                try:
                    tmem.copy_from_smem(c.smem, c.tmem, source, at, shape, unpacks)
                except (ValueError, IndexError) as why:
                    raise fail(group, ins, str(why)) from None

        cta.grid.engine.enqueue(
            ("tensor", cta),
            Event(copy, cta.grid, cta, f"the tcgen05.cp of line {ins.line}", "tensor", line=ins.line),
        )

    return Op(run, ins.operands[:2])


@instruction("tcgen05.commit")
def _commit(program: Any, f: Function, ins: Instruction) -> Op:
    multicast = "multicast::cluster" in ins.parts
    barrier, cta_mask = ins.operands[0], ins.operands[1] if multicast else Imm(0)

    def run(group: Group, mask: int, barrier: Any, cta_mask: Any) -> None:
        grouped(group, ins)
        for lane in lane_list(mask):
            issue(group, lane, one(barrier, 1 << lane) & WINDOW, one(cta_mask, 1 << lane) & 0xFFFF)

    def issue(group: Group, lane: int, at: int, to: int) -> None:
        cta = group.warp.cta
        try:
            targets = multicast_ctas(cta.cluster, to) if multicast else [cta.cluster.owner(at)]
        except ValueError as why:
            raise fail(group, ins, str(why)) from None
        for target in targets:
            mbarrier = target.mbarriers.get(at & OFFSET)
            if mbarrier is not None:
                target.grid.checks.mbarrier_known(group, mbarrier, ins.line)
        known: dict[int, int] = {}
        if cta.grid.checks.shared is not None:
            unit = _pipe(group.warp, lane)
            known = {**nearby(group.warp.agent), unit.number: unit.issued}
            unit.advance()

        def arrive() -> None:
            for target in targets:
                barrier = target.mbarrier(at & OFFSET | target.base)
                if target.live_warps:
                    barrier.arrive(passing=known)
                    continue
                checks = target.grid.checks
                if "exit" not in checks.enabled:
                    raise fail(group, ins, f"arrives at {barrier} of {target}, which has exited")
                if target is not targets[0]:  # that one was reported when the CTA exited
                    checks.emit(EndedCtaUsed(group, ins.line, target, barrier))

        what = f"the tcgen05.commit of line {ins.line}"
        event = Event(arrive, cta.grid, targets[0], what, "tensor", line=ins.line)
        cta.grid.engine.enqueue(("tensor", cta), event)

    return Op(run, (barrier, cta_mask))
