"""A persistent wgmma GEMM to exercise the emulator: multicast, setmaxnreg, A from shared memory or registers.

warp group 0      one warp loads: ab empty -> TMA of A and B, multicast along the cluster
warp groups 1..   64 rows each: ab full -> wgmma -> ab release one k tile later; then registers ->
                  shared memory (stmatrix where C has 16 bits) -> TMA store
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, memory, pipeline, tensor_utils, utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

LOAD_REGISTERS = 32
MMA_REGISTERS = {1: 232, 2: 232, 3: 160}
"""By the number of MMA warp groups: with the load warps' at most what a CTA is launched with."""
STORE_BARRIER = 1


@dataclass(frozen=True)
class GemmSm90:
    """``c = a @ b.T``; a (M, K), b (N, K), c (M, N).

    Attributes:
        a_type: element type of A.
        b_type: element type of B.
        c_type: element type of C.
        tile: rows (64 per MMA warp group) and columns of a CTA's tile.
        cluster: CTAs along M and N.
        a_major: ``k`` or ``m``: A's contiguous dimension.
        b_major: ``k`` or ``n``.
        c_major: ``n`` or ``m``.
        a_registers: whether A goes through registers (ldmatrix).
        acc_type: accumulator type.
        stages: A/B stages.
    """

    a_type: Any = cutlass.BFloat16
    b_type: Any = cutlass.BFloat16
    c_type: Any = cutlass.BFloat16
    tile: tuple[int, int] = (128, 64)
    cluster: tuple[int, int] = (1, 1)
    a_major: str = "k"
    b_major: str = "k"
    c_major: str = "n"
    a_registers: bool = False
    acc_type: Any = cutlass.Float32
    stages: int = 3

    arch = "sm_90a"

    @property
    def groups(self) -> int:
        """MMA warp groups."""
        return self.tile[0] // 64

    @property
    def tile_k(self) -> int:
        """K extent of a stage: 128 bytes."""
        return 1024 // self.a_type.width

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of C a cluster computes at a time."""
        return self.tile[0] * self.cluster[0], self.tile[1] * self.cluster[1]

    # -- layouts, the same on the host and in the kernel

    def _mma(self) -> cute.TiledMma:
        source = warpgroup.OperandSource.RMEM if self.a_registers else warpgroup.OperandSource.SMEM
        return utils.sm90.make_trivial_tiled_mma(
            self.a_type,
            self.b_type,
            OperandMajorMode.K if self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            self.acc_type,
            (self.groups, 1, 1),
            (64, self.tile[1]),
            source,
        )

    def _layouts(self) -> tuple[Any, Any, Any]:
        row, column = tensor_utils.LayoutEnum.ROW_MAJOR, tensor_utils.LayoutEnum.COL_MAJOR
        tiler = (*self.tile, self.tile_k)
        a = row if self.a_major == "k" else column
        b = row if self.b_major == "k" else column
        c = row if self.c_major == "n" else column
        return (
            utils.sm90.make_smem_layout_a(a, tiler, self.a_type, self.stages),
            utils.sm90.make_smem_layout_b(b, tiler, self.b_type, self.stages),
            utils.sm90.make_smem_layout_epi(self.c_type, c, self.tile, 1),
        )

    # -- host

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, num_clusters: Int32, stream: Any):
        """Launches ``num_clusters`` clusters."""
        a_layout, b_layout, c_layout = self._layouts()

        def load(tensor, layout, rows, multicast):
            single, several = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
            return cpasync.make_tiled_tma_atom(
                several() if multicast > 1 else single(),
                tensor, cute.slice_(layout, (None, None, 0)), (rows, self.tile_k), num_multicast=multicast,
            )  # fmt: skip

        tma_a, a_view = load(a, a_layout, self.tile[0], self.cluster[1])
        tma_b, b_view = load(b, b_layout, self.tile[1], self.cluster[0])
        tma_c, c_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, cute.slice_(c_layout, (None, None, 0)), self.tile
        )
        self.kernel(self._mma(), tma_a, a_view, tma_b, b_view, tma_c, c_view).launch(
            grid=(self.cluster[0], self.cluster[1], num_clusters),
            block=(128 * (1 + self.groups), 1, 1),
            cluster=(*self.cluster, 1),
            stream=stream,
        )

    # -- device

    @cute.kernel
    def kernel(self, mma, tma_a, mA, tma_b, mB, tma_c, mC):
        """One CTA: sets up the pipeline, then runs its warp groups' roles."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        a_layout, b_layout, c_layout = self._layouts()
        smem = memory.SmemAllocator()
        words = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        sA = smem.allocate_tensor(self.a_type, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        sB = smem.allocate_tensor(self.b_type, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        sC = smem.allocate_tensor(self.c_type, c_layout.outer, byte_alignment=1024, swizzle=c_layout.inner)
        one = (None, None, 0)
        a_bytes = cute.size_in_bytes(self.a_type, cute.slice_(a_layout, one))
        b_bytes = cute.size_in_bytes(self.b_type, cute.slice_(b_layout, one))
        group = pipeline.CooperativeGroup
        ab = pipeline.PipelineTmaAsync.create(
            barrier_storage=words,
            num_stages=self.stages,
            producer_group=group(pipeline.Agent.Thread),
            consumer_group=group(
                pipeline.Agent.Thread, (self.cluster[0] + self.cluster[1] - 1) * 4 * self.groups
            ),
            tx_count=a_bytes + b_bytes,
            cta_layout_vmnk=cute.make_layout((1, *self.cluster, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_index == 0:
                self._load(ab, tma_a, mA, sA, tma_b, mB, sB, mC)
        else:
            cute.arch.setmaxregister_increase(MMA_REGISTERS[self.groups])
            self._multiply(ab, mma, sA, sB, mA, tma_c, mC, sC, warp_index)

    def _tiles(self, mC: cute.Tensor) -> tuple[Any, Any, Any, Any]:
        """First, end and step of this cluster's tiles in row-major order, and tiles per row."""
        _, _, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        rows = cute.ceil_div(cute.size(mC, mode=[0]), self.cluster_tile[0])
        columns = cute.ceil_div(cute.size(mC, mode=[1]), self.cluster_tile[1])
        return cluster, rows * columns, clusters, columns

    def _place(self) -> tuple[Any, Any]:
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return rank % self.cluster[0], rank // self.cluster[0]

    @cute.jit
    def _load(self, ab, tma_a, mA, sA, tma_b, mB, sB, mC):
        m, n = self._place()
        gA = cute.local_tile(mA, (self.tile[0], self.tile_k), (None, None))
        gB = cute.local_tile(mB, (self.tile[1], self.tile_k), (None, None))
        tAsA, tAgA = cpasync.tma_partition(
            tma_a,
            n,
            cute.make_layout(self.cluster[1]),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b,
            m,
            cute.make_layout(self.cluster[0]),
            cute.group_modes(sB, 0, 2),
            cute.group_modes(gB, 0, 2),
        )
        mask_a = mask_b = None
        layout = cute.make_layout((*self.cluster, 1))
        if cutlass.const_expr(self.cluster[1] > 1):
            mask_a = cute.make_layout_image_mask(layout, (m, n, 0), mode=1)
        if cutlass.const_expr(self.cluster[0] > 1):
            mask_b = cute.make_layout_image_mask(layout, (m, n, 0), mode=0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        first, end, step, columns = self._tiles(mC)
        for tile in cutlass.range(first, end, step, unroll=1):
            row = tile // columns * self.cluster[0] + m
            column = tile % columns * self.cluster[1] + n
            for k in cutlass.range(cute.size(gA, mode=[3]), unroll=1):
                ab.producer_acquire(state)
                full = ab.producer_get_barrier(state)
                stage = (None, state.index)
                cute.copy(tma_a, tAgA[(None, row, k)], tAsA[stage], tma_bar_ptr=full, mcast_mask=mask_a)
                cute.copy(tma_b, tBgB[(None, column, k)], tBsB[stage], tma_bar_ptr=full, mcast_mask=mask_b)
                state.advance()
        ab.producer_tail(state)

    @cute.jit
    def _multiply(self, ab, mma, sA, sB, mA, tma_c, mC, sC, warp_index):
        index, _, _ = cute.arch.thread_idx()
        thread = index - 128
        part = mma.get_slice(thread)
        tCsA = part.partition_A(sA)
        tCrB = mma.make_fragment_B(part.partition_B(sB))
        if cutlass.const_expr(self.a_registers):
            tCrA = mma.make_fragment_A(tCsA[(None, None, None, 0)])
            ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(self.a_major == "m", 4), self.a_type)
            fetch = cute.make_tiled_copy_A(ldmatrix, mma)
            source = fetch.get_slice(thread).partition_S(sA)
            target = fetch.get_slice(thread).retile(tCrA)
        else:
            tCrA = mma.make_fragment_A(tCsA)
        blocks = cute.size(tCrB, mode=[2])
        acc = cute.make_rmem_tensor(mma.partition_shape_C(self.tile), self.acc_type)

        if cutlass.const_expr(self.c_type.width == 16):
            out_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(self.c_major == "m", 4), self.c_type)
        else:
            out_atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.c_type)
        store = cute.make_tiled_copy_C(out_atom, mma)
        tRS_sC = store.get_slice(thread).partition_D(sC[(None, None, 0)])

        barrier = pipeline.NamedBarrier(STORE_BARRIER, 128 * self.groups)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        freed = read.clone()
        k_tiles = cute.ceil_div(cute.size(mA, mode=[1]), self.tile_k)
        m, n = self._place()
        first, end, step, columns = self._tiles(mC)
        for tile in cutlass.range(first, end, step, unroll=1):
            row = tile // columns * self.cluster[0] + m
            column = tile % columns * self.cluster[1] + n
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(k_tiles, unroll=1):
                ab.consumer_wait(read)
                if cutlass.const_expr(self.a_registers):
                    cute.copy(fetch, source[(None, None, None, read.index)], target)
                warpgroup.fence()
                for block in cutlass.range_constexpr(blocks):
                    at = (None, None, block, read.index)
                    left = tCrA[(None, None, block)] if self.a_registers else tCrA[at]
                    cute.gemm(mma, acc, left, tCrB[at], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if cutlass.const_expr(self.a_registers):
                    warpgroup.wait_group(0)
                    ab.consumer_release(freed)
                    freed.advance()
                else:
                    warpgroup.wait_group(1)
                    if k > 0:
                        ab.consumer_release(freed)
                        freed.advance()
                read.advance()
            if cutlass.const_expr(not self.a_registers):
                warpgroup.wait_group(0)
                ab.consumer_release(freed)
                freed.advance()

            converted = cute.make_rmem_tensor(acc.shape, self.c_type)
            converted.store(acc.load().to(self.c_type))
            if warp_index == 4:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            barrier.arrive_and_wait()
            cute.copy(store, store.retile(converted), tRS_sC)
            cute.arch.fence_proxy("async.shared", space="cta")
            barrier.arrive_and_wait()
            if warp_index == 4:
                gC = cute.local_tile(mC, self.tile, (row, column))
                tCsC, tCgC = cpasync.tma_partition(
                    tma_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
                )
                cute.copy(tma_c, tCsC[(None, 0)], tCgC)
                cute.arch.cp_async_bulk_commit_group()
        if warp_index == 4:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
