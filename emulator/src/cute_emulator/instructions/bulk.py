"""Bulk copies, their reductions and groups: `cp.async.bulk`, `cp.reduce.async.bulk` (PTX ISA 9.7.9.25.4).

A copy from shared to global memory is two events: its source is read, later its destination is written. A
bulk async-group is complete for `wait_group.read` after the first and for `wait_group` only after the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cute_emulator.errors import MemoryFault
from cute_emulator.instructions.emit import BLOCK_RESULT, Op, Unsupported
from cute_emulator.instructions.memory import combine, operation_of, shape_of
from cute_emulator.instructions.registry import instruction
from cute_emulator.instructions.sync import fail
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.barrier import MBarrier
from cute_emulator.machine.cluster import Cluster
from cute_emulator.machine.lane_order import check_async
from cute_emulator.machine.order import BULK, SCOPES
from cute_emulator.machine.races import WEAK
from cute_emulator.machine.shared_races import Unit, Where
from cute_emulator.machine.warp import BulkGroups, BulkStore, Cta, Group, Warp
from cute_emulator.machine.watching import notify
from cute_emulator.machine.window import OFFSET, WINDOW
from cute_emulator.numbers.fmath import ftz
from cute_emulator.numbers.lanes import first_lane, lane_list, one
from cute_emulator.ptx.ir import TYPE_BYTES, Function, Instruction
from cute_emulator.units.tma import CHUNK_DTYPE

if TYPE_CHECKING:
    from cute_emulator.machine.memory import GlobalMemory

Merge = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function of a reduction: present chunks and arriving chunks to the result."""


_UNIFORM = {bool, int, tuple}


def threads(mask: int, values: tuple[Any, ...], each: bool = False) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields (lane, operands) of each operation that is issued.

    By the ISA each thread that executes a bulk instruction issues an operation. With `each` the function
    yields one operation per lane: for loads and `tcgen05.mma`, which CuTe DSL never compiles without an
    election. Without `each` a warp with uniform operands issues a store or reduction (also of a tensor map)
    once, by its first lane. CuTe DSL compiles those without an election. NVIDIA's `fmha_bwd` adds by
    `cp.reduce.async.bulk.tensor` in all lanes of a warp, which is correct only if counted once. Operands that
    differ by lane yield one operation per lane in any case.
    """
    kinds = {*map(type, values)}
    if tuple in kinds:
        kinds.update(*[map(type, x) for x in values if x.__class__ is tuple])
    if kinds <= _UNIFORM:
        for lane in lane_list(mask) if each else (first_lane(mask),):
            yield lane, values
        return
    for lane in lane_list(mask):
        pick = 1 << lane
        yield (
            lane,
            tuple(tuple(one(v, pick) for v in x) if x.__class__ is tuple else one(x, pick) for x in values),
        )


# -- copying bytes -------------------------------------------------------------------------------


def granules_of(where: Where, chunk: int) -> Where:
    """Returns the 16-byte granules that contain chunks of `chunk` bytes."""
    if chunk == 16:
        return where
    if isinstance(where, slice):
        return slice(where.start * chunk >> 4, where.stop * chunk + 15 >> 4)
    return where * chunk >> 4


def smem_chunks(cta: Cta, chunk: int) -> np.ndarray:
    """Returns shared memory in chunks of `chunk` bytes, the unit of TMA copies."""
    if chunk == 16:
        return cta.chunks
    return cta.smem[: len(cta.smem) // chunk * chunk].view(CHUNK_DTYPE[chunk])


def write_smem(cta: Cta, where: Where, chunk: int, data: np.ndarray) -> None:
    """Writes chunks of shared memory by an async unit."""
    smem_chunks(cta, chunk)[where] = data
    written = granules_of(where, chunk)
    cta.grid.checks.smem_written(cta, written)
    if cta.cluster.watch:
        notify(cta.cluster.watch, (np.arange(len(cta.dirty))[written] + (cta.base >> 4)).tolist())


def arrives(group: Group, line: int, write: Callable[[], None], barrier: MBarrier, nbytes: int) -> None:
    """Completes a copy into shared memory on its mbarrier, unless an injected fault holds it back."""

    def arrive() -> None:
        write()
        barrier.complete(nbytes)

    faults = group.warp.grid.machine.faults
    if not (faults.active and faults.catches_load(group, line, arrive, write)):
        arrive()


class Chunks(NamedTuple):
    """Chunks of global memory.

    Attributes:
        addresses: Address of each chunk, a multiple of its size.
        bounds: Lowest and highest address.
        size: Bytes of each chunk.
    """

    addresses: np.ndarray
    bounds: tuple[int, int]
    size: int

    def copies(self, memory: GlobalMemory) -> list[Chunks]:
        """Returns, for chunks in multicast memory, those of every rank; else the chunks."""
        low, high = self.bounds
        return [
            self if at == low else Chunks(self.addresses + (at - low), (at, high + at - low), self.size)
            for at in memory.multicast_targets(low)
        ]


def write_global(
    group: Group, line: int, copies: list[Chunks], data: np.ndarray, merge: Merge | None
) -> None:
    """Writes chunks of global memory by an async unit, or merges into them.

    A write to multicast memory applies to all copies.
    """
    machine = group.warp.grid.machine
    for chunks in copies:
        put = partial(_put_global, machine, chunks, data, merge)
        allocation = machine.memory.find(chunks.bounds[0], chunks.size)
        machine.report.stored(group.warp.grid.launch.rank, allocation.rank, data.nbytes)
        faults, low = machine.faults, chunks.bounds[0]
        if not (faults.active and faults.catches(group, line, "copy", allocation, low, put)):
            put()


def _put_global(machine: Any, chunks: Chunks, data: np.ndarray, merge: Merge | None) -> None:
    addresses, bounds, size = chunks
    if merge is not None:
        data = merge(machine.memory.gather(addresses, size, bounds), data)
    machine.memory.scatter(addresses, size, data, bounds)
    if machine.watch:
        notify(machine.watch, (addresses >> 4).tolist())


def _run_of(start: int, nbytes: int) -> Chunks:
    """Returns a contiguous range in 16-byte chunks."""
    return Chunks(np.arange(start, start + nbytes, 16, dtype=np.int64), (start, start + nbytes - 16), 16)


def _slice_of(address: int, nbytes: int) -> slice:
    """Returns the chunks of 16 bytes at a shared address."""
    return slice((address & OFFSET) >> 4, (address & OFFSET) + nbytes >> 4)


def copy_out(
    group: Group, ins: Instruction, lane: int, chunks: Chunks, where: Where, merge: Merge | None
) -> None:
    """Issues a copy from shared to global memory: a source read, and later a destination write."""
    grid, cta, chunk = group.warp.grid, group.warp.cta, chunks.size
    end = chunk * (where.stop if isinstance(where, slice) else int(where.max()) + 1)
    if end > len(cta.smem):
        raise ValueError(
            f"the source ends at shared offset {end:#x}, beyond shared memory ({len(cta.smem):#x})"
        )
    machine = grid.machine
    low, high = chunks.bounds
    everywhere = machine.memory.is_multicast(low)
    if not everywhere:
        machine.memory.find(low, chunk)
        machine.memory.find(high, chunk)
    copies = chunks.copies(machine.memory)
    held: list[np.ndarray] = []
    nbytes = chunk * len(chunks.addresses)
    what = f"the bulk store of line {ins.line}"
    grid.checks.smem_read(group, 1 << lane, cta, granules_of(where, chunk), what, ins.line)
    agent = group.warp.agent
    agent.issued += 1
    if grid.checks.shared is not None:
        reader = bulk_reads(group.warp).number
        grid.checks.shared.async_read(
            agent, cta, granules_of(where, chunk), ins.line, reader, agent.issued, 1
        )
    if machine.races is not None:
        strength = WEAK if merge is None else SCOPES.index("sys")
        for addresses, bounds, _ in copies:
            machine.races.bulk_write(agent, ins.line, strength, addresses, chunk, bounds, everywhere)

    def read() -> None:
        held.append(smem_chunks(cta, chunk)[where].copy())
        group.warp.bulk_waiters.wake()

    def write() -> None:
        write_global(group, ins.line, copies, held.pop(), merge)
        group.warp.bulk_waiters.wake()

    first = Event(read, grid, cta, f"{what} reading shared memory", "read", line=ins.line, size=nbytes)
    grid.engine.submit(first)
    second = grid.engine.submit(Event(write, grid, None, what, "write", (first,), ins.line, nbytes))
    group.warp.bulk.setdefault(lane, BulkGroups()).open.append(BulkStore(first, second, agent.issued))


def bulk_reads(warp: Warp) -> Unit:
    """Returns the unit of a warp's bulk stores, as readers of shared memory."""
    return warp.cta.cluster.unit(warp.agent.units, "bulk", "a bulk store", warp, "bulk")


def multicast_ctas(cluster: Cluster, mask: int) -> list[Cta]:
    """Returns the CTAs that a multicast mask names, by rank.

    Raises:
        ValueError: The mask names no CTA, or one that does not exist.
    """
    if not mask or mask >> cluster.size:
        raise ValueError(f"multicast mask {mask:#x} must name CTAs of the cluster of {cluster.size}")
    return [cta for cta in cluster.ctas if mask >> cta.rank_in_cluster & 1]


def copies_in(
    group: Group,
    cta: Cta,
    where: Where,
    chunk: int,
    barrier: MBarrier,
    line: int,
    in_async_proxy: bool = True,
) -> None:
    """Checks a warp's request to an async unit to write shared memory and to complete on an mbarrier."""
    checks = group.warp.grid.checks
    checks.peer_used(group, cta, line)
    checks.mbarrier_known(group, barrier, line)
    chunks = granules_of(where, chunk)
    if in_async_proxy:
        checks.smem_overwrite(group, cta, chunks, line)
    if checks.shared is not None:
        checks.shared.async_write(group.warp.agent, cta, chunks, line, barrier.party, barrier.completed + 1)


def reducer(name: str, kind: str) -> Merge:
    """Returns a function that merges chunks element by element, for `cp.reduce.async.bulk`.

    `.add.f32` flushes subnormal numbers.
    """
    if (name, kind) == ("add", "f32"):
        return lambda old, new: ftz(ftz(old.view(np.float32)) + ftz(new.view(np.float32))).view(old.dtype)
    dtype = {"f64": np.float64, "f16": np.float16}.get(kind)
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
    merge = reducer(operation_of(ins), shape_of(ins)[0]) if parts[1] == "reduce" else None
    if spaces[0] == "global":
        return _bulk_out(ins, merge)
    return _bulk_in(ins, merge, spaces[1] == "global")


def _check_bulk(dst: int, src: int, nbytes: int) -> None:
    if nbytes % 16 or dst % 16 or src % 16 or not nbytes:
        raise ValueError(
            f"bulk copy of {nbytes} bytes from {src:#x} to {dst:#x}: "
            "size and addresses must be multiples of 16"
        )


def _bulk_out(ins: Instruction, merge: Merge | None) -> Op:
    def run(group: Group, mask: int, dst: Any, src: Any, size: Any) -> None:
        for lane, (d, s, n) in threads(mask, (dst, src, size)):
            try:
                _check_bulk(d, s, n)
                copy_out(group, ins, lane, _run_of(d, n), _slice_of(s, n), merge)
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, ins.operands[:3])


def _bulk_in(ins: Instruction, merge: Merge | None, from_global: bool) -> Op:
    multicast = "multicast::cluster" in ins.parts
    dst, src, size, barrier = ins.operands[:4]
    cta_mask = ins.operands[4] if multicast else None

    def run(group: Group, mask: int, dst: Any, src: Any, size: Any, barrier: Any, cta_mask: Any) -> None:
        for lane, (d, s, n, b, m) in threads(mask, (dst, src, size, barrier, cta_mask or 0), each=True):
            try:
                _check_bulk(d, s, n)
                _copy_in(
                    group,
                    lane,
                    ins,
                    d & WINDOW,
                    s,
                    n,
                    b & WINDOW,
                    m & 0xFFFF if multicast else None,
                    merge,
                    from_global,
                )
            except (ValueError, MemoryFault) as why:
                raise fail(group, ins, str(why)) from None

    return Op(run, (dst, src, size, barrier, cta_mask))


def _copy_in(
    group: Group, lane: int, ins: Instruction, dst: int, src: int, nbytes: int, barrier: int,
    cta_mask: int | None, merge: Merge | None, from_global: bool,
) -> None:  # fmt: skip
    grid, cluster = group.warp.grid, group.warp.cta.cluster
    if cta_mask is None:
        places = [(cluster.owner(dst), cluster.owner(barrier))]
    else:
        places = [(cta, cta) for cta in multicast_ctas(cluster, cta_mask)]
    memory = grid.machine.memory
    where, chunk = _slice_of(dst, nbytes), 16
    if (dst & OFFSET) + nbytes > len(places[0][0].smem):
        raise ValueError(f"destination {dst:#x} + {nbytes} exceeds shared memory")
    if from_global:
        memory.find(src, nbytes)
        (addresses, bounds, _), source_cta = _run_of(src, nbytes), None
        if grid.machine.races is not None:
            grid.machine.races.async_read(group.warp.agent, ins.line, lambda: addresses, chunk, bounds)
            checked = grid.checks.emit, group.warp, None, 1 << lane, addresses >> 4, 16
            check_async(*checked, "the bulk copy", ins.line)
    else:
        source_cta = cluster.owner(src)
        if (src & OFFSET) + nbytes > len(source_cta.smem):
            raise ValueError(f"source {src:#x} + {nbytes} exceeds shared memory")
        reads = _slice_of(src, nbytes)
        grid.checks.smem_read(group, 1 << lane, source_cta, reads, "the bulk copy", ins.line)

    def land(cta: Cta, signalled: Cta) -> Callable[[], None]:
        def run() -> None:
            if source_cta is None:
                data = memory.gather(addresses, chunk)
            else:
                data = smem_chunks(source_cta, chunk)[_slice_of(src, nbytes)]
            if merge is not None:
                data = merge(smem_chunks(cta, chunk)[where], data)
            mbarrier = signalled.mbarrier(barrier & OFFSET | signalled.base)
            arrives(group, ins.line, partial(write_smem, cta, where, chunk, data), mbarrier, nbytes)

        return run

    for cta, signalled in places:
        what = f"the bulk copy of line {ins.line} into {cta} at {dst & OFFSET:#x}"
        mbarrier = signalled.mbarrier(barrier & OFFSET | signalled.base)
        grid.checks.mbarrier_use(mbarrier, what, ins.line)
        copies_in(group, cta, where, chunk, mbarrier, ins.line)
        grid.engine.submit(Event(land(cta, signalled), grid, cta, what, line=ins.line, size=nbytes))


@instruction("cp.async.bulk.prefetch")
def _prefetch(program: Any, f: Function, ins: Instruction) -> Op:
    return Op(lambda group, mask: None)


@instruction("cp.async.bulk.commit_group")
def _commit(program: Any, f: Function, ins: Instruction) -> Op:
    def run(group: Group, mask: int) -> None:
        for lane, groups in group.warp.bulk.items():
            if mask >> lane & 1:
                groups.committed.append(groups.open)
                groups.open = []

    return Op(run)


@instruction("cp.async.bulk.wait_group")
def _wait(program: Any, f: Function, ins: Instruction) -> Op:
    only_reads = "read" in ins.parts

    def waits(stores: list[BulkStore]) -> bool:
        return not all((store.read if only_reads else store.write).done for store in stores)

    def run(group: Group, mask: int, allowed: int) -> Any:
        warp = group.warp
        agent, checked = warp.agent, warp.grid.checks.shared is not None
        clocks = warp.grid.checks.clocks
        for lane, groups in warp.bulk.items():
            if not mask >> lane & 1:
                continue
            committed = groups.committed
            due = [committed[n] for n in range(len(committed) - allowed)]
            for n, stores in enumerate(due):
                if waits(stores):
                    what = "source reads" if only_reads else "writes"
                    warp.bulk_waiters.park(group, f"the {what} of its bulk group {n} of {len(committed)}")
                    return BLOCK_RESULT
            if clocks is not None:
                for store in (store for stores in due for store in stores):
                    clocks.join((store.read if only_reads else store.write).end, "its bulk groups")
            if only_reads and checked:
                read = [store.clock for stores in due for store in stores]
                agent.join_nearby(bulk_reads(warp).number, max(read, default=0))
            while len(committed) > allowed and all(store.write.done for store in committed[0]):
                written = max((store.clock for store in committed.popleft()), default=0)
                if not only_reads:
                    if checked:
                        agent.join_nearby(bulk_reads(warp).number, written)
                    agent.join(agent.id + BULK, written)
        return None

    return Op(run, (ins.operands[0],), (), head=True)
