"""TMA: copies and reductions of boxes of a tensor, by its tensor map (PTX ISA 9.7.9.25.5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cute_emulator.errors import MemoryFault
from cute_emulator.instructions.bulk import (
    Chunks,
    arrives,
    copies_in,
    copy_out,
    multicast_ctas,
    reducer,
    threads,
    write_smem,
)
from cute_emulator.instructions.emit import Op, Unsupported
from cute_emulator.instructions.memory import operation_of
from cute_emulator.instructions.registry import instruction
from cute_emulator.instructions.sync import fail
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.lane_order import check_async
from cute_emulator.machine.memory import PARAM, WINDOW_SHIFT
from cute_emulator.machine.warp import Cta, Group
from cute_emulator.machine.window import OFFSET, WINDOW
from cute_emulator.numbers.lanes import signed
from cute_emulator.ptx.ir import Function, Instruction, Mem, Operand, Vec
from cute_emulator.units.tma import CHUNK_DTYPE, Plan, TensorMap


def tensor_map(group: Group, address: int) -> TensorMap:
    """Returns the tensor map at a generic address: kernel parameter, constant or global memory."""
    grid = group.warp.grid
    if address >> WINDOW_SHIFT == PARAM >> WINDOW_SHIFT:
        at = address & WINDOW
        return TensorMap.decode(grid.params[at : at + 128])
    return TensorMap.decode(grid.machine.memory.bytes_at(address, 128))


@lru_cache(maxsize=4096)
def _position(coords: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([int(signed(c, 32)) for c in coords])


def _coordinates(operand: Mem) -> Operand:
    if len(operand.extra) != 1 or not isinstance(operand.extra[0], Vec):
        raise Unsupported("a tensor copy takes coordinates and nothing else")
    return operand.extra[0]


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def _tensor(program: Any, f: Function, ins: Instruction) -> Op:
    parts = ins.parts
    if any(p.startswith(("im2col", "tile::gather", "tile::scatter")) for p in parts):
        raise Unsupported(f"{ins.opcode} (only tiled tensor maps are modelled)")
    to_global = "bulk_group" in parts
    spaces = [p for p in parts if p.startswith(("shared", "global"))]
    if to_global or spaces[0] == "global":
        return _tensor_store(ins, reduces=parts[1] == "reduce")
    return _tensor_load(ins)


def _tensor_load(ins: Instruction) -> Op:
    multicast, paired = "multicast::cluster" in ins.parts, "cta_group::2" in ins.parts
    destination, source, barrier = ins.operands[:3]
    assert isinstance(source, Mem)
    cta_mask = ins.operands[3] if multicast else None

    def run(group: Group, mask: int, dst: Any, source: Any, coords: Any, barrier: Any, cta_mask: Any) -> None:
        for lane, (d, s, c, b, m) in threads(mask, (dst, source, coords, barrier, cta_mask or 0), each=True):
            try:
                to = m & 0xFFFF if multicast else None
                _load_box(group, lane, ins, d & WINDOW, s, c, b & WINDOW, to, paired)
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, (destination, Mem(source.base, source.offset), _coordinates(source), barrier, cta_mask))


def _load_box(
    group: Group, lane: int, ins: Instruction, dst: int, source: int, coords: tuple[int, ...], barrier: int,
    cta_mask: int | None, paired: bool,
) -> None:  # fmt: skip
    grid, cluster = group.warp.grid, group.warp.cta.cluster
    tmap = tensor_map(group, source)
    plan = tmap.plan(_position(coords), dst & OFFSET)
    if cta_mask is None:
        places = [(cluster.owner(dst), cluster.owner(barrier))]
    else:
        leader = (barrier >> 24) & 1
        places = [
            (cta, cluster.ctas[cta.rank_in_cluster & ~1 | leader] if paired else cta)
            for cta in multicast_ctas(cluster, cta_mask)
        ]
    limit = len(places[0][0].smem)
    if plan.smem_end > limit:
        raise ValueError(f"TMA box at shared address {dst:#x} exceeds shared memory ({limit:#x})")
    line, memory = ins.line, grid.machine.memory
    if grid.machine.races is not None:
        grid.machine.races.async_read(group.warp.agent, line, plan.inside, plan.chunk, plan.bounds)
        warp = group.warp
        if warp.unsynced.stores or warp.agent.doubts:
            reads = plan.inside() // plan.chunk
            checked = grid.checks.emit, warp, None, 1 << lane
            check_async(*checked, reads, plan.chunk, "the TMA load", line)

    def land(cta: Cta, signalled: Cta) -> Callable[[], None]:
        def run() -> None:
            data = _gather_box(memory, tmap, plan)
            mbarrier = signalled.mbarrier(barrier & OFFSET | signalled.base)
            arrives(
                group, line, partial(write_smem, cta, plan.smem, plan.chunk, data), mbarrier, plan.box_bytes
            )

        return run

    for cta, signalled in places:
        what = f"the TMA load of line {line} into {cta} at {dst & OFFSET:#x}"
        mbarrier = signalled.mbarrier(barrier & OFFSET | signalled.base)
        grid.checks.mbarrier_use(mbarrier, what, line)
        copies_in(group, cta, plan.smem, plan.chunk, mbarrier, line)
        grid.engine.submit(Event(land(cta, signalled), grid, cta, what, line=line, size=plan.box_bytes))


def _gather_box(memory: Any, tmap: TensorMap, plan: Plan) -> np.ndarray:
    if plan.valid is None:
        return memory.gather_box(plan.origin, plan.steps, plan.chunk, plan.bounds)
    data: np.ndarray = np.empty(plan.steps.shape, CHUNK_DTYPE[plan.chunk])
    data[...] = tmap.fill_pattern(plan.chunk)
    if plan.valid.any():
        data[plan.valid] = memory.gather(plan.global_addresses[plan.valid], plan.chunk, plan.bounds)
    return data


def _tensor_store(ins: Instruction, reduces: bool) -> Op:
    target, source = ins.operands[:2]
    assert isinstance(target, Mem)
    name = operation_of(ins) if reduces else ""

    def run(group: Group, mask: int, target: Any, coords: Any, source: Any) -> None:
        for lane, (t, c, s) in threads(mask, (target, coords, source)):
            try:
                tmap = tensor_map(group, t)
                plan = tmap.plan(_position(c), s & OFFSET, writes=True)
                addresses, where = plan.clipped()
                merge = reducer(name, tmap.type) if reduces else None
                if len(addresses):
                    chunks = Chunks(addresses, plan.bounds, plan.chunk)
                    copy_out(group, ins, lane, chunks, where, merge)
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, (Mem(target.base, target.offset), _coordinates(target), source))
