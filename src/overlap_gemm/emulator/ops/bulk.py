"""Asynchronous copies: cp.async, cp.async.bulk, TMA tensor copies and their reductions (PTX ISA 9.7.9.25).

A copy from shared to global memory is two events: its source is read, later its destination is written. A
bulk async-group is complete for `wait_group.read` after the first and for `wait_group` only after the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from overlap_gemm.emulator.machine.access import notify
from overlap_gemm.emulator.machine.asyncq import Event
from overlap_gemm.emulator.machine.errors import MemoryFault
from overlap_gemm.emulator.machine.memory import PARAM, WINDOW_SHIFT
from overlap_gemm.emulator.machine.order import SCOPES
from overlap_gemm.emulator.machine.races import WEAK
from overlap_gemm.emulator.machine.warp import BulkGroups, Cta, Group
from overlap_gemm.emulator.ops.memory import combine
from overlap_gemm.emulator.ops.registry import instruction
from overlap_gemm.emulator.ops.sync import fail
from overlap_gemm.emulator.ptx.emit import BLOCK_RESULT, Op, Unsupported
from overlap_gemm.emulator.ptx.ir import TYPE_BYTES, Function, Instruction, Mem, Operand, Vec
from overlap_gemm.emulator.ptx.lanes import lane_array, lane_list, one, signed
from overlap_gemm.emulator.units.tma import CHUNK_DTYPE, Plan, TensorMap

_WINDOW = 0xFFFFFFFF
_OFFSET = 0xFFFFFF


def _threads(mask: int, values: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(lane, operands) of each operation that is issued.

    A warp that executes a bulk instruction with uniform operands issues it once: the instruction is a uniform
    one in machine code, and CuTe's kernels count on it.
    """
    flat = [v for x in values for v in (x if x.__class__ is tuple else (x,))]
    if all(v.__class__ is int for v in flat):
        yield (mask & -mask).bit_length() - 1, values
        return
    for lane in lane_list(mask):
        pick = 1 << lane
        yield (
            lane,
            tuple(tuple(one(v, pick) for v in x) if x.__class__ is tuple else one(x, pick) for x in values),
        )


def bulk_groups(group: Group, lane: int) -> BulkGroups:
    """The bulk async-groups of a thread."""
    bulk = group.warp.bulk
    key = ("bulk", lane)
    if key not in bulk:
        bulk[key] = BulkGroups()
    return bulk[key]


def tensor_map(group: Group, address: int) -> TensorMap:
    """The tensor map at a generic address: kernel parameter, constant or global memory."""
    grid = group.warp.grid
    if address >> WINDOW_SHIFT == PARAM >> WINDOW_SHIFT:
        at = address & _WINDOW
        return TensorMap.decode(grid.params[at : at + 128])
    return TensorMap.decode(grid.machine.memory.bytes_at(address, 128))


# -- moving bytes --------------------------------------------------------------------------------


def smem_chunks(cta: Cta, chunk: int) -> np.ndarray:
    """Shared memory in chunks of so many bytes, as TMA moves them."""
    return cta.smem[: len(cta.smem) // chunk * chunk].view(CHUNK_DTYPE[chunk])


def write_smem(cta: Cta, offsets: np.ndarray, chunk: int, data: np.ndarray) -> None:
    """An async unit writes chunks of shared memory."""
    smem_chunks(cta, chunk)[offsets >> (chunk.bit_length() - 1)] = data
    cta.grid.checks.smem_written(cta, offsets)
    if cta.cluster.watch:
        notify(cta.cluster.watch, ((offsets + cta.base) >> 4).tolist())


def write_global(group: Group, line: int, addresses: np.ndarray, chunk: int, data: np.ndarray) -> None:
    """An async unit writes chunks of global memory; a multicast address writes every rank's copy."""
    machine = group.warp.grid.machine
    low = int(addresses.min())
    for target in machine.memory.multicast_targets(low):
        put = partial(_put_global, machine, addresses + (target - low), chunk, data)
        allocation = machine.memory.find(target, chunk)
        if not (machine.faults.active and machine.faults.catches(group, line, allocation, put)):
            put()


def _put_global(machine: Any, addresses: np.ndarray, chunk: int, data: np.ndarray) -> None:
    machine.memory.scatter(addresses, chunk, data)
    if machine.watch:
        notify(machine.watch, (addresses >> 4).tolist())


def _run_of(start: int, nbytes: int) -> tuple[np.ndarray, int]:
    """Addresses of a contiguous range in 16-byte chunks."""
    return np.arange(start, start + nbytes, 16, dtype=np.int64), 16


# -- tensor copies -------------------------------------------------------------------------------


def _coordinates(operand: Mem) -> Operand:
    if len(operand.extra) != 1 or not isinstance(operand.extra[0], Vec):
        raise Unsupported("im2col or missing coordinates")
    return operand.extra[0]


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def _tensor(program: Any, f: Function, ins: Instruction) -> Op:
    parts = ins.parts
    if any(p.startswith(("im2col", "tile::gather", "tile::scatter")) for p in parts):
        raise Unsupported(ins.opcode)
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
        for _, (d, s, c, b, m) in _threads(mask, (dst, source, coords, barrier, cta_mask or 0)):
            try:
                _load_box(
                    group, ins, d & _WINDOW, s, c, b & _WINDOW, m & 0xFFFF if multicast else None, paired
                )
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, (destination, Mem(source.base, source.offset), _coordinates(source), barrier, cta_mask))


def _load_box(
    group: Group, ins: Instruction, dst: int, source: int, coords: tuple[int, ...], barrier: int,
    cta_mask: int | None, paired: bool,
) -> None:  # fmt: skip
    grid, cluster = group.warp.grid, group.warp.cta.cluster
    tmap = tensor_map(group, source)
    position = tuple(int(signed(c, 32)) for c in coords)
    plan = tmap.plan(position, dst & _OFFSET)
    if cta_mask is None:
        places = [(cluster.owner(dst), cluster.owner(barrier))]
    else:
        ranks = [r for r in range(16) if cta_mask >> r & 1]
        if not ranks or ranks[-1] >= cluster.size:
            raise ValueError(f"multicast mask {cta_mask:#x} in a cluster of {cluster.size}")
        leader = (barrier >> 24) & 1
        places = [(cluster.ctas[r], cluster.ctas[(r & ~1) | leader if paired else r]) for r in ranks]
    limit = len(places[0][0].smem)
    if plan.smem_end > limit:
        raise ValueError(f"TMA box at shared address {dst:#x} reaches beyond shared memory ({limit:#x})")
    line, memory = ins.line, grid.machine.memory
    if grid.machine.races is not None:
        addresses = plan.clipped()[0]
        if len(addresses):
            grid.machine.races.async_read(group.warp.agent, line, addresses, plan.chunk, plan.bounds)

    def land(cta: Cta, signalled: Cta) -> Callable[[], None]:
        def run() -> None:
            data = _gather_box(memory, tmap, plan)
            write_smem(cta, plan.smem_offsets, plan.chunk, data)
            signalled.mbarrier(barrier & _OFFSET | signalled.base).complete(plan.box_bytes)

        return run

    for cta, signalled in places:
        what = f"the TMA load of line {line} into {cta} at {dst & _OFFSET:#x}"
        grid.checks.mbarrier_use(signalled.mbarrier(barrier & _OFFSET | signalled.base), what, line)
        grid.engine.submit(Event(land(cta, signalled), grid, cta, what))


def _gather_box(memory: Any, tmap: TensorMap, plan: Plan) -> np.ndarray:
    if plan.valid is None:
        return memory.gather(plan.global_addresses, plan.chunk, plan.bounds)
    data: np.ndarray = np.empty(plan.global_addresses.shape, CHUNK_DTYPE[plan.chunk])
    data[...] = tmap.fill_pattern(plan.chunk)
    if plan.valid.any():
        data[plan.valid] = memory.gather(plan.global_addresses[plan.valid], plan.chunk, plan.bounds)
    return data


def _tensor_store(ins: Instruction, reduces: bool) -> Op:
    target, source = ins.operands[:2]
    assert isinstance(target, Mem)
    name = next(
        (p for p in ins.parts[4:] if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), ""
    )

    def run(group: Group, mask: int, target: Any, coords: Any, source: Any) -> None:
        for lane, (t, c, s) in _threads(mask, (target, coords, source)):
            try:
                tmap = tensor_map(group, t)
                plan = tmap.plan(tuple(int(signed(x, 32)) for x in c), s & _OFFSET)
                addresses, offsets = plan.clipped()
                merge = reducer(name, tmap.type) if reduces else None
                if len(addresses):
                    copy_out(group, ins, lane, addresses, offsets, plan.chunk, merge)
                else:
                    bulk_groups(group, lane).open.append((DONE, DONE, 0))
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, (Mem(target.base, target.offset), _coordinates(target), source))


class _Done:
    """An event that has happened."""

    done = True


DONE = _Done()


def copy_out(
    group: Group, ins: Instruction, lane: int, addresses: np.ndarray, offsets: np.ndarray, chunk: int,
    merge: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
) -> None:  # fmt: skip
    """A copy from shared to global memory: a source read, and later a destination write."""
    grid, cta = group.warp.grid, group.warp.cta
    if int(offsets.max()) + chunk > len(cta.smem):
        raise ValueError(f"the source at shared offset {int(offsets.min()):#x} reaches beyond shared memory")
    machine = grid.machine
    low = int(addresses.min())
    if not machine.memory.is_multicast(low):
        machine.memory.find(low, chunk)
        machine.memory.find(int(addresses.max()), chunk)
    held: list[np.ndarray] = []
    what = f"the bulk store of line {ins.line}"
    grid.checks.smem_read(group, cta, offsets, what, ins.line)
    agent = group.warp.agent
    agent.issued += 1
    if machine.races is not None:
        for target in machine.memory.multicast_targets(low):
            strength = WEAK if merge is None else SCOPES.index("sys")
            machine.races.bulk_write(agent, ins.line, strength, addresses + (target - low), chunk)

    def read() -> None:
        held.append(smem_chunks(cta, chunk)[offsets >> (chunk.bit_length() - 1)])
        _wake(group, "bulk_wait")

    def write() -> None:
        data = held.pop()
        if merge is None:
            write_global(group, ins.line, addresses, chunk, data)
        else:
            for target in machine.memory.multicast_targets(low):
                moved = addresses + (target - low)
                machine.memory.scatter(moved, chunk, merge(machine.memory.gather(moved, chunk), data))
                if machine.watch:
                    notify(machine.watch, (moved >> 4).tolist())
        _wake(group, "bulk_wait")

    first = Event(read, grid, cta, f"{what} reading shared memory", "read")
    grid.engine.submit(first)
    second = grid.engine.submit(Event(write, grid, None, what, "write", after=(first,)))
    bulk_groups(group, lane).open.append((first, second, agent.issued))


def _wake(group: Group, what: str) -> None:
    for waiting in group.warp.state.pop(what, ()):
        waiting.wake()


def reducer(name: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Merges chunks element by element: `merge(old, new)`."""
    dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(kind)
    if name == "add" and dtype is not None:
        return lambda old, new: (old.view(dtype) + new.view(dtype)).view(old.dtype)
    function = combine(name, kind)
    width = TYPE_BYTES[kind]

    def merge(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        words = f"u{width}"
        pairs = zip(old.view(words).tolist(), new.view(words).tolist(), strict=True)
        return np.array([function(a, b) for a, b in pairs], words).view(old.dtype)

    return merge


# -- bulk copies ---------------------------------------------------------------------------------


@instruction("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk(program: Any, f: Function, ins: Instruction) -> Op:
    parts = ins.parts
    if any("mask" in p for p in parts):
        raise Unsupported(ins.opcode)
    spaces = [p for p in parts if p.startswith(("shared", "global"))]
    reduces = parts[1] == "reduce"
    name = next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
    kind = parts[-1] if parts[-1] in TYPE_BYTES else "u32"
    merge = reducer(name, kind) if reduces else None
    if spaces[0] == "global":
        return _bulk_out(ins, merge)
    return _bulk_in(ins, merge, spaces[1] == "global")


def _check_bulk(dst: int, src: int, nbytes: int) -> None:
    if nbytes % 16 or dst % 16 or src % 16 or not nbytes:
        raise ValueError(
            f"bulk copy of {nbytes} bytes from {src:#x} to {dst:#x}: "
            "size and addresses must be multiples of 16"
        )


def _bulk_out(ins: Instruction, merge: Any) -> Op:
    def run(group: Group, mask: int, dst: Any, src: Any, size: Any) -> None:
        for lane, (d, s, n) in _threads(mask, (dst, src, size)):
            try:
                _check_bulk(d, s, n)
                addresses, chunk = _run_of(d, n)
                copy_out(group, ins, lane, addresses, _run_of(s & _OFFSET, n)[0], chunk, merge)
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, ins.operands[:3])


def _bulk_in(ins: Instruction, merge: Any, from_global: bool) -> Op:
    multicast = "multicast::cluster" in ins.parts
    dst, src, size, barrier = ins.operands[:4]
    cta_mask = ins.operands[4] if multicast else None

    def run(group: Group, mask: int, dst: Any, src: Any, size: Any, barrier: Any, cta_mask: Any) -> None:
        for _, (d, s, n, b, m) in _threads(mask, (dst, src, size, barrier, cta_mask or 0)):
            try:
                _check_bulk(d, s, n)
                _copy_in(
                    group,
                    ins,
                    d & _WINDOW,
                    s,
                    n,
                    b & _WINDOW,
                    m & 0xFFFF if multicast else None,
                    merge,
                    from_global,
                )
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, (dst, src, size, barrier, cta_mask))


def _copy_in(
    group: Group, ins: Instruction, dst: int, src: int, nbytes: int, barrier: int, cta_mask: int | None,
    merge: Any, from_global: bool,
) -> None:  # fmt: skip
    grid, cluster = group.warp.grid, group.warp.cta.cluster
    if cta_mask is None:
        places = [(cluster.owner(dst), cluster.owner(barrier))]
    else:
        places = [(cluster.ctas[r], cluster.ctas[r]) for r in range(cluster.size) if cta_mask >> r & 1]
    memory = grid.machine.memory
    offsets, chunk = _run_of(dst & _OFFSET, nbytes)
    if (dst & _OFFSET) + nbytes > len(places[0][0].smem):
        raise ValueError(f"destination {dst:#x} + {nbytes} reaches beyond shared memory")
    if from_global:
        memory.find(src, nbytes)
        source_cta, sources = None, _run_of(src, nbytes)[0]
        if grid.machine.races is not None:
            grid.machine.races.async_read(group.warp.agent, ins.line, sources, chunk)
    else:
        source_cta, sources = cluster.owner(src), _run_of(src & _OFFSET, nbytes)[0]
        grid.checks.smem_read(group, source_cta, sources, "the bulk copy", ins.line)

    def land(cta: Cta, signalled: Cta) -> Callable[[], None]:
        def run() -> None:
            if source_cta is None:
                data = memory.gather(sources, chunk)
            else:
                data = smem_chunks(source_cta, chunk)[sources >> 4]
            if merge is not None:
                data = merge(smem_chunks(cta, chunk)[offsets >> 4], data)
            write_smem(cta, offsets, chunk, data)
            signalled.mbarrier(barrier & _OFFSET | signalled.base).complete(nbytes)

        return run

    for cta, signalled in places:
        what = f"the bulk copy of line {ins.line} into {cta} at {dst & _OFFSET:#x}"
        grid.checks.mbarrier_use(signalled.mbarrier(barrier & _OFFSET | signalled.base), what, ins.line)
        grid.engine.submit(Event(land(cta, signalled), grid, cta, what))


@instruction("cp.async.bulk.prefetch")
def _prefetch(program: Any, f: Function, ins: Instruction) -> Op:
    return Op(lambda group, mask: None)


@instruction("cp.async.bulk.commit_group")
def _commit(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        for (kind, lane), groups in group.warp.bulk.items():
            if kind == "bulk" and mask >> lane & 1:
                groups.committed.append(groups.open)
                groups.open = []

    return Op(run)


@instruction("cp.async.bulk.wait_group")
def _wait(program: Any, f: Function, ins: Instruction) -> Op:
    part = 0 if "read" in ins.parts else 1

    def run(group: Group, mask: int, allowed: int) -> Any:
        for (kind, lane), groups in group.warp.bulk.items():
            if kind != "bulk" or not mask >> lane & 1:
                continue
            committed = groups.committed
            for n in range(len(committed) - allowed):
                if not all(op[part].done for op in committed[n]):
                    group.warp.state.setdefault("bulk_wait", []).append(group)
                    what = "source reads" if part == 0 else "writes"
                    group.park(f"the {what} of its bulk group {n} of {len(committed)}")
                    return BLOCK_RESULT
            while len(committed) > allowed and all(op[1].done for op in committed[0]):
                done = committed.popleft()
                if part == 1:
                    agent = group.warp.agent
                    agent.learn(agent.id + 1, max((op[2] for op in done), default=0))
        return None

    return Op(run, (ins.operands[0],), (), head=True)


# -- cp.async ------------------------------------------------------------------------------------


@instruction("cp.async.ca", "cp.async.cg")
def _cp_async(program: Any, f: Function, ins: Instruction) -> Op:
    operands = list(ins.operands)
    if "cache_hint" in ins.opcode:
        operands.pop()
    dst, src, size = operands[:3]
    source_size = operands[3] if len(operands) > 3 else size

    def run(group: Group, mask: int, dst: Any, src: Any, size: int, source_size: Any) -> None:
        grid, cta = group.warp.grid, group.warp.cta
        lanes = lane_array(mask)
        d = np.broadcast_to(np.asarray(dst, np.int64), 32)[lanes] & _OFFSET
        s = np.broadcast_to(np.asarray(src).astype(np.int64), 32)[lanes]
        take = np.broadcast_to(np.asarray(source_size, np.int64), 32)[lanes]
        memory = grid.machine.memory
        if (d % size).any() or (s % size).any():
            raise fail(group, ins, f"an address is not a multiple of {size}")
        if int(d.max()) + size > grid.smem_bytes:
            raise fail(group, ins, "the destination reaches beyond shared memory")

        def copy() -> None:
            data = np.zeros((len(d), size), np.uint8)
            try:
                full = take == size
                if full.any():
                    data[full] = memory.gather(s[full], size).view(np.uint8).reshape(-1, size)
                for n in np.flatnonzero(~full & (take > 0)):
                    data[n, : take[n]] = memory.bytes_at(int(s[n]), int(take[n]))
            except MemoryFault as why:
                raise fail(group, ins, str(why)) from None
            write_smem(cta, d, size, data.reshape(-1).view(CHUNK_DTYPE[size]))
            _wake(group, "cp_wait")

        event = grid.engine.submit(Event(copy, grid, cta, f"the cp.async of line {ins.line}"))
        group.warp.bulk.setdefault(("cp", 0), BulkGroups()).open.append(event)

    return Op(run, (dst, src, size, source_size))


@instruction("cp.async.commit_group")
def _cp_commit(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        groups = group.warp.bulk.setdefault(("cp", 0), BulkGroups())
        groups.committed.append(groups.open)
        groups.open = []

    return Op(run)


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _cp_wait(program: Any, f: Function, ins: Instruction) -> Op:
    everything = ins.parts[2] == "wait_all"

    def run(group: Group, mask: int, allowed: int | None) -> Any:
        groups = group.warp.bulk.setdefault(("cp", 0), BulkGroups())
        due = list(groups.committed)
        if everything:
            due.append(groups.open)
        else:
            assert allowed is not None
            due = due[: max(0, len(due) - allowed)]
        if not all(e.done for events in due for e in events):
            group.warp.state.setdefault("cp_wait", []).append(group)
            group.park("its cp.async copies")
            return BLOCK_RESULT
        for _ in range(len(due) - everything):
            groups.committed.popleft()
        return None

    return Op(run, (ins.operands[0] if ins.operands else None,), (), head=True)


@instruction("cp.async.mbarrier.arrive")
def _cp_arrive(program: Any, f: Function, ins: Instruction) -> Op:
    keeps = "noinc" in ins.parts

    def run(group: Group, mask: int, address: Any) -> None:
        grid, cta = group.warp.grid, group.warp.cta
        groups = group.warp.bulk.setdefault(("cp", 0), BulkGroups())
        before = tuple(e for events in [*groups.committed, groups.open] for e in events if not e.done)
        for lane in lane_list(mask):
            barrier = cta.mbarrier(one(address, 1 << lane) & _WINDOW)
            if not keeps:
                barrier.pending += 1
            event = Event(
                barrier.arrive, grid, cta, f"the cp.async.mbarrier.arrive of line {ins.line}", after=before
            )
            grid.engine.submit(event)

    return Op(run, (ins.operands[0],))
