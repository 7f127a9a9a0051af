# Copyright (c) 2026 The overlap_gemm authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

# Redistribution and use in source and binary forms, with or without
# modification, are permitted provided that the following conditions are met:

# 1. Redistributions of source code must retain the above copyright notice, this
# list of conditions and the following disclaimer.

# 2. Redistributions in binary form must reproduce the above copyright notice,
# this list of conditions and the following disclaimer in the documentation
# and/or other materials provided with the distribution.

# 3. Neither the name of the copyright holder nor the names of its
# contributors may be used to endorse or promote products derived from
# this software without specific prior written permission.

# THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"
# AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE
# IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
# DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE
# FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
# DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
# SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER
# CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY,
# OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
# OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.

"""GEMM + reduce-scatter in one Hopper kernel, with a pipeline from the epilogue to a communicating warp.

Each of P ranks multiplies its A (M x K) by its B (N x K). The P products are added, and rank r gets rows
[r * M / P, (r + 1) * M / P) of the sum. The tensor cores compute one tile while the previous tile is sent to
the rank that owns its rows. Tiles that have arrived from all ranks are added at the same time.

    | load warp    | TMA of A and B                                            | -> PipelineTmaAsync       |
    | MMA warps    | wgmma; epilogue: registers to a stage in shared memory    | -> PipelineAsync ("ring") |
    | comm warp    | one lane: bulk store of the stage to the owner's memory; a flag when a tile is written |
    | reduce warps | wait for flags of P ranks; add P partial tiles in rank order; store the output         |

How does an epilogue pass tiles to a communicating warp? A TMA store completes on no mbarrier. Only the thread
that issued the store can wait for it, because bulk async-groups belong to a thread. So no pipeline can have
the TMA store in its producer and the wait for this store in another warp. Here the communicating warp issues
the store. Then the epilogue passes a stage in shared memory, by an ordinary PipelineAsync:

    | MMA warps (producer)                    | comm lane (consumer)                                        |
    |-----------------------------------------|-------------------------------------------------------------|
    | producer_acquire     <----- empty ----- | consumer_release                                            |
    | write the stage (stmatrix)              |                                                             |
    | fence.proxy.async, by each thread       |                                                             |
    | producer_commit      ----- full ------> | consumer_wait                                               |
    |                                         | bulk store to the owner, commit_group                       |
    |                                         | wait_group.read 1: the previous stage can be released       |
    |                                         | after the last stage of a tile: wait_group 0, then the flag |

The two waits are different. `wait_group.read` returns when the store has *read* shared memory, which is
enough to overwrite the stage. The flag signals that the tile is *written*, which requires `wait_group`
without `.read`. The flag is released at `.sys` scope, because the thread that acquires it runs on another
GPU.

Progress: only the reduce warps wait for other ranks, and no role waits for the reduce warps. All CTAs of the
launch are resident, because the grid is not larger than the GPU can hold. So every tile is sent.

Reuse: a flag has the number of the last launch ("epoch") and is never reset. There are two sets of slots for
arriving tiles, one for odd and one for even epochs. A rank starts launch e + 2 after it has acquired flags of
launch e + 1 from every rank. Each rank releases those flags after the end of its launch e, and so after all
its reads of slots in launch e.

To run this example on two GPUs of a machine:

.. code-block:: bash

    torchrun --nproc-per-node=2 distributed_gemm_reduce_scatter_hopper.py     \
      --mnkl 8192,8192,4096,1 --tile_shape_mn 128,256 --cluster_shape_mn 2,1  \
      --ab_dtype BFloat16 --c_dtype BFloat16 --warmup_iterations 10 --iterations 50

and on one GPU, with its SMs divided among virtual ranks:

.. code-block:: bash

    python distributed_gemm_reduce_scatter_hopper.py --virtual_ranks 2 --mnkl 1000,520,200,1

Constraints:
* M, N and K are the extents of one rank's product; L is 1.
* A and B are fp16 or bf16, K-major; C is fp16 or bf16, N-major.
* M is a multiple of P; N and K are multiples of 8; the last tiles of M / P, N and K may be partial.
* CTA tile shape M must be 64/128, N must be 64/128/256; cluster shape must be (1,1), (2,1) or (1,2).
* At most 32 ranks, each with access to the memory of the others (NVLink or PCIe P2P).
"""

import argparse
import itertools
import os

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90_utils
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.tensor_utils import LayoutEnum
from cutlass.torch import dtype as torch_dtype


def gmem_ptr(dtype, address, align):
    """Returns a pointer to an address in any rank's memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


class HopperGemmReduceScatterKernel:
    """Persistent warp-specialized GEMM whose tiles are sent to their owners and added there.

    :param ab_dtype: Data type of A and B
    :param c_dtype: Data type of partial tiles, as they are sent, and of the output
    :param tile_shape_mn: Shape of the CTA tile (M,N)
    :param cluster_shape_mn: CTAs of a cluster (M,N), which share loads by TMA multicast
    """

    # Warps of the first warp group
    load_warp_id = 0
    comm_warp_id = 1
    first_reduce_warp, num_reduce_warps = 2, 2
    num_producer_warps = 4

    # 384 threads are launched with 168 registers each: 128 * 88 + 256 * 208 = 384 * 168.
    producer_registers = 88
    mma_registers = 208

    tile_k = 64
    # Columns of a stage of the ring: 128 bytes, the width of the swizzle.
    subtile_n = 64
    # Tiles along M that are computed in a row.
    band = 8
    # Rows that a lane of a reduce warp adds at a time: independent loads.
    reduce_rows = 4

    def __init__(
        self,
        ab_dtype: type[cutlass.Numeric],
        c_dtype: type[cutlass.Numeric],
        tile_shape_mn: tuple[int, int],
        cluster_shape_mn: tuple[int, int],
    ):
        if {ab_dtype, c_dtype} - {cutlass.Float16, cutlass.BFloat16}:
            raise ValueError(f"types must be Float16 or BFloat16, got {ab_dtype} and {c_dtype}")
        if tile_shape_mn[0] not in (64, 128) or tile_shape_mn[1] not in (64, 128, 256):
            raise ValueError(f"the CTA tile must be 64/128 x 64/128/256, got {tile_shape_mn}")
        if cluster_shape_mn not in ((1, 1), (2, 1), (1, 2)):
            raise ValueError(f"the cluster must be (1, 1), (2, 1) or (1, 2), got {cluster_shape_mn}")
        self.ab_dtype, self.c_dtype = ab_dtype, c_dtype
        self.tile_m, self.tile_n = tile_shape_mn
        self.cluster_shape_mn = cluster_shape_mn
        self.cluster_size = cluster_shape_mn[0] * cluster_shape_mn[1]
        self.num_mma_warp_groups = self.tile_m // 64
        self.num_mma_warps = 4 * self.num_mma_warp_groups
        self.threads_per_cta = 32 * (self.num_producer_warps + self.num_mma_warps)

        # The ring holds a tile: the epilogue waits only if the tile before it is still being stored.
        self.subtiles = self.tile_n // self.subtile_n
        self.ring_stages = max(2, self.subtiles)
        self.subtile_elements = self.tile_m * self.subtile_n
        self.subtile_bytes = self.subtile_elements * c_dtype.width // 8
        self.tile_bytes = self.subtiles * self.subtile_bytes
        self.ab_bytes = (self.tile_m + self.tile_n) * self.tile_k * ab_dtype.width // 8
        capacity = memory.get_smem_capacity_in_bytes("sm_90") - 1024  # barriers, alignment
        self.ab_stages = min(6, (capacity - self.ring_stages * self.subtile_bytes) // self.ab_bytes)

    def slots_and_flags(self, shape, world):
        """Returns (bytes of slots, number of flags) of each rank for an output of this shape."""
        num_tiles = self._num_tiles(shape)
        return 2 * world * num_tiles * self.tile_bytes, num_tiles * world

    # ------------------------------------------------------------------------------------------------
    # Host
    # ------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        out: cute.Tensor,
        slots: cute.Tensor,
        flags: cute.Tensor,
        rank: cutlass.Int32,
        epoch: cutlass.Int32,
        max_active_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        """Launches one rank's kernel.

        :param a: (M / P, K, P): the rows of A by owner, so that no tile has rows of two owners
        :param b: (N, K)
        :param out: (M / P, N)
        :param slots: Address of each rank's slots; a slot holds the ring stages of one tile of one rank
        :param flags: Address of each rank's flags: Int32 (tile, source)
        :param rank: This rank
        :param epoch: Number of the launch, from 1, the same on all ranks
        :param max_active_clusters: Clusters that can be resident at the same time
        """
        a_layout, b_layout, _ = self._smem_layouts()
        tma_a, mA = self._tma_load(a, a_layout, self.tile_m, self.cluster_shape_mn[1])
        tma_b, mB = self._tma_load(b, b_layout, self.tile_n, self.cluster_shape_mn[0])
        clusters = cutlass.min(
            max_active_clusters, self._num_tiles(out.shape) * cute.size(slots) // self.cluster_size
        )
        self.kernel(self._tiled_mma(), tma_a, mA, tma_b, mB, out, slots, flags, rank, epoch).launch(
            grid=(*self.cluster_shape_mn, clusters),
            block=(self.threads_per_cta, 1, 1),
            cluster=(*self.cluster_shape_mn, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _tiled_mma(self):
        k_major = OperandMajorMode.K
        return sm90_utils.make_trivial_tiled_mma(
            self.ab_dtype,
            self.ab_dtype,
            k_major,
            k_major,
            cutlass.Float32,
            (self.num_mma_warp_groups, 1, 1),
            tiler_mn=(64, self.tile_n),
        )

    def _smem_layouts(self):
        row, tiler = LayoutEnum.ROW_MAJOR, (self.tile_m, self.tile_n, self.tile_k)
        return (
            sm90_utils.make_smem_layout_a(row, tiler, self.ab_dtype, self.ab_stages),
            sm90_utils.make_smem_layout_b(row, tiler, self.ab_dtype, self.ab_stages),
            sm90_utils.make_smem_layout_epi(
                self.c_dtype, row, (self.tile_m, self.subtile_n), self.ring_stages
            ),
        )

    def _tma_load(self, tensor, layout, rows, num_multicast):
        op = cpasync.CopyBulkTensorTileG2SOp()
        if num_multicast > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(
            op,
            tensor,
            cute.slice_(layout, (None, None, 0)),
            (rows, self.tile_k),
            num_multicast=num_multicast,
        )

    # ------------------------------------------------------------------------------------------------
    # Order of the tiles, the same for all roles
    # ------------------------------------------------------------------------------------------------

    def _cluster_tiles(self, shape):
        """Returns the number of cluster tiles of an owner's output, along M and N."""
        m, n = self.tile_m * self.cluster_shape_mn[0], self.tile_n * self.cluster_shape_mn[1]
        return (shape[0] + m - 1) // m, (shape[1] + n - 1) // n

    def _num_tiles(self, shape):
        """Returns the number of CTA tiles of an owner's output."""
        tiles_m, tiles_n = self._cluster_tiles(shape)
        return tiles_m * tiles_n * self.cluster_size

    def _positions(self, out, world):
        """Returns (first, end, step) of this cluster's positions in the list of all owners' cluster tiles."""
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        return first, self._num_tiles(out.shape) // self.cluster_size * world, step

    def _owner_and_index(self, position, rank, world):
        """Returns the owner of the tile at a position, and the index of the tile among the owner's tiles.

        Owners alternate, so that the link is busy from the first wave to the last. Rank r begins with owner
        r + 1, so that the ranks send to different owners.
        """
        return (rank + 1 + position) % world, position // world

    def _tile_coord(self, index, m, n, out):
        """Returns the coordinate of the tile of CTA (m, n) in the cluster of cluster tile `index`.

        Tiles are numbered in bands along M, column by column in a band, so that a wave shares A and B in L2.
        """
        tiles_m, tiles_n = self._cluster_tiles(out.shape)
        first = index // (self.band * tiles_n) * self.band
        rows = cutlass.min(self.band, tiles_m - first)
        rest = index % (self.band * tiles_n)
        tile_m, tile_n = first + rest % rows, rest // rows
        return tile_m * self.cluster_shape_mn[0] + m, tile_n * self.cluster_shape_mn[1] + n

    def _cta_tile(self, index, m, n):
        """Returns the number of the tile of CTA (m, n) in the cluster of cluster tile `index`."""
        return (index * self.cluster_shape_mn[1] + n) * self.cluster_shape_mn[0] + m

    def _slot_offset(self, epoch, source, world, tile, out):
        """Returns the offset in bytes of the slot (parity of the epoch, source, tile)."""
        slot = ((epoch % 2) * world + source) * self._num_tiles(out.shape) + tile
        return cutlass.Int64(slot) * self.tile_bytes

    # ------------------------------------------------------------------------------------------------
    # Device
    # ------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        out: cute.Tensor,
        slots: cute.Tensor,
        flags: cute.Tensor,
        rank: cutlass.Int32,
        epoch: cutlass.Int32,
    ):
        """Sets up the pipelines of a CTA, then runs the role of each warp."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == self.load_warp_id:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        smem = memory.SmemAllocator()
        a_layout, b_layout, ring_layout = self._smem_layouts()
        ab_barriers = smem.allocate_array(cutlass.Int64, 2 * self.ab_stages)
        ring_barriers = smem.allocate_array(cutlass.Int64, 2 * self.ring_stages)
        sA = smem.allocate_tensor(self.ab_dtype, a_layout.outer, 1024, a_layout.inner)
        sB = smem.allocate_tensor(self.ab_dtype, b_layout.outer, 1024, b_layout.inner)
        # One ring, two views: swizzled rows for the epilogue, plain bytes for the comm lane.
        sRing = smem.allocate_tensor(
            self.c_dtype, cute.make_layout((self.subtile_elements, self.ring_stages)), 1024
        )
        sC = cute.make_tensor(
            cute.recast_ptr(sRing.iterator, ring_layout.inner, self.c_dtype), ring_layout.outer
        )

        # From the load warp to MMA warps. With multicast, the MMA warps of several CTAs release a stage.
        num_mcast = self.cluster_shape_mn[0] + self.cluster_shape_mn[1] - 1
        ab = pipeline.PipelineTmaAsync.create(
            barrier_storage=ab_barriers,
            num_stages=self.ab_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_mcast * self.num_mma_warps),
            tx_count=self.ab_bytes,
            cta_layout_vmnk=cute.make_layout((1, *self.cluster_shape_mn, 1)),
            defer_sync=True,
        )
        # From the epilogue to communication: each MMA warp arrives once when it has written its part of a
        # stage, one lane of the comm warp when the stage can be overwritten.
        ring = pipeline.PipelineAsync.create(
            barrier_storage=ring_barriers,
            num_stages=self.ring_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.num_mma_warps),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster_shape_mn, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster_shape_mn)

        if warp_idx < self.num_producer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == self.load_warp_id:
                self.load(ab, tma_a, mA, sA, tma_b, mB, sB, out, rank)
            elif warp_idx == self.comm_warp_id:
                if cute.arch.lane_idx() == 0:
                    self.communicate(ring, sRing, out, slots, flags, rank, epoch)
            else:
                self.reduce(out, slots, flags, rank, epoch, warp_idx - self.first_reduce_warp)
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            self.multiply(ab, ring, tiled_mma, sA, sB, sC, cute.size(mA, mode=[1]), out, slots)

    @cute.jit
    def load(self, ab, tma_a, mA, sA, tma_b, mB, sB, out, rank):
        """Loads A and B of each tile, `tile_k` at a time, into empty stages; run by the load warp."""
        m, n, _ = cute.arch.block_idx()  # coordinate of the CTA in its cluster
        gA = cute.local_tile(mA, (self.tile_m, self.tile_k), (None, None, None))
        gB = cute.local_tile(mB, (self.tile_n, self.tile_k), (None, None))
        tAsA, tAgA = cpasync.tma_partition(
            tma_a,
            n,
            cute.make_layout(self.cluster_shape_mn[1]),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b,
            m,
            cute.make_layout(self.cluster_shape_mn[0]),
            cute.group_modes(sB, 0, 2),
            cute.group_modes(gB, 0, 2),
        )
        # CTAs of a row of the cluster share A, those of a column B.
        mask_a = mask_b = None
        cta_layout = cute.make_layout((*self.cluster_shape_mn, 1))
        if cutlass.const_expr(self.cluster_shape_mn[1] > 1):
            mask_a = cute.make_layout_image_mask(cta_layout, (m, n, 0), mode=1)
        if cutlass.const_expr(self.cluster_shape_mn[0] > 1):
            mask_b = cute.make_layout_image_mask(cta_layout, (m, n, 0), mode=0)

        world = cute.size(mA, mode=[2])
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.ab_stages)
        begin, end, step = self._positions(out, world)
        for position in cutlass.range(begin, end, step, unroll=1):
            owner, index = self._owner_and_index(position, rank, world)
            tile_m, tile_n = self._tile_coord(index, m, n, out)
            for k in cutlass.range(cute.size(gA, mode=[3]), unroll=1):
                ab.producer_acquire(state)
                barrier = ab.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    tAgA[(None, tile_m, k, owner)],
                    tAsA[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_a,
                )
                cute.copy(
                    tma_b,
                    tBgB[(None, tile_n, k)],
                    tBsB[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_b,
                )
                state.advance()
        ab.producer_tail(state)

    @cute.jit
    def multiply(self, ab, ring, tiled_mma, sA, sB, sC, k_extent, out, slots):
        """Computes each tile, then fills the ring with its subtiles; run by the MMA warps."""
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx - 32 * self.num_producer_warps
        thr_mma = tiled_mma.get_slice(thread)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
        acc_shape = tiled_mma.partition_shape_C((self.tile_m, self.tile_n))
        acc = cute.make_rmem_tensor(acc_shape, cutlass.Float32)

        # Registers to a stage: a thread's accumulators of one subtile are contiguous.
        values = self.subtile_elements // (32 * self.num_mma_warps)
        fragment_layout = cute.make_layout(((2, 2, values // 4), 1, 1))
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.c_dtype)
        copy_r2s = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, tiled_mma))
        thr_copy = copy_r2s.get_slice(thread)
        tRS_sC = thr_copy.partition_D(sC)

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.ab_stages)
        freed = read.clone()
        filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.ring_stages)
        k_tiles = cute.ceil_div(k_extent, self.tile_k)
        begin, end, step = self._positions(out, cute.size(slots))
        for _ in cutlass.range(begin, end, step, unroll=1):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(k_tiles, unroll=1):
                ab.consumer_wait(read)
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    operand = (None, None, block, read.index)
                    cute.gemm(tiled_mma, acc, tCrA[operand], tCrB[operand], acc)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                # The product of the k tile before this one is complete: its stage can be overwritten.
                warpgroup.wait_group(1)
                if k > 0:
                    ab.consumer_release(freed)
                    freed.advance()
                read.advance()
            warpgroup.wait_group(0)
            ab.consumer_release(freed)
            freed.advance()

            for subtile in cutlass.range_constexpr(self.subtiles):
                fragment = cute.make_tensor(acc.iterator + subtile * values, fragment_layout)
                converted = cute.make_rmem_tensor(
                    thr_copy.partition_S(sC[(None, None, 0)]).shape, self.c_dtype
                )
                converted.store(fragment.load().to(self.c_dtype).reshape(converted.shape))
                ring.producer_acquire(filled)
                cute.copy(copy_r2s, converted, tRS_sC[(None, None, None, filled.index)])
                # TMA reads what threads wrote: each thread fences its own writes, then its warp arrives.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    ring.producer_commit(filled)
                filled.advance()

    @cute.jit
    def communicate(self, ring, sRing, out, slots, flags, rank, epoch):
        """Stores each tile in its owner's slot, then releases its flag; run by one lane of the comm warp.

        It is always the same lane, because no other thread can wait for its stores.
        """
        world = cute.size(slots)
        m, n, _ = cute.arch.block_idx()
        bulk_store = cute.make_copy_atom(
            cpasync.CopyBulkS2GOp(), self.c_dtype, num_bits_per_copy=8 * self.subtile_bytes
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.ring_stages)
        freed = state.clone()
        begin, end, step = self._positions(out, world)
        for position in cutlass.range(begin, end, step, unroll=1):
            owner, index = self._owner_and_index(position, rank, world)
            tile = self._cta_tile(index, m, n)
            slot = slots[owner] + self._slot_offset(epoch, rank, world, tile, out)
            for subtile in cutlass.range_constexpr(self.subtiles):
                ring.consumer_wait(state)
                target = cute.make_tensor(
                    gmem_ptr(self.c_dtype, slot + subtile * self.subtile_bytes, 16),
                    cute.make_layout(self.subtile_elements),
                )
                cute.copy(bulk_store, sRing[(None, state.index)], target)
                cute.arch.cp_async_bulk_commit_group()
                state.advance()
                if cutlass.const_expr(subtile > 0):
                    # All stores but the last one have read their stages.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    ring.consumer_release(freed)
                    freed.advance()
            # The tile is written. After `read=True` its writes might still be on their way.
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            ring.consumer_release(freed)
            freed.advance()
            flag = flags[owner] + cutlass.Int64(tile * world + rank) * 4
            cute.arch.store(gmem_ptr(cutlass.Int32, flag, 4), epoch, sem="release", scope="sys")

    @cute.jit
    def reduce(self, out, slots, flags, rank, epoch, warp_idx):
        """Adds the partial tiles of all ranks in rank order and stores the sums; run by the reduce warps.

        The order is fixed, so results are repeatable. A unit of work is a subtile. Units are distributed
        among all CTAs independently of the tiles that they compute, so that many CTAs share the last tiles.
        """
        world = cute.size(slots)
        rows, columns = out.shape[0], out.shape[1]
        cluster_m, _ = self.cluster_shape_mn
        m, n, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        end = self._num_tiles(out.shape) * self.subtiles
        step = num_clusters * self.cluster_size
        # 8 lanes load a row of a subtile, 16 bytes each; a warp adds 4 * `reduce_rows` rows at a time.
        lane = cute.arch.lane_idx()
        chunk, lane_row = lane % 8, lane // 8
        warp_rows = 4 * self.reduce_rows
        partial = [cute.make_rmem_tensor(8, self.c_dtype) for _ in range(self.reduce_rows)]
        sums = [cute.make_rmem_tensor(8, cutlass.Float32) for _ in range(self.reduce_rows)]
        for unit in cutlass.range(self._cta_tile(cluster, m, n), end, step, unroll=1):
            tile, subtile = unit // self.subtiles, unit % self.subtiles
            # Each lane waits for one rank; the warp's other lanes see what it acquired after `sync_warp`.
            if lane < world:
                flag = gmem_ptr(cutlass.Int32, flags[rank] + cutlass.Int64(tile * world + lane) * 4, 4)
                seen = cute.arch.load(flag, cutlass.Int32, sem="acquire", scope="sys")
                while seen < epoch:
                    seen = cute.arch.load(flag, cutlass.Int32, sem="acquire", scope="sys")
            cute.arch.sync_warp()

            index, cta = tile // self.cluster_size, tile % self.cluster_size
            tile_m, tile_n = self._tile_coord(index, cta % cluster_m, cta // cluster_m, out)
            top = tile_m * self.tile_m
            column = tile_n * self.tile_n + subtile * self.subtile_n + chunk * 8
            first = warp_idx * warp_rows
            for row in cutlass.range(first, self.tile_m, self.num_reduce_warps * warp_rows, unroll=1):
                for i in cutlass.range_constexpr(self.reduce_rows):
                    sums[i].fill(0.0)
                for source in cutlass.range(world, unroll=2):
                    slot = slots[rank] + self._slot_offset(epoch, source, world, tile, out)
                    slot += subtile * self.subtile_bytes
                    for i in cutlass.range_constexpr(self.reduce_rows):
                        # A slot has the bytes of a stage: the swizzle XORs a row's chunks by the row.
                        r = row + 4 * i + lane_row
                        address = slot + r * 128 + (chunk ^ (r % 8)) * 16
                        cute.autovec_copy(
                            cute.make_tensor(gmem_ptr(self.c_dtype, address, 16), cute.make_layout(8)),
                            partial[i],
                        )
                    for i in cutlass.range_constexpr(self.reduce_rows):
                        sums[i].store(sums[i].load() + partial[i].load().to(cutlass.Float32))
                for i in cutlass.range_constexpr(self.reduce_rows):
                    r = top + row + 4 * i + lane_row
                    if r < rows and column < columns:
                        result = cute.make_rmem_tensor(8, self.c_dtype)
                        result.store(sums[i].load().to(self.c_dtype))
                        target = cute.domain_offset((r, column), out).iterator.align(16)
                        cute.autovec_copy(result, cute.make_tensor(target, cute.make_layout(8)))


# ----------------------------------------------------------------------------------------------------
# Running it
# ----------------------------------------------------------------------------------------------------


def symmetric(shape, dtype, world):
    """Returns zeroed symmetric memory: tensors of this process' ranks, and the addresses of all ranks."""
    if dist.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        tensors = [symm_mem.empty(shape, dtype=dtype, device=device)]
        bases = symm_mem.rendezvous(tensors[0], dist.group.WORLD).buffer_ptrs
        offset = tensors[0].data_ptr() - bases[dist.get_rank()]
        addresses = [base + offset for base in bases]
    else:
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(world)]
        addresses = [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    return tensors, torch.tensor(addresses, dtype=torch.int64, device="cuda")


def operands(mnk, dtype, rank, launch):
    """Returns A and B of a rank: small integers, so that sums in fp32 are exact in any order."""
    m, n, k = mnk
    generator = torch.Generator("cuda").manual_seed(1000 * launch + rank)

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(torch_dtype(dtype))

    return integers(m, k), integers(n, k)


def reference(mnk, ab_dtype, c_dtype, rank, world, launch):
    """Returns the output of a rank: partial products rounded to C's type, added in fp32 in rank order."""
    rows = mnk[0] // world
    total = 0.0
    for source in range(world):
        a, b = operands(mnk, ab_dtype, source, launch)
        partial = a[rank * rows : (rank + 1) * rows].float() @ b.float().t()
        total = total + partial.to(torch_dtype(c_dtype)).float()
    return total.to(torch_dtype(c_dtype))


def as_cute(tensor, leading_dim):
    """Returns the DSL's view of a tensor, with dynamic extents."""
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=leading_dim)


def time_us(call, warmup_iterations, iterations):
    """Returns the mean time of a call in the current stream, on the slowest rank."""
    for _ in range(warmup_iterations):
        call()
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(iterations):
        call()
    end.record()
    end.synchronize()
    time = torch.tensor(start.elapsed_time(end) * 1000 / iterations, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def run(
    mnkl: tuple[int, int, int, int],
    ab_dtype: type[cutlass.Numeric],
    c_dtype: type[cutlass.Numeric],
    tile_shape_mn: tuple[int, int] = (128, 256),
    cluster_shape_mn: tuple[int, int] = (2, 1),
    virtual_ranks: int = 1,
    warmup_iterations: int = 0,
    iterations: int = 1,
    skip_ref_check: bool = False,
) -> float:
    """Runs the kernel on all ranks of torchrun, or on virtual ranks of this process; checks and times it.

    :param mnkl: M, N and K of one rank's product; L is 1
    :param ab_dtype: Data type of A and B
    :param c_dtype: Data type of partial tiles and of the output
    :param tile_shape_mn: CTA tile shape (M, N)
    :param cluster_shape_mn: Cluster shape (M, N)
    :param virtual_ranks: Number of ranks on this process' GPU, if torch.distributed is not initialized
    :param warmup_iterations: Launches before those that are timed
    :param iterations: Launches to time; 0 times nothing
    :param skip_ref_check: Whether to skip the comparison (bit for bit, three launches) with the reference
    :return: Time of a launch in microseconds on the slowest rank; 0.0 if nothing was timed
    """
    m, n, k, batch = mnkl
    c_type = torch_dtype(c_dtype)
    if not torch.cuda.is_available():
        raise RuntimeError("GPU is required to run this example!")
    if dist.is_initialized():
        world, local_ranks = dist.get_world_size(), [dist.get_rank()]
    else:
        world, local_ranks = virtual_ranks, list(range(virtual_ranks))
    if not 1 <= world <= 32:
        raise ValueError(f"the number of ranks must be 1 to 32, got {world}")
    if m % world or n % 8 or k % 8 or batch != 1 or min(mnkl) < 1:
        raise ValueError(f"M must be a multiple of {world} ranks, N and K of 8, L 1: got mnkl={tuple(mnkl)}")
    is_first = local_ranks[0] == 0
    if is_first:
        print("Running Hopper GEMM + reduce-scatter with:")
        print(f"mnkl: {mnkl}, {world} {'ranks' if dist.is_initialized() else 'virtual ranks'}")
        print(f"A, B dtype: {ab_dtype}, C dtype: {c_dtype}, Acc dtype: {cutlass.Float32}")
        print(f"Tile Shape: {tile_shape_mn}, Cluster Shape: {cluster_shape_mn}")

    gemm = HopperGemmReduceScatterKernel(ab_dtype, c_dtype, tile_shape_mn, cluster_shape_mn)
    slot_bytes, num_flags = gemm.slots_and_flags((m // world, n), world)
    slot_memory, slots = symmetric((slot_bytes,), torch.uint8, world)
    flag_memory, flags = symmetric((num_flags,), torch.int32, world)
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()  # no rank writes before the flags of all ranks are zero

    # All CTAs must be resident. Virtual ranks divide the SMs.
    hardware_info = utils.HardwareInfo()
    max_active_clusters = hardware_info.get_max_active_clusters(gemm.cluster_size) // len(local_ranks)
    if max_active_clusters == 0:
        raise ValueError(f"{world} virtual ranks need as many resident clusters of {gemm.cluster_size} CTAs")
    streams = [torch.cuda.Stream() for _ in local_ranks]
    if len(streams) == 1:
        streams = [torch.cuda.current_stream()]

    def arguments(number):
        """Returns operands, outputs and kernel arguments of this process' ranks for a seed."""
        inputs = [operands((m, n, k), ab_dtype, rank, number) for rank in local_ranks]
        outs = [torch.full((m // world, n), float("nan"), dtype=c_type, device="cuda") for _ in local_ranks]
        shards = [(a.view(world, m // world, k).permute(1, 2, 0), b) for a, b in inputs]
        tables = as_cute(slots, 0), as_cute(flags, 0)
        by_rank = [
            (as_cute(a, 1), as_cute(b, 1), as_cute(out, 1), *tables, rank)
            for (a, b), out, rank in zip(shards, outs, local_ranks, strict=True)
        ]
        return inputs, outs, by_rank

    inputs, outs, by_rank = arguments(0)
    compiled_gemm = cute.compile(gemm, *by_rank[0], 1, max_active_clusters, cuda.CUstream(0))
    epochs = itertools.count(1)

    def launch(by_rank):
        """Launches the kernel once for each rank of this process; the current stream waits for all."""
        epoch = next(epochs)
        for stream, of_rank in zip(streams, by_rank, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            compiled_gemm(*of_rank, epoch, max_active_clusters, cuda.CUstream(stream.cuda_stream))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    if not skip_ref_check:
        # Only the kernel itself orders these launches between ranks. The third one overwrites the slots of
        # the first one.
        launches = [arguments(number) for number in range(3)]
        for _, _, of_launch in launches:
            launch(of_launch)
        torch.cuda.synchronize()
        for number, (_, results, _) in enumerate(launches):
            for rank, result in zip(local_ranks, results, strict=True):
                expected = reference((m, n, k), ab_dtype, c_dtype, rank, world, number)
                torch.testing.assert_close(result, expected, atol=0, rtol=0)

    if iterations == 0:
        return 0.0
    exec_time = time_us(lambda: launch(by_rank), warmup_iterations, iterations)
    product = torch.empty(m, n, dtype=torch_dtype(ab_dtype), device="cuda")
    partial = torch.zeros(m, n, dtype=c_type, device="cuda")

    def multiply():
        for a, b in inputs:
            torch.mm(a, b.t(), out=product)

    def scatter():
        dist.reduce_scatter_tensor(outs[0], partial)

    def one_after_the_other():
        multiply()
        scatter()

    rivals = {"product alone (torch.mm)": multiply}
    if dist.is_initialized():
        rivals["reduce-scatter alone (NCCL)"] = scatter
        rivals["one after the other"] = one_after_the_other
    times = {name: time_us(call, warmup_iterations, iterations) for name, call in rivals.items()}
    if is_first:
        flops = 2 * m * n * k * len(local_ranks)
        for name, time in {**times, "fused": exec_time}.items():
            print(f"{name:28} {time:10.1f} us {flops / time * 1e-6:8.1f} TFLOP/s")
    return exec_time


def parse_comma_separated_ints(s: str) -> tuple[int, ...]:
    try:
        return tuple(int(x.strip()) for x in s.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError("Invalid format. Expected comma-separated integers.") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Example of GEMM + reduce-scatter on Hopper.")
    parser.add_argument(
        "--mnkl",
        type=parse_comma_separated_ints,
        default=(8192, 8192, 4096, 1),
        help="mnkl dimensions of one rank's product (comma-separated)",
    )
    parser.add_argument(
        "--tile_shape_mn",
        type=parse_comma_separated_ints,
        default=(128, 256),
        help="CTA tile shape (comma-separated)",
    )
    parser.add_argument(
        "--cluster_shape_mn",
        type=parse_comma_separated_ints,
        default=(2, 1),
        help="Cluster shape (comma-separated)",
    )
    parser.add_argument("--ab_dtype", type=cutlass.dtype, default=cutlass.BFloat16)
    parser.add_argument("--c_dtype", type=cutlass.dtype, default=cutlass.BFloat16)
    parser.add_argument(
        "--virtual_ranks",
        type=int,
        default=1,
        help="Number of ranks on one GPU, if the script is not started by torchrun",
    )
    parser.add_argument("--warmup_iterations", type=int, default=0, help="Warmup iterations")
    parser.add_argument("--iterations", type=int, default=1, help="Number of iterations to time; 0: none")
    parser.add_argument("--skip_ref_check", action="store_true", help="Skip reference checking")
    args = parser.parse_args()
    for name, count in (("mnkl", 4), ("tile_shape_mn", 2), ("cluster_shape_mn", 2)):
        if len(getattr(args, name)) != count:
            parser.error(f"--{name} must contain exactly {count} values")
    return args


if __name__ == "__main__":
    args = parse_arguments()
    if "RANK" in os.environ:  # started by torchrun
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    run(**vars(args))
    if dist.is_initialized():
        dist.destroy_process_group()
    print("PASS")
