"""K cut over the CTAs of a cluster: each multiplies a part of a tile's K, the first one sums.

For tiles fewer than the SMs: the parts of a tile load the weight on as many SMs.

    CTA 1, 2, ..    wait for empty -> store their accumulators in CTA 0's shared memory -> full at CTA 0
    CTA 0           waits for full -> adds them to its own in the parts' order -> empty at all of them
                    -> epilogue, ring, comm lane, as if there were no parts

The comm lanes of the other CTAs have nothing to send; their receive roles take units as everybody's.

| barrier       | arrivals                                           | waited for by             |
|---------------|----------------------------------------------------|---------------------------|
| full, CTA 0   | each warp of each other part, after its stores    | CTA 0's group             |
| empty, others | each warp of CTA 0's group, after its loads       | that part's next group    |

Ping-pong: group ``g`` has every second tile, so its phases of both barriers always have the same parity. No
CTA ends before the cluster's last word (`FusedGemm.kernel`), so barriers and buffer are there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass._mlir.dialects import nvvm
from cutlass._mlir.dialects._nvvm_enum_gen import MBarrierWaitKind, MemScopeKind

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.traced import Scalar
from overlap_gemm.kernel.work import Work

VALUES = 4
"""Of a run: 16 bytes."""


class Parts(NamedTuple):
    """What the parts share.

    Attributes:
        full: mbarrier.
        empty: mbarrier.
        buffer: of the accumulators of all parts but the first, in shared memory: runs of four values,
            ``[part][run][thread]``, so that neither stores nor loads conflict.
    """

    full: Any
    empty: Any
    buffer: Any


NUM_BARRIERS = 2


def sent_of(config: GemmConfig, work: Work) -> Work:
    """What of a CTA's work its comm lane sends: of a tile's parts the first has the sum."""
    if config.k_split == 1:
        return work
    return work._replace(num_tiles=cutlass.select_(part_of_k() == 0, work.num_tiles, Int32(0)))


def end_together(config: GemmConfig) -> None:
    """All warps, at their end: no part ends while another may reach its shared memory."""
    if config.k_split > 1:
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def setup(config: cutlass.Constexpr, barriers: Any, smem: Any) -> Parts:
    """Initialises the barriers, allocates the buffer; the caller fences and synchronises the cluster."""
    full, empty = barriers, barriers + 1
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        warps = config.epilogue_threads // 32
        cute.arch.mbarrier_init(full, (config.k_split - 1) * warps)
        cute.arch.mbarrier_init(empty, warps)
    buffer = smem.allocate_array(Float32, config.split_bytes // 4, byte_alignment=1024)
    return Parts(full, empty, buffer)


def num_k_tiles(config: GemmConfig, a: Any) -> Any:
    """Of one part, or one leaf: as many as of every other, whole steps, so the last one may load zeros."""
    number = cute.ceil_div(cute.size(a, mode=[1]), config.tile_k * config.k_split * config.k_step)
    return number * config.k_step


def num_early(config: GemmConfig, a: Any) -> Any:
    """K tiles that there are stages for: what can be loaded of B before anything is of A."""
    return cutlass.min(num_k_tiles(config, a), config.ab_stages)


def part_of_k() -> Any:
    """Which part of K this CTA multiplies: its place along the grid's third dimension."""
    return cute.arch.block_idx()[2]


@cute.jit
def send(config: cutlass.Constexpr, parts: Parts, acc: cute.Tensor, group: Int32, thread: Int32) -> None:
    """Every thread of a group of a CTA but the first: stores its accumulator in the first one's buffer.

    Args:
        config: the kernel's configuration.
        parts: shared.
        acc: the thread's values.
        group: of the two, the one that has the tile.
        thread: index in the group.
    """
    _wait(parts.empty, 1 - group)
    for run in cutlass.range_constexpr(cute.size(acc) // VALUES):
        at = cute.arch.map_dsmem_ptr(_run(config, parts, part_of_k() - 1, run, thread), Int32(0))
        values = cute.make_tensor(acc.iterator + run * VALUES, cute.make_layout(VALUES))
        cute.autovec_copy(values, cute.make_tensor(at, cute.make_layout(VALUES)))
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(parts.full, 0, scope=MemScopeKind.CLUSTER)


@cute.jit
def add(config: cutlass.Constexpr, parts: Parts, acc: cute.Tensor, group: Int32, thread: Int32) -> None:
    """Every thread of a group of the first CTA: adds what the others sent; arguments as `send`'s."""
    _wait(parts.full, group)
    for part in cutlass.range_constexpr(config.k_split - 1):
        for run in cutlass.range_constexpr(cute.size(acc) // VALUES):
            at = _run(config, parts, part, run, thread)
            values = cute.make_rmem_tensor(VALUES, Float32)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(VALUES)), values)
            total = cute.make_tensor(acc.iterator + run * VALUES, cute.make_layout(VALUES))
            total.store(total.load() + values.load())
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        for part in cutlass.range_constexpr(1, config.k_split):
            cute.arch.mbarrier_arrive(parts.empty, part, scope=MemScopeKind.CLUSTER)


@cute.jit
def _wait(barrier: Any, phase: Int32) -> None:
    """Acquires at cluster scope, as who arrives released; `cute.arch.mbarrier_wait` does for its CTA."""
    is_open = Boolean(False)
    while not is_open:
        is_open = Boolean(
            nvvm.mbarrier_wait_parity(
                barrier.to_llvm_ptr(),
                Int32(phase).ir_value(),
                MBarrierWaitKind.TRY,
                scope=MemScopeKind.CLUSTER,
            )
        )


def _run(config: GemmConfig, parts: Parts, part: Any, run: int, thread: Scalar) -> Any:
    """Where a thread's run of values of a part lies, in whichever CTA's buffer."""
    threads = config.epilogue_threads
    runs = config.tile[0] * config.tile[1] // (threads * VALUES)
    offset = ((part * runs + run) * threads + thread) * (VALUES * 4)
    return cute.make_ptr(Float32, parts.buffer.toint() + offset, cute.AddressSpace.smem, assumed_align=16)
