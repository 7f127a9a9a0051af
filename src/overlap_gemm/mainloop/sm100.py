"""The Blackwell mainloop: tcgen05.mma by one warp, fp32 accumulators double buffered in tensor memory.

    load warp          per k tile:  ab.acquire -> TMA A, B (complete on ab.full)
    MMA warp           per tile:    acc.acquire; per k tile: ab.wait -> mma -> ab.release; acc.commit
    4 epilogue warps   per tile:    acc.wait -> subtiles from tensor memory -> acc.release

| pipeline | producer (arrivals per stage)   | consumer (arrivals per stage)                   | stages   |
|----------|---------------------------------|-------------------------------------------------|----------|
| ab       | load warp: 1 + bytes of A and B | tcgen05.commit of every CTA that reads the tile | what fits |
| acc      | tcgen05.commit: 1               | epilogue warps: 4 per CTA of the pair           | 2, or 1  |

There is one accumulator if two leave no columns for scales. Scales that the MMA reads are loaded into the
stages of A and B (:mod:`overlap_gemm.mainloop.mx`).

2-CTA: the MMA warp of the leader, the even CTA, issues the MMA of both. Each CTA loads its 128 rows of A,
half the tile's rows of B, and all scales of B. It has its 128 rows of the accumulator. The leader's ab.full
counts the bytes of both.

Swapped: 1-CTA, with A and B exchanged in the MMA, for few tokens; see :mod:`overlap_gemm.mainloop.sm90`. The
accumulator is the transposed tile; the store to the ring transposes it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, memory, pipeline, utils
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.config.gemm_config import TMEM_COLUMNS
from overlap_gemm.config.scale_blocks import MX, NUM_MATRICES
from overlap_gemm.device.memory import DTYPES
from overlap_gemm.device.traced import Extras, Fragment, Scalar
from overlap_gemm.kernel import split
from overlap_gemm.kernel.loads import OperandLoads, tiles_at
from overlap_gemm.kernel.operand_views import OperandViews, as_accumulated
from overlap_gemm.kernel.roles import SubtileWriter
from overlap_gemm.kernel.split import part_of_k
from overlap_gemm.kernel.work import Work
from overlap_gemm.mainloop import leaves, mx
from overlap_gemm.mainloop.loaded import LoadedMainloop

EPILOGUE_WARPS = 4
MMA_WARP = 4
LOAD_WARP = 5
COMM_WARP = 6
TMEM_BARRIER = 1  # named barrier: MMA warp and epilogue warps, tensor memory allocated


@dataclass(frozen=True)
class Sm100Resources:
    """Resources of the roles in one CTA.

    ``ab`` and ``acc`` are pipelines, ``tmem`` the allocator of tensor memory, ``sA`` and ``sB`` stages.
    ``parts`` are those of split K (`split.Parts`), ``scales`` stages (`mx.MxStages`); both may be None.
    """

    ab: Any
    acc: Any
    tmem: Any
    sA: Any
    sB: Any
    parts: Any
    scales: Any


@dataclass(frozen=True)
class Accumulator:
    """A thread's view of one finished accumulator: copy of a subtile to registers, its sources, its shape.

    ``nodes`` are those of the leaves before the last, ``(values, subtiles, levels)`` (`leaves`), or None.
    """

    copy: Any
    tmem: Any  # ((T2R), 1, 1, subtiles)
    shape: Any
    nodes: Any


@dataclass(frozen=True)
class MainloopSm100(LoadedMainloop):
    """tcgen05 mainloop for the tiles that `arch.ARCHS` lists for sm_100a and sm_103a.

    Attributes:
        config: The kernel's configuration; ``config.mma`` is "1cta", "2cta" or "swap_ab".
    """

    load_warp = LOAD_WARP
    comm_warp = COMM_WARP
    first_epilogue_warp = 0
    num_epilogue_warps = EPILOGUE_WARPS

    # -- host side of the launch

    def tiled_mma(self) -> cute.TiledMma:
        """Returns the tiled MMA; one instruction covers the tile."""
        cfg, (first, second) = self.config, self.config.mma_order
        if cfg.blocks == MX:
            return mx.tiled_mma(cfg, *self.majors)
        return utils.sm100.make_trivial_tiled_mma(
            DTYPES[cfg.in_dtypes[first]],
            DTYPES[cfg.in_dtypes[second]],
            *self.majors,
            cutlass.Float32,
            mx.cta_group(cfg),
            self.mma_tile,
        )

    def operands(self, a: cute.Tensor, b: cute.Tensor, extras: Extras) -> OperandViews:
        """Returns the TMA views of A (M x K), B (N x K) and scales, multicast in the cluster; on the host."""
        a, b = leaves.cut(self.config, a), leaves.cut(self.config, b)
        scales = mx.scales_of(self.config, *extras[:NUM_MATRICES]) if self.config.blocks == MX else None
        return OperandViews(self.tiled_mma(), *self._tma(a, 0), *self._tma(b, 1), scales)

    def tma_of_a(self, a: cute.Tensor) -> tuple[Any, Any]:
        """Returns the TMA load atom and the coordinate tensor of ``a``; see `Mainloop.tma_of_a`."""
        return self._tma(a, 0)

    def tma_of_scales(self, scales: cute.Tensor) -> tuple[Any, Any]:
        """Returns the TMA load atom and the coordinate tensor of ``scales``; see `Mainloop.tma_of_scales`."""
        return mx.tma_of(self.config, scales, self.config.scale_atoms[0])

    def _tma(self, tensor: cute.Tensor, operand: int) -> tuple[Any, Any]:
        """Returns the TMA load atom and the coordinate tensor of A (``operand`` 0) or B (1)."""
        mma = self.tiled_mma()
        make, op = cute.nvgpu.make_tiled_tma_atom_B, utils.sm100.cluster_shape_to_tma_atom_B
        if operand == self.config.mma_order[0]:
            make, op = cute.nvgpu.make_tiled_tma_atom_A, utils.sm100.cluster_shape_to_tma_atom_A
        return make(
            op(self.config.cluster, mma.thr_id),
            tensor,
            cute.slice_(self._smem_layouts(mma)[operand], (None, None, None, 0)),
            (*self.mma_tile, self.config.tile_k),
            mma,
            self._cluster_layout(mma).shape,
        )

    # -- kernel prologue

    @property
    def num_barriers(self) -> int:
        """Returns the 8-byte words of barriers that ``setup`` needs: ab, acc, tensor memory, split K."""
        split_barriers = split.NUM_BARRIERS * (self.config.k_split > 1)
        return 2 * self.config.ab_stages + 2 * self.config.acc_stages + 2 + split_barriers

    def setup(self, ops: OperandViews, barriers: Any, smem: Any) -> Sm100Resources:
        """Creates pipelines, allocates stages; all threads. The caller synchronises the cluster then."""
        cfg, mma = self.config, ops.mma
        cluster = self._cluster_layout(mma)
        multicast = cute.size(cluster, mode=[2]) + cute.size(cluster, mode=[1]) - 1
        ab = pipeline.PipelineTmaUmma.create(
            barrier_storage=barriers,
            num_stages=cfg.ab_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, multicast),
            tx_count=cfg.ab_loaded_bytes * cfg.cta_group,
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        barriers = barriers + 2 * cfg.ab_stages
        acc = pipeline.PipelineUmmaAsync.create(
            barrier_storage=barriers,
            num_stages=cfg.acc_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * cfg.cta_group),
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        barriers = barriers + 2 * cfg.acc_stages
        tmem = memory.TmemAllocator(
            cute.recast_ptr(barriers, dtype=Int32),
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, 32 * (EPILOGUE_WARPS + 1)),
            allocator_warp_id=MMA_WARP,
            is_two_cta=cfg.cta_group == 2,
            two_cta_tmem_dealloc_mbar_ptr=barriers + 1,
        )
        parts = split.setup(cfg, barriers + 2, smem) if cfg.k_split > 1 else None
        sA, sB = self.allocate(smem, self._smem_layouts(mma))
        scales = mx.setup(cfg, mma, smem) if cfg.blocks == MX else None
        return Sm100Resources(ab, acc, tmem, sA, sB, parts, scales)

    def adjust_registers(self, is_epilogue: bool) -> None:
        """Does nothing: with 352 threads a CTA each thread has enough registers."""

    # -- load role

    def loads(
        self, res: Sm100Resources, ops: OperandViews, row: Int32, col: Int32
    ) -> tuple[Any, Any, Any, Any]:
        """Returns the loads of this CTA's part of A and of B, and its k tiles; see `Mainloop.loads`."""
        cfg, tile = self.config, self.config.tile
        cluster = self._cluster_layout(ops.mma)
        v, m, n, _ = cluster.get_flat_coord(self._place_in_cluster)
        part = ops.mma.get_slice(v)
        mask_a, mask_b = self._multicast_masks(cluster)
        gA, gB = tiles_at(ops, row + m * tile[0], col + n * tile[1], tile, cfg.tile_k)
        columns, rows = cute.size(cluster, mode=[2]), cute.size(cluster, mode=[1])
        roles, (of_a, of_b) = (part.partition_A, part.partition_B), cfg.mma_order
        a: Any = OperandLoads.shared(ops.tma_a, n, columns, res.sA, roles[of_a](gA), mask_a)
        b: Any = OperandLoads.shared(ops.tma_b, m, rows, res.sB, roles[of_b](gB), mask_b)
        if cfg.blocks == MX:
            first_row = row + m * tile[0] + v * cfg.cta_tile[0]
            a, b = ops.scales.joined(cfg, a, b, res.scales, first_row, col + n * tile[1])
        return a, b, *self.part_of_k(ops)

    # -- MMA role

    def private_roles(self) -> tuple[tuple[int, Any], ...]:
        """Returns (warp, role) of the MMA role."""
        return ((MMA_WARP, self.mma_role),)

    @cute.jit
    def mma_role(self, res: Sm100Resources, ops: OperandViews, work: Work) -> None:
        """Issues the MMAs of all tiles; the MMA warp. With 2 CTAs only the leader's warp issues.

        Per tile, or leaf of a tile: waits until the epilogue has released an accumulator. Per k tile: waits
        on ab.full, issues the MMAs, commits the release of the stage. The last commit signals acc.full.
        First it allocates tensor memory (`_tmem_columns`), for which the epilogue warps wait at named barrier
        `TMEM_BARRIER`. At the end it frees it, when the epilogue warps have released every accumulator.
        """
        mma = ops.mma
        res.tmem.allocate(self._tmem_columns)
        res.tmem.wait_for_alloc()
        base = res.tmem.retrieve_ptr(cutlass.Float32)
        accumulators = cute.make_tensor(base, self._accumulator_layout(mma))
        scales: Any = None
        if cutlass.const_expr(self.config.blocks == MX):
            scales = mx.in_tmem(self.config, mma, res.scales, base + self._accumulator_columns)
        stages, (first, second) = (res.sA, res.sB), self.config.mma_order
        tCrA, tCrB = mma.make_fragment_A(stages[first]), mma.make_fragment_B(stages[second])
        ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.ab_stages)
        acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.acc_stages)
        k_tiles, depth = split.k_tiles_of(self.config, ops), split.depth_of(ops.b)
        if self._place_in_cluster % self.config.cta_group == 0:
            for _ in cutlass.range(work.num_tiles * self.config.accumulations, unroll=1):
                tCtAcc = accumulators[(None, None, None, acc_state.index)]
                res.acc.producer_acquire(acc_state)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _k in cutlass.range(k_tiles, unroll=1):
                    res.ab.consumer_wait(ab_state)
                    if cutlass.const_expr(scales is not None):
                        scales.copy(ab_state.index)
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        at = (None, None, block, ab_state.index)
                        if cutlass.const_expr(scales is not None):
                            if MX[2] * block < depth - _k * self.config.tile_k:
                                a, b = scales.scaled(tCrA[at], tCrB[at], block)
                                cute.gemm(mma, tCtAcc, a, b, tCtAcc)
                        else:
                            cute.gemm(mma, tCtAcc, tCrA[at], tCrB[at], tCtAcc)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    res.ab.consumer_release(ab_state)
                    ab_state.advance()
                res.acc.producer_commit(acc_state)
                acc_state.advance()
            for _ in cutlass.range_constexpr(self.config.acc_stages):
                res.acc.producer_acquire(acc_state)
                acc_state.advance()
        res.tmem.relinquish_alloc_permit()
        res.tmem.free(base)

    # -- epilogue side

    def epilogue_state(self, res: Sm100Resources, ops: OperandViews, group: Int32) -> pipeline.PipelineState:
        """Returns an epilogue thread's initial state; first waits for tensor memory at `TMEM_BARRIER`."""
        res.tmem.wait_for_alloc()
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.acc_stages)

    @cute.jit
    def accumulate(
        self, res: Sm100Resources, ops: OperandViews, state: pipeline.PipelineState
    ) -> tuple[Accumulator, pipeline.PipelineState]:
        """Waits for the next finished accumulator, which stays in tensor memory until `drain`.

        With leaves: waits for each in turn, parks all but the last (`leaves.park`), and releases their
        accumulators.
        """
        cfg = self.config
        copy, stages, shape = self._accumulator_views(res, ops)
        nodes = leaves.nodes_of(cfg, cute.size(shape), cfg.subtiles)
        if cutlass.const_expr(nodes is not None):
            for leaf in cutlass.range(cfg.leaves - 1, unroll=1):
                res.acc.consumer_wait(state)
                acc = Accumulator(copy, _of_stage(stages, state.index), shape, nodes)
                for index in cutlass.range(cfg.subtiles, unroll=1):
                    fragment = self._load_subtile(acc, index)
                    cute.arch.fence_view_async_tmem_load()
                    leaves.park(cfg, fragment, nodes[(None, index, None)], leaf)
                with cute.arch.elect_one():
                    res.acc.consumer_release(state)
                state.advance()
        res.acc.consumer_wait(state)
        return Accumulator(copy, _of_stage(stages, state.index), shape, nodes), state

    @cute.jit
    def drain(
        self,
        res: Sm100Resources,
        acc: Accumulator,
        state: pipeline.PipelineState,
        writer: SubtileWriter,
        ring_state: pipeline.PipelineState,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """Passes the accumulator to ``writer`` by subtiles; releases it when the last is in registers."""
        subtiles, step = self.config.subtiles, self.config.subtile_step
        for first in cutlass.range(0, subtiles, writer.at_once, unroll=1):
            joined: list[Any] = []
            for part in cutlass.range_constexpr(0, writer.at_once, step):
                index = first + part
                fragments = [self._load_subtile(acc, index + i) for i in range(step)]
                cute.arch.fence_view_async_tmem_load()
                if index == subtiles - step:
                    with cute.arch.elect_one():
                        res.acc.consumer_release(state)
                if cutlass.const_expr(acc.nodes is not None):
                    for i in cutlass.range_constexpr(step):
                        leaves.finish(self.config, fragments[i], acc.nodes[(None, index + i, None)])
                if cutlass.const_expr(self.config.k_split > 1):
                    ring_state = self._write_split(res, fragments[0], state, writer, ring_state)
                else:
                    for i in cutlass.range_constexpr(step):
                        writer.visit(fragments[i], index + i)
                    joined.append(writer.joined(fragments, index))
            ring_state = writer.write_all(joined, first, ring_state)
        state.advance()
        return state, ring_state

    def _load_subtile(self, acc: Accumulator, index: Scalar) -> Any:
        fragment = cute.make_rmem_tensor(acc.shape, cutlass.Float32)
        cute.copy(acc.copy, acc.tmem[(None, None, None, index)], fragment)
        return fragment

    @cute.jit
    def _write_split(
        self,
        res: Sm100Resources,
        fragment: cute.Tensor,
        state: pipeline.PipelineState,
        writer: SubtileWriter,
        ring_state: pipeline.PipelineState,
    ) -> pipeline.PipelineState:
        """Adds the other CTAs' accumulators and writes the sum (first part of K), or sends the fragment.

        A split tile is one subtile. Tiles alternate between two accumulators: the accumulator's index is the
        argument ``group`` of `split`.
        """
        if part_of_k() == 0:
            split.add(self.config, res.parts, fragment, state.index, writer.thread)
            writer.visit(fragment, Int32(0))
            ring_state = writer.write(fragment, Int32(0), ring_state)
        else:
            split.send(self.config, res.parts, fragment, state.index, writer.thread)
        return ring_state

    def store_to_stage(
        self, res: Sm100Resources, ops: OperandViews, thread: Int32, fragment: Fragment, stage: Any
    ) -> None:
        """Writes ``fragment``, converted to the stage's dtype, to the swizzled ``stage``."""
        copy, _, _ = self._accumulator_views(res, ops)
        dtype, stage = stage.element_type, as_accumulated(self.config, stage)
        atom = utils.sm100.get_smem_store_op(self._accumulated_major, dtype, cutlass.Float32, copy)
        tiled = cute.make_tiled_copy_D(atom, copy)
        converted = cute.make_rmem_tensor(fragment.shape, dtype)
        converted.store(fragment.load().to(dtype))
        cute.copy(tiled, tiled.retile(converted), tiled.get_slice(thread).partition_D(stage))

    def fragment_part(self, res: Sm100Resources, ops: OperandViews, thread: Int32, subtile: Scalar) -> Any:
        """Returns this thread's part of a tensor shaped as a subtile, in the order of the fragment."""
        copy, _, _ = self._accumulator_views(res, ops)
        return copy.get_slice(thread).partition_D(as_accumulated(self.config, subtile))

    # -- which operand is whose part

    @property
    def _accumulated_major(self) -> LayoutEnum:
        """Returns the major of a row-major subtile in the accumulator's modes: column-major if swapped."""
        return LayoutEnum.COL_MAJOR if self.config.is_swap_ab else LayoutEnum.ROW_MAJOR

    @property
    def _place_in_cluster(self) -> Any:
        """Returns this CTA's index among the cluster's CTAs of different tiles; parts of K share it."""
        place = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return place % self.config.cluster_size if self.config.k_split > 1 else place

    # -- layouts

    def _cluster_layout(self, mma: cute.TiledMma) -> cute.Layout:
        return cute.tiled_divide(cute.make_layout((*self.config.cluster, 1)), (mma.thr_id.shape,))

    def _smem_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any]:
        """Returns the layouts of the stages of A and of B."""
        tiler, dtype = (*self.mma_tile, self.config.tile_k), DTYPES[self.config.in_dtype]
        stages = self.config.ab_stages
        layouts = (
            utils.sm100.make_smem_layout_a(mma, tiler, dtype, stages),
            utils.sm100.make_smem_layout_b(mma, tiler, dtype, stages),
        )
        first, second = self.config.mma_order
        return layouts[first], layouts[second]

    def _multicast_masks(self, cluster: cute.Layout) -> tuple[Any, Any]:
        """Returns the CTAs that share this CTA's loads of A and of B; None without a cluster."""
        if self.config.cluster_size == 1:
            return None, None
        coord = cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        return (
            cpasync.create_tma_multicast_mask(cluster, coord, mcast_mode=2),
            cpasync.create_tma_multicast_mask(cluster, coord, mcast_mode=1),
        )

    @property
    def _accumulator_columns(self) -> int:
        return self.config.acc_stages * self.mma_tile[1]

    @property
    def _tmem_columns(self) -> int:
        """Returns the columns to allocate: all 512 with scales, else accumulators times the MMA's N."""
        return TMEM_COLUMNS if self.config.blocks == MX else self._accumulator_columns

    def _accumulator_layout(self, mma: cute.TiledMma) -> Any:
        shape = cute.append(mma.partition_shape_C(self.mma_tile), self.config.acc_stages)
        return mma.make_fragment_C(shape).layout

    def _accumulator_views(self, res: Sm100Resources, ops: OperandViews) -> tuple[Any, Any, Any]:
        """Returns the copy of a subtile, this thread's source for all subtiles and stages, and a shape."""
        cfg = self.config
        base = res.tmem.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(base, self._accumulator_layout(ops.mma))
        # ((atom_m, atom_n), 1, 1, stage) -> (m, n, stage): one MMA instruction covers the tile
        acc = acc[((None, None), 0, 0, None)]
        first, second = self.config.mma_order
        epi_tile = cfg.epi_tile[first], cfg.epi_tile[second]
        subtiles = cute.flat_divide(acc, epi_tile)  # (epi_m, epi_n, rows, columns, stage)
        atom = utils.sm100.get_tmem_load_op(
            self.mma_tile, self._accumulated_major, DTYPES[cfg.half_dtype], cutlass.Float32, epi_tile, False
        )
        copy = tcgen05.make_tmem_copy(atom, subtiles[(None, None, 0, 0, 0)])
        thread, _, _ = cute.arch.thread_idx()
        part = copy.get_slice(thread)
        source = part.partition_S(subtiles)
        shape = part.partition_D(cute.make_identity_tensor(epi_tile)).shape
        return copy, source, shape


def _of_stage(tmem: Any, stage: Scalar) -> Any:
    """Returns a thread's source for the subtiles of accumulator ``stage``; the last mode is the subtile."""
    return cute.group_modes(tmem[(None, None, None, None, None, stage)], 3, 5)
