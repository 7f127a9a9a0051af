"""Split K over the CTAs of a cluster: each CTA multiplies a part of a tile's K, and the first one sums.

It is for products with fewer tiles than SMs: more SMs load the weight.

- CTA 1, 2, ..: wait for empty, store their accumulators in shared memory of CTA 0, arrive on full at CTA 0.
- CTA 0: waits for full, adds these values to its accumulator in the order of the parts, arrives on empty at
  all other CTAs. Epilogue, ring and comm lane follow, as without a split.

The comm lanes of the other CTAs have no tile to send. Their other duties (launch, end) and receive roles are
those of all CTAs.

| barrier       | arrivals                                                  | waiting threads             |
|---------------|-----------------------------------------------------------|-----------------------------|
| full, CTA 0   | (``k_split`` - 1) W: warps of other parts, after stores   | CTA 0's group, before loads |
| empty, others | W: warps of CTA 0's group, after loads                    | the CTA's group, before stores |

W is the number of warps of an epilogue group. One lane of a warp arrives, after a warp barrier. Arrivals
release and waits acquire at cluster scope.

Tiles alternate between two groups (sm_90: ping-pong) or two accumulators (sm_100), numbered ``g``. So a wait
for full is always for parity ``g``, a wait for empty for ``1 - g``. At first the wait for empty of ``g`` = 0
returns at once. That of ``g`` = 1 ends when CTA 0 has read the first tile.

No CTA ends before the cluster's last access (`end_together`), so barriers and buffer remain valid.
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
"""Number of values in a run: 16 bytes."""


class Parts(NamedTuple):
    """Resources that the parts share.

    Attributes:
        full: mbarrier on which the other parts arrive.
        empty: mbarrier on which the first part arrives.
        buffer: Accumulators of all parts but the first, in shared memory: runs of four values,
            ``[part][run][thread]``, so that neither stores nor loads conflict.
    """

    full: Any
    empty: Any
    buffer: Any


NUM_BARRIERS = 2


def sent_of(config: GemmConfig, work: Work) -> Work:
    """Returns the part of a CTA's work that its comm lane sends: the first of a tile's parts has the sum."""
    if config.k_split == 1:
        return work
    return work._replace(num_tiles=cutlass.select_(part_of_k() == 0, work.num_tiles, Int32(0)))


def end_together(config: GemmConfig) -> None:
    """Waits for all CTAs of the cluster: none ends while another may access its memory; all warps."""
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


def num_k_tiles(config: GemmConfig, b: Any) -> Any:
    """Returns the number of k tiles of one part, or one leaf: equal for all, in full steps of ``k_step``.

    The last k tiles may load zeros. ``b``: View of B, which has all of K; peers may have parts of A's. If K
    is cut into slices (`KernelOp.view_of_b`), each slice has its own last k tile.
    """
    number = cute.ceil_div(cute.size(b, mode=[1]), config.tile_k * config.k_split * config.k_step)
    if config.accumulations == 1 and cute.rank(b) > 2:
        number *= cute.size(b, mode=[2])
    return number * config.k_step


def k_tiles_of(config: GemmConfig, ops: Any) -> Any:
    """Returns `num_k_tiles` of all matrices along K (`OperandViews.parts_of_k`)."""
    first, *later = [num_k_tiles(config, part.b) for part in ops.parts_of_k]
    for number in later:
        first += number
    return first


def depth_of(b: Any) -> Any:
    """Returns K of a view of B, of all leaves or slices."""
    return cute.size(b, mode=[1]) * (cute.size(b, mode=[2]) if cute.rank(b) > 2 else 1)


def num_early(config: GemmConfig, b: Any) -> Any:
    """Returns the number of B's k tiles that can be loaded before A's: at most one for each stage."""
    return cutlass.min(num_k_tiles(config, b), config.ab_stages)


def part_of_k() -> Any:
    """Returns the number of the part of K that this CTA multiplies: its index along the grid's z."""
    return cute.arch.block_idx()[2]


@cute.jit
def send(config: cutlass.Constexpr, parts: Parts, acc: cute.Tensor, group: Int32, thread: Int32) -> None:
    """Stores a thread's accumulator in the first CTA's buffer; every thread of a group of another CTA.

    Args:
        config: The kernel's configuration.
        parts: Shared resources.
        acc: Values of the thread.
        group: Epilogue group (sm_90) or accumulator (sm_100) of the tile, 0 or 1.
        thread: Index in the group.
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
    """Adds the other parts' values; every thread of a group of the first CTA. Arguments as in `send`."""
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
    """Waits with acquire at cluster scope, as the release; `mbarrier_wait` acquires for the CTA only."""
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
    """Returns the pointer to a thread's run of values of a part, for any CTA's buffer."""
    threads = config.epilogue_threads
    runs = config.tile[0] * config.tile[1] // (threads * VALUES)
    offset = ((part * runs + run) * threads + thread) * (VALUES * 4)
    return cute.make_ptr(Float32, parts.buffer.toint() + offset, cute.AddressSpace.smem, assumed_align=16)
