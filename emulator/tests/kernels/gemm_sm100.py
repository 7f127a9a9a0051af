"""A persistent tcgen05 GEMM to exercise the emulator: 1- and 2-CTA, multicast, every operand major.

warps 0..3   epilogue   acc full -> tensor memory -> registers -> shared memory -> TMA store; acc release
warp 4       MMA        ab full -> tcgen05.mma -> ab release; per tile: acc commit (double buffered)
warp 5       load       ab empty -> TMA of A and B, multicast along the cluster
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, memory, pipeline, tensor_utils, utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

EPILOGUE_WARPS, MMA_WARP, LOAD_WARP = 4, 4, 5
THREADS = 32 * 6
ACC_STAGES = 2
STORE_BARRIER, TMEM_BARRIER = 1, 2


@dataclass(frozen=True)
class GemmSm100:
    """``c = a @ b.T``; a (M, K), b (N, K), c (M, N).

    Attributes:
        a_type: element type of A.
        b_type: element type of B.
        c_type: element type of C.
        tile: rows and columns of one MMA instruction (over both CTAs of a pair).
        two_cta: whether pairs of CTAs share an instruction.
        cluster: CTAs along M and N.
        a_major: ``k`` or ``m``: A's contiguous dimension.
        b_major: ``k`` or ``n``.
        c_major: ``n`` or ``m``.
        acc_type: accumulator type.
        stages: A/B stages.
    """

    a_type: Any = cutlass.BFloat16
    b_type: Any = cutlass.BFloat16
    c_type: Any = cutlass.BFloat16
    tile: tuple[int, int] = (128, 64)
    two_cta: bool = False
    cluster: tuple[int, int] = (1, 1)
    a_major: str = "k"
    b_major: str = "k"
    c_major: str = "n"
    acc_type: Any = cutlass.Float32
    stages: int = 3

    arch = "sm_100a"

    @property
    def pair(self) -> int:
        """CTAs that share an instruction."""
        return 2 if self.two_cta else 1

    @property
    def tile_k(self) -> int:
        """K extent of a stage: 128 bytes."""
        return 1024 // self.a_type.width

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of C a cluster computes at a time."""
        return self.tile[0] * self.cluster[0] // self.pair, self.tile[1] * self.cluster[1]

    # -- layouts, the same on the host and in the kernel -----------------------------------------------

    def _mma(self) -> cute.TiledMma:
        return utils.sm100.make_trivial_tiled_mma(
            self.a_type,
            self.b_type,
            OperandMajorMode.K if self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            self.acc_type,
            tcgen05.CtaGroup.TWO if self.two_cta else tcgen05.CtaGroup.ONE,
            self.tile,
        )

    def _cluster_vmnk(self, mma: cute.TiledMma) -> cute.Layout:
        return cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (mma.thr_id.shape,))

    def _ab_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any]:
        tiler = (*self.tile, self.tile_k)
        return (
            utils.sm100.make_smem_layout_a(mma, tiler, self.a_type, self.stages),
            utils.sm100.make_smem_layout_b(mma, tiler, self.b_type, self.stages),
        )

    def _c_layout_enum(self) -> Any:
        return tensor_utils.LayoutEnum.ROW_MAJOR if self.c_major == "n" else tensor_utils.LayoutEnum.COL_MAJOR

    def _epilogue_tile(self) -> Any:
        cta = (self.tile[0] // self.pair, self.tile[1])
        return utils.sm100.compute_epilogue_tile_shape(cta, self.two_cta, self._c_layout_enum(), self.c_type)

    def _c_layout(self) -> Any:
        return utils.sm100.make_smem_layout_epi(
            self.c_type, self._c_layout_enum(), self._epilogue_tile(), ACC_STAGES
        )

    # -- host ------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, num_clusters: Int32, stream: Any):
        """Launches ``num_clusters`` clusters."""
        mma = self._mma()
        vmnk = self._cluster_vmnk(mma)
        a_layout, b_layout = self._ab_layouts(mma)
        tiler = (*self.tile, self.tile_k)
        tma_a, a_view = cute.nvgpu.make_tiled_tma_atom_A(
            utils.sm100.cluster_shape_to_tma_atom_A(self.cluster, mma.thr_id),
            a, cute.slice_(a_layout, (None, None, None, 0)), tiler, mma, vmnk.shape,
            internal_type=self.a_type,
        )  # fmt: skip
        tma_b, b_view = cute.nvgpu.make_tiled_tma_atom_B(
            utils.sm100.cluster_shape_to_tma_atom_B(self.cluster, mma.thr_id),
            b, cute.slice_(b_layout, (None, None, None, 0)), tiler, mma, vmnk.shape,
            internal_type=self.b_type,
        )  # fmt: skip
        tma_c, c_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            c,
            cute.slice_(self._c_layout(), (None, None, 0)),
            self._epilogue_tile(),
        )
        self.kernel(mma, tma_a, a_view, tma_b, b_view, tma_c, c_view).launch(
            grid=(self.cluster[0], self.cluster[1], num_clusters),
            block=(THREADS, 1, 1),
            cluster=(*self.cluster, 1),
            stream=stream,
        )

    # -- device ----------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, mma, tma_a, mA, tma_b, mB, tma_c, mC):
        """One CTA: sets up pipelines, then runs its warps' roles."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        vmnk = self._cluster_vmnk(mma)
        a_layout, b_layout = self._ab_layouts(mma)
        c_layout = self._c_layout()

        smem = memory.SmemAllocator()
        words = smem.allocate_array(cutlass.Int64, 2 * self.stages + 2 * ACC_STAGES + 2)
        sA = smem.allocate_tensor(self.a_type, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        sB = smem.allocate_tensor(self.b_type, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        sC = smem.allocate_tensor(self.c_type, c_layout.outer, byte_alignment=1024, swizzle=c_layout.inner)

        multicast = self.cluster[0] // self.pair + self.cluster[1] - 1
        group = pipeline.CooperativeGroup
        ab = pipeline.PipelineTmaUmma.create(
            barrier_storage=words,
            num_stages=self.stages,
            producer_group=group(pipeline.Agent.Thread),
            consumer_group=group(pipeline.Agent.Thread, multicast),
            tx_count=self._stage_bytes(a_layout, b_layout),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        acc = pipeline.PipelineUmmaAsync.create(
            barrier_storage=words + 2 * self.stages,
            num_stages=ACC_STAGES,
            producer_group=group(pipeline.Agent.Thread),
            consumer_group=group(pipeline.Agent.Thread, EPILOGUE_WARPS * self.pair),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        tail = words + 2 * self.stages + 2 * ACC_STAGES
        tmem = memory.TmemAllocator(
            cute.recast_ptr(tail, dtype=Int32),
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, 32 * (EPILOGUE_WARPS + 1)),
            allocator_warp_id=MMA_WARP,
            is_two_cta=self.two_cta,
            two_cta_tmem_dealloc_mbar_ptr=tail + 1,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        if warp == LOAD_WARP:
            self._load(ab, mma, tma_a, mA, sA, tma_b, mB, sB, mC)
        if warp == MMA_WARP:
            self._multiply(ab, acc, tmem, mma, sA, sB, mA, mC)
        if warp < EPILOGUE_WARPS:
            self._epilogue(acc, tmem, mma, tma_c, mC, sC, thread, warp)

    def _stage_bytes(self, a_layout: Any, b_layout: Any) -> int:
        one = (None, None, None, 0)
        a = cute.size_in_bytes(self.a_type, cute.slice_(a_layout, one))
        b = cute.size_in_bytes(self.b_type, cute.slice_(b_layout, one))
        return (a + b) * self.pair

    def _tiles(self, mC: cute.Tensor) -> tuple[Any, Any, Any]:
        """(first, count, step) of this cluster's tiles in row-major order, and tiles per row."""
        _, _, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        rows = cute.ceil_div(cute.size(mC, mode=[0]), self.cluster_tile[0])
        columns = cute.ceil_div(cute.size(mC, mode=[1]), self.cluster_tile[1])
        return cluster, rows * columns, clusters, columns

    def _place(self, mma: cute.TiledMma) -> tuple[Any, Any, Any]:
        """This CTA's (rank in pair, row, column) in the cluster, counted in MMA tiles."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        v, m, n, _ = self._cluster_vmnk(mma).get_flat_coord(rank)
        return v, m, n

    @cute.jit
    def _load(self, ab, mma, tma_a, mA, sA, tma_b, mB, sB, mC):
        vmnk = self._cluster_vmnk(mma)
        v, m, n = self._place(mma)
        part = mma.get_slice(v)
        gA = part.partition_A(cute.local_tile(mA, (self.tile[0], self.tile_k), (None, None)))
        gB = part.partition_B(cute.local_tile(mB, (self.tile[1], self.tile_k), (None, None)))
        along_n, along_m = (cute.make_layout(cute.size(vmnk, mode=[i])) for i in (2, 1))
        tAsA, tAgA = cpasync.tma_partition(
            tma_a, n, along_n, cute.group_modes(sA, 0, 3), cute.group_modes(gA, 0, 3)
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b, m, along_m, cute.group_modes(sB, 0, 3), cute.group_modes(gB, 0, 3)
        )
        mask_a = mask_b = None
        if cutlass.const_expr(self.cluster != (1, 1)):
            coord = vmnk.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
            mask_a = cpasync.create_tma_multicast_mask(vmnk, coord, mcast_mode=2)
            mask_b = cpasync.create_tma_multicast_mask(vmnk, coord, mcast_mode=1)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        first, count, step, columns = self._tiles(mC)
        for tile in cutlass.range(first, count, step, unroll=1):
            row = tile // columns * (self.cluster_tile[0] // self.tile[0]) + m
            column = tile % columns * self.cluster[1] + n
            for k in cutlass.range(cute.size(gA, mode=[4]), unroll=1):
                ab.producer_acquire(state)
                full = ab.producer_get_barrier(state)
                stage = (None, state.index)
                cute.copy(tma_a, tAgA[(None, row, k)], tAsA[stage], tma_bar_ptr=full, mcast_mask=mask_a)
                cute.copy(tma_b, tBgB[(None, column, k)], tBsB[stage], tma_bar_ptr=full, mcast_mask=mask_b)
                state.advance()
        ab.producer_tail(state)

    def _accumulators(self, mma: cute.TiledMma, base: Any) -> Any:
        shape = cute.append(mma.partition_shape_C(self.tile), ACC_STAGES)
        return cute.make_tensor(base, mma.make_fragment_C(shape).layout)

    @cute.jit
    def _multiply(self, ab, acc, tmem, mma, sA, sB, mA, mC):
        columns = memory.get_num_tmem_alloc_cols(
            mma.make_fragment_C(cute.append(mma.partition_shape_C(self.tile), ACC_STAGES)),
            arch=self.arch[:-1],
        )
        tmem.allocate(columns)
        tmem.wait_for_alloc()
        base = tmem.retrieve_ptr(self.acc_type)
        accumulators = self._accumulators(mma, base)
        tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        v, _, _ = self._place(mma)
        if v == 0:
            ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACC_STAGES)
            k_tiles = cute.ceil_div(cute.size(mA, mode=[1]), self.tile_k)
            first, count, step, _ = self._tiles(mC)
            for _t in cutlass.range(first, count, step, unroll=1):
                d = accumulators[(None, None, None, acc_state.index)]
                acc.producer_acquire(acc_state)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _k in cutlass.range(k_tiles, unroll=1):
                    ab.consumer_wait(ab_state)
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        at = (None, None, block, ab_state.index)
                        cute.gemm(mma, d, tCrA[at], tCrB[at], d)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    ab.consumer_release(ab_state)
                    ab_state.advance()
                acc.producer_commit(acc_state)
                acc_state.advance()
            # Not acc.producer_tail: it waits in CTAs of even rank only, and tensor memory is freed next.
            for _s in cutlass.range_constexpr(ACC_STAGES):
                acc.producer_acquire(acc_state)
                acc_state.advance()
        tmem.relinquish_alloc_permit()
        tmem.free(base)

    @cute.jit
    def _epilogue(self, acc, tmem, mma, tma_c, mC, sC, thread, warp):
        tmem.wait_for_alloc()
        accumulators = self._accumulators(mma, tmem.retrieve_ptr(self.acc_type))
        epi_tile = self._epilogue_tile()
        v, m, n = self._place(mma)
        cta_tile = (self.tile[0] // self.pair, self.tile[1])
        # (epi_m, epi_n, rows, columns, stage): the accumulator and, below, C in subtiles
        source = cute.flat_divide(accumulators[((None, None), 0, 0, None)], epi_tile)
        atom = utils.sm100.get_tmem_load_op(
            cta_tile, self._c_layout_enum(), self.c_type, self.acc_type, epi_tile, self.two_cta
        )
        load = tcgen05.make_tmem_copy(atom, source[(None, None, 0, 0, 0)])
        mine = load.get_slice(thread)
        tTR_tAcc = mine.partition_S(source)
        shape = mine.partition_D(cute.make_identity_tensor(cute.product_each(cute.shape(epi_tile)))).shape
        store_atom = utils.sm100.get_smem_store_op(self._c_layout_enum(), self.c_type, self.acc_type, load)
        store = cute.make_tiled_copy_D(store_atom, load)
        tRS_sC = store.get_slice(thread).partition_D(sC)

        barrier = pipeline.NamedBarrier(STORE_BARRIER, 32 * EPILOGUE_WARPS)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACC_STAGES)
        first, count, step, columns = self._tiles(mC)
        written = Int32(0)
        for tile in cutlass.range(first, count, step, unroll=1):
            row = (tile // columns * (self.cluster_tile[0] // self.tile[0]) + m) * self.pair + v
            column = tile % columns * self.cluster[1] + n
            gC = cute.flat_divide(cute.local_tile(mC, cta_tile, (row, column)), epi_tile)
            tCsC, tCgC = cpasync.tma_partition(
                tma_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
            )
            tCgC = cute.group_modes(tCgC, 1, cute.rank(tCgC))
            acc.consumer_wait(state)
            stage_acc = cute.group_modes(tTR_tAcc[(None, None, None, None, None, state.index)], 3, 5)
            subtiles = cute.size(stage_acc, mode=[3])
            for i in cutlass.range_constexpr(subtiles):
                values = cute.make_rmem_tensor(shape, self.acc_type)
                cute.copy(load, stage_acc[(None, None, None, i)], values)
                if cutlass.const_expr(i == subtiles - 1):
                    cute.arch.fence_view_async_tmem_load()
                    with cute.arch.elect_one():
                        acc.consumer_release(state)
                converted = cute.make_rmem_tensor(shape, self.c_type)
                converted.store(values.load().to(self.c_type))
                buffer = written % ACC_STAGES
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(ACC_STAGES - 1, read=True)
                barrier.arrive_and_wait()
                cute.copy(store, store.retile(converted), tRS_sC[(None, None, None, buffer)])
                cute.arch.fence_proxy("async.shared", space="cta")
                barrier.arrive_and_wait()
                if warp == 0:
                    cute.copy(tma_c, tCsC[(None, buffer)], tCgC[(None, i)])
                    cute.arch.cp_async_bulk_commit_group()
                written += 1
            state.advance()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
