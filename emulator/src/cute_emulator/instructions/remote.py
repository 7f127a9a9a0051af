"""Multicast memory, asynchronous remote stores, and cluster launch control.

PTX ISA 9.7.9.15 (multimem), 9.7.9.12 (st.async), 9.7.13.7 (red.async), 9.7.16 (clusterlaunchcontrol).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cute_emulator.instructions.bulk import copies_in
from cute_emulator.instructions.emit import Op, Unsupported
from cute_emulator.instructions.memory import combine, operation_of, shape_of
from cute_emulator.instructions.registry import destinations, instruction
from cute_emulator.instructions.sync import fail
from cute_emulator.machine.access import Access
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.events import CancelRead, CancelRequested
from cute_emulator.machine.warp import Group
from cute_emulator.machine.window import OFFSET, WINDOW
from cute_emulator.numbers import fmath
from cute_emulator.numbers.lanes import DTYPE, MASK, as_array, lane_list, one
from cute_emulator.ptx.ir import TYPE_BYTES, Function, Instruction, Mem

# -- multimem --------------------------------------------------------------------------------------


def _shifts(group: Group, ins: Instruction, mask: int, address: Any, size: int) -> list[int]:
    """Returns the distances from a multicast address to each rank's copy."""
    memory = group.warp.grid.machine.memory
    lanes = [one(address, 1 << n) for n in lane_list(mask)] if address.__class__ is not int else [address]
    low, high = min(lanes), max(lanes)
    if not (memory.is_multicast(low) and memory.is_multicast(high + size - 1)):
        raise fail(group, ins, f"{low:#x} is not a multicast address")
    return [t - low for t in memory.multicast_targets(low)]


def _shifted(address: Any, by: int) -> Any:
    return address + by if address.__class__ is int else address + np.uint64(by & MASK[64])


def _adder(name: str, kind: str) -> Callable[[list[Any]], Any]:
    """Returns a function that reduces the ranks' values of one register, in rank order.

    16-bit types accumulate in single precision.
    """
    if kind in ("f16x2", "bf16x2"):
        function: Any = {"add": np.add, "min": fmath.fmin, "max": fmath.fmax}[name]

        def halves(values: list[Any]) -> Any:
            pairs = [fmath.unpack2(as_array(v, 32), kind) for v in values]
            lo, hi = pairs[0]
            for other in pairs[1:]:
                lo, hi = function(lo, other[0]), function(hi, other[1])
            return fmath.pack2(hi, lo, kind)

        return halves
    if kind in ("f32", "f64"):
        dtype: Any = np.float32 if kind == "f32" else np.float64
        ufunc: Any = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]

        def floats(values: list[Any]) -> Any:
            width = 8 * TYPE_BYTES[kind]
            total = as_array(values[0], width).view(dtype)
            for v in values[1:]:
                total = ufunc(total, as_array(v, width).view(dtype))
            return total.view(DTYPE[width])

        return floats
    function_of_ints = combine(name, kind)
    width = 8 * TYPE_BYTES[kind]

    def integers(values: list[Any]) -> Any:
        lists = [as_array(v, width).tolist() for v in values]
        out = lists[0]
        for other in lists[1:]:
            out = [function_of_ints(a, b) for a, b in zip(out, other, strict=True)]
        return np.array(out, DTYPE[width])

    return integers


@instruction("multimem.ld_reduce")
def _ld_reduce(program: Any, f: Function, ins: Instruction) -> Op:
    kind, width, count = shape_of(ins)
    name = operation_of(ins)
    if kind in ("e4m3x2", "e5m2x2", "f16", "bf16"):
        raise Unsupported(ins.opcode)
    access, reduce = Access(ins, "global", width, count, is_store=False), _adder(name, kind)

    def run(group: Group, mask: int, address: Any) -> Any:
        shifts = _shifts(group, ins, mask, address, access.size)
        loaded = [access.load(group, mask, "global", _shifted(address, s)) for s in shifts]
        if count == 1:
            return reduce(loaded)
        return [reduce([values[n] for values in loaded]) for n in range(count)]

    return Op(run, (ins.operands[1],), destinations(ins), head=access.strong)


@instruction("multimem.st")
def _multimem_st(program: Any, f: Function, ins: Instruction) -> Op:
    _, width, count = shape_of(ins)
    access = Access(ins, "global", width, count, is_store=True)

    def run(group: Group, mask: int, address: Any, values: Any) -> None:
        for shift in _shifts(group, ins, mask, address, access.size):
            if access.strong:
                checks = group.warp.grid.checks
                checks.strong_store(group, ins, mask, "global", _shifted(address, shift))
            access.store(group, mask, "global", _shifted(address, shift), values if count > 1 else (values,))

    return Op(run, ins.operands[:2], (), head=access.strong)


@instruction("multimem.red")
def _multimem_red(program: Any, f: Function, ins: Instruction) -> Op:
    kind, width, count = shape_of(ins)
    access = Access(ins, "global", width, count, is_store=True)
    function = combine(operation_of(ins), kind)

    def run(group: Group, mask: int, address: Any, values: Any) -> None:
        operands = values if count > 1 else (values,)
        for shift in _shifts(group, ins, mask, address, access.size):
            group.warp.grid.checks.atomic(group, ins, mask, "global", _shifted(address, shift))
            for lane in lane_list(mask):
                place = one(address, 1 << lane) + shift
                old = access.load(group, 1 << lane, "global", place)
                old = old if count > 1 else (old,)
                added = [one(v, 1 << lane) & MASK[8 * width] for v in operands]
                new = tuple(function(o, a) for o, a in zip(old, added, strict=True))
                access.store(group, 1 << lane, "global", place, new)

    return Op(run, ins.operands[:2], (), head=True)


# -- asynchronous stores to the cluster ------------------------------------------------------------


@instruction("st.async", "red.async")
def _st_async(program: Any, f: Function, ins: Instruction) -> Op:
    if "global" in ins.parts:
        raise Unsupported(ins.opcode)
    kind, width, count = shape_of(ins)
    function = combine(operation_of(ins), kind) if ins.parts[0] == "red" else None
    address, values, barrier = ins.operands[:3]
    size = width * count

    def run(group: Group, mask: int, address: Any, values: Any, barrier: Any) -> None:
        parts = values if count > 1 else (values,)
        grid, cluster = group.warp.grid, group.warp.cta.cluster
        group.effects += 1
        if cluster.size < 2:
            raise fail(group, ins, "the cluster has one CTA; the instruction requires several")
        for lane in lane_list(mask):
            pick = 1 << lane
            at, signal = one(address, pick) & WINDOW, one(barrier, pick) & WINDOW
            cta, signalled = cluster.owner(at), cluster.owner(signal)
            offset = at & OFFSET
            if at % size or offset + size > grid.smem_bytes:
                raise fail(group, ins, f"shared address {at:#x} is misaligned or out of bounds")
            if signalled is not cta:
                raise fail(group, ins, "the mbarrier must be in the CTA of the destination")
            chunks = slice(offset >> 4, (offset + size - 1 >> 4) + 1)
            copies_in(group, cta, chunks, 16, cta.mbarrier(signal), ins.line, in_async_proxy=False)
            data = [one(v, pick) & MASK[8 * width] for v in parts]

            land = partial(_land, cta, width, offset, data, function, signal)
            what = f"the {ins.parts[0]}.async of line {ins.line}"
            grid.engine.submit(Event(land, grid, cta, what, line=ins.line, size=size))

    return Op(run, (address, values, barrier))


def _land(cta: Any, width: int, offset: int, data: list[int], function: Any, signal: int) -> None:
    view, first = cta.mem[width], offset // width
    for n, value in enumerate(data):
        view[first + n] = value if function is None else function(view[first + n], value)
    cta.mbarrier(signal).complete(width * len(data))


# -- cluster launch control ------------------------------------------------------------------------

_CANCELED = 1 << 63


@instruction("clusterlaunchcontrol.try_cancel")
def _try_cancel(program: Any, f: Function, ins: Instruction) -> Op:
    everywhere = any(p.startswith("multicast::cluster") for p in ins.parts)
    address, barrier = ins.operands[:2]
    assert isinstance(address, Mem)

    def run(group: Group, mask: int, address: Any, barrier: Any) -> None:
        grid, cta = group.warp.grid, group.warp.cta
        at, signal = one(address, mask) & OFFSET, one(barrier, mask) & OFFSET
        if at % 16 or at + 16 > grid.smem_bytes:
            raise fail(group, ins, f"shared offset {at:#x} is not 16 aligned bytes of shared memory")

        grid.checks.emit(CancelRequested(group, ins.line))
        targets = cta.cluster.ctas if everywhere else [cta]
        for target in targets:
            chunk = slice(at >> 4, (at >> 4) + 1)
            mbarrier = target.mbarrier(signal | target.base)
            copies_in(group, target, chunk, 16, mbarrier, ins.line, in_async_proxy=False)

        def answer() -> None:
            first = grid.cancel()
            words = (0, 0) if first is None else (first[0] | first[1] << 32, first[2] | _CANCELED)
            for target in targets:
                target.mem[8][at >> 3], target.mem[8][(at >> 3) + 1] = words
                target.mbarrier(signal | target.base).complete(16)

        what = f"the clusterlaunchcontrol.try_cancel of line {ins.line}"
        grid.engine.submit(Event(answer, grid, cta, what, line=ins.line, size=16))

    return Op(run, (address, barrier))


@instruction("clusterlaunchcontrol.query_cancel")
def _query_cancel(program: Any, f: Function, ins: Instruction) -> Op:
    what = ins.parts[2]
    outputs = destinations(ins)

    def run(group: Group, mask: int, handle: Any) -> Any:
        low, high = (one(h, mask) for h in handle)
        canceled = bool(high & _CANCELED)
        group.warp.grid.checks.emit(CancelRead(group, ins.line, what, canceled))
        if what == "is_canceled":
            return canceled
        ctaid = (low & MASK[32], low >> 32, high & MASK[32] & ~_CANCELED)
        if what == "get_first_ctaid":
            return (*ctaid, 0) if len(outputs) > 1 else ctaid[0]
        return ctaid["xyz".index(what[-1])]

    return Op(run, (ins.operands[1],), outputs)
