"""The Hopper mainloop: wgmma by two consumer warp groups, fp32 accumulators in registers.

Of the 12 warps (384 threads) warp 0 loads, warp 1 is the comm warp, warps 2 and 3 are receive warps. Warps 4
to 11 are the two consumer warp groups: MMA and epilogue.

Ping-pong: the warp groups compute full tiles in turn, so one group's epilogue overlaps the other's wgmma.

    load warp       per k tile:  ab.acquire -> TMA A, B (complete on ab.full)
    warp group g    tile j (j % 2 == g):
        turn.wait(mma) -> per k tile: ab.wait, wgmma, ab.release of the k tile before -> turn.arrive(mma)
        turn.wait(epilogue) -> subtiles to the ring -> turn.arrive(epilogue)

Cooperative: both warp groups compute the same tile, 64 rows each, and fill the ring together. There
are no turns.

Swapped: ping-pong with A and B exchanged in the MMA. The MMA's 64 rows are rows of B (output features of the
weight). Its columns are rows of A (tokens), 16 or more. So few tokens fill a tile. A tile has 64 features:
with N = 8192 there are 128 tiles, and as many SMs load the weight. The accumulator is the transposed tile;
the store to the ring transposes it back.

Sums of 8-bit products have 14 bits in wgmma, so they are promoted by default (`mainloop.promotion`).

| pipeline | producer (arrivals per stage)   | consumer (arrivals per stage)                     | stages    |
|----------|---------------------------------|---------------------------------------------------|-----------|
| ab       | load warp: 1 + bytes of A and B | W warps of each of m + n - 1 CTAs                 | what fits |
| turn     | 4 warps of the other group      | (waits only)                                      | 2 turns   |

W is the number of warps that read a stage: 4 of one group, or (cooperative) all 8. In a cluster of m x n CTAs
those of a row or column share a load. In a cluster of (2, 1): 8 arrivals, cooperative 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline, utils
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.config.scale_blocks import NUM_MATRICES
from overlap_gemm.device.memory import DTYPES
from overlap_gemm.device.traced import Extras, Fragment, Scalar
from overlap_gemm.kernel import split
from overlap_gemm.kernel.loads import OperandLoads, tiles_at
from overlap_gemm.kernel.operand_views import OperandViews, as_accumulated
from overlap_gemm.kernel.roles import SubtileWriter
from overlap_gemm.kernel.split import part_of_k
from overlap_gemm.mainloop import blocks, leaves
from overlap_gemm.mainloop.loaded import LoadedMainloop
from overlap_gemm.mainloop.promotion import accumulate_promoted, multiply

LOAD_WARP = 0
COMM_WARP = 1
FIRST_EPILOGUE_WARP = 4
NUM_EPILOGUE_WARPS = 8
GROUP_WARPS = 4
PRODUCER_REGISTERS = 104  # with 96 ptxas may spill the receive role of two-shot kernels
CONSUMER_REGISTERS = 200  # 128 x 104 + 256 x 200 = 384 x 168, the registers at the launch
PROMOTING_REGISTERS = (72, 216)
VISITED = 4  # subtiles whose operands are loaded at once
NUM_TURNS = 2  # per tile: the MMA, then the epilogue


@dataclass(frozen=True)
class Sm90Resources:
    """Resources of the roles in one CTA.

    Attributes:
        ab: Pipeline of the stages of A, B and block scales.
        turn: `PipelineOrder` of the ping-pong groups; None if cooperative.
        sA: Stages of A.
        sB: Stages of B.
        parts: Resources of split K (`split.Parts`), or None.
        scales: Stages of block scales (`blocks.StageScales`), or None.
    """

    ab: Any
    turn: Scalar
    sA: Any
    sB: Any
    parts: Any
    scales: Any


@dataclass(frozen=True)
class ConsumerState:
    """State of an epilogue thread.

    Attributes:
        ab: Consumer state of ``ab``.
        turn: State of the group's turn; None if cooperative.
        first_thread: First thread of the warp group's part of the tiled MMA, if sums are promoted; else None.
    """

    ab: Any
    turn: Scalar
    first_thread: Any


@dataclass(frozen=True)
class MainloopSm90(LoadedMainloop):
    """wgmma mainloop for the tiles that `arch.ARCHS` lists for sm_90a.

    Attributes:
        config: The kernel's configuration; ``config.mma`` is "pingpong", "cooperative" or "swap_ab".
    """

    load_warp = LOAD_WARP
    comm_warp = COMM_WARP
    first_epilogue_warp = FIRST_EPILOGUE_WARP
    num_epilogue_warps = NUM_EPILOGUE_WARPS

    # -- host side of the launch

    def tiled_mma(self) -> cute.TiledMma:
        """Returns the tiled MMA: 64-row instructions, of one warp group or (cooperative) of two along M."""
        cfg, (first, second) = self.config, self.config.mma_order
        return utils.sm90.make_trivial_tiled_mma(
            DTYPES[cfg.in_dtypes[first]],
            DTYPES[cfg.in_dtypes[second]],
            *self.majors,
            cutlass.Float32,
            (cfg.epilogue_threads // 128, 1, 1),
            (64, self.mma_tile[1] // cfg.sum_parts),
        )

    def operands(self, a: cute.Tensor, b: cute.Tensor, extras: Extras) -> OperandViews:
        """Returns the TMA views of A (M x K), B (N x K) and scales, multicast in the cluster; on the host."""
        cfg = self.config
        a, b = leaves.cut(cfg, a), leaves.cut(cfg, b)
        _, b_layout = self._smem_layouts()
        scales = blocks.scales_of(cfg, *extras[:NUM_MATRICES]) if cfg.blocks else None
        return OperandViews(
            self.tiled_mma(), *self.tma_of_a(a), *self._tma(b, b_layout, cfg.tile[1], cfg.cluster[0]), scales
        )

    def tma_of_a(self, a: cute.Tensor) -> tuple[Any, Any]:
        """Returns the TMA load atom and the coordinate tensor of ``a``; see `Mainloop.tma_of_a`."""
        cfg = self.config
        return self._tma(a, self._smem_layouts()[0], cfg.tile[0], cfg.cluster[1])

    def tma_of_scales(self, scales: cute.Tensor) -> tuple[Any, Any]:
        """Returns the TMA load atom and the coordinate tensor of ``scales``; see `Mainloop.tma_of_scales`."""
        return blocks.tma_of_a(self.config, scales)

    def _tma(self, tensor: cute.Tensor, layout: Any, rows: int, multicast: int) -> tuple[Any, Any]:
        """Returns the TMA atom and tensor of an operand, whose box a cluster's CTAs may share."""
        op = cpasync.CopyBulkTensorTileG2SMulticastOp if multicast > 1 else cpasync.CopyBulkTensorTileG2SOp
        return cpasync.make_tiled_tma_atom(
            op(),
            tensor,
            cute.slice_(layout, (None, None, 0)),
            (rows, self.config.tile_k),
            num_multicast=multicast,
        )

    # -- kernel prologue

    @property
    def num_barriers(self) -> int:
        """Returns the 8-byte words of barriers that ``setup`` initialises: ab, turns, split K."""
        return 2 * self.config.ab_stages + NUM_TURNS * 2 + split.NUM_BARRIERS * (self.config.k_split > 1)

    def setup(self, ops: OperandViews, barriers: Any, smem: Any) -> Sm90Resources:
        """Creates pipelines, allocates stages; all threads. The caller synchronises the cluster then."""
        cfg = self.config
        multicast = cfg.cluster[0] + cfg.cluster[1] - 1
        ab = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=cfg.ab_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, multicast * cfg.epilogue_threads // 32
            ),
            tx_count=cfg.ab_loaded_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cfg.cluster, 1)),
            defer_sync=True,
        )
        turn = None
        if cfg.epilogue_groups > 1:
            turn = pipeline.PipelineOrder.create(
                barrier_storage=barriers + 2 * cfg.ab_stages,
                depth=NUM_TURNS,
                length=cfg.epilogue_groups,
                group_id=(cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_EPILOGUE_WARP)
                // GROUP_WARPS,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, GROUP_WARPS),
                defer_sync=True,
            )
        parts = None
        if cfg.k_split > 1:
            parts = split.setup(cfg, barriers + 2 * cfg.ab_stages + NUM_TURNS * 2, smem)
        sA, sB = self.allocate(smem, self._smem_layouts())
        scales = blocks.setup(cfg, smem) if cfg.blocks else None
        return Sm90Resources(ab, turn, sA, sB, parts, scales)

    def adjust_registers(self, is_epilogue: bool) -> None:
        """Moves registers (``setmaxnreg``) from the producer warp group (warps 0 to 3) to the other two.

        Per thread, of 168 at the launch: 104 and 200. If promotion needs more registers
        (`GemmConfig.receive_role_is_register_limited`): 72 and 216. Other swapped kernels keep 168. Their
        accumulators are small, and the receive role needs more registers for LL packets than for loads after
        flags.
        """
        producer, consumer = PRODUCER_REGISTERS, CONSUMER_REGISTERS
        if self.config.receive_role_is_register_limited:
            producer, consumer = PROMOTING_REGISTERS
        elif self.config.is_swap_ab:
            return
        if is_epilogue:
            cute.arch.setmaxregister_increase(consumer)
        else:
            cute.arch.setmaxregister_decrease(producer)

    # -- load role

    def loads(
        self, res: Sm90Resources, ops: OperandViews, row: Int32, col: Int32
    ) -> tuple[Any, Any, Any, Any]:
        """Returns the loads of this CTA's tile of A and of B, and its k tiles; see `Mainloop.loads`."""
        cfg = self.config
        cluster = cute.make_layout((*cfg.cluster, 1))
        coord = cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        m, n, _ = coord
        mask_a = cute.make_layout_image_mask(cluster, coord, mode=1) if cfg.cluster[1] > 1 else None
        mask_b = cute.make_layout_image_mask(cluster, coord, mode=0) if cfg.cluster[0] > 1 else None
        gA, gB = tiles_at(ops, row + m * cfg.tile[0], col + n * cfg.tile[1], cfg.tile, cfg.tile_k)
        a: Any = OperandLoads.shared(ops.tma_a, n, cfg.cluster[1], res.sA, gA, mask_a)
        b: Any = OperandLoads.shared(ops.tma_b, m, cfg.cluster[0], res.sB, gB, mask_b)
        if cfg.blocks is not None:
            first_row, first_col = row + m * cfg.tile[0], col + n * cfg.tile[1]
            a, b = ops.scales.joined(cfg, a, b, res.scales, first_row, first_col)
        return a, b, *self.part_of_k(ops)

    def private_roles(self) -> tuple[tuple[int, Any], ...]:
        """Returns no role: the epilogue warps issue the MMA."""
        return ()

    # -- epilogue side

    def epilogue_state(self, res: Sm90Resources, ops: OperandViews, group: Int32) -> ConsumerState:
        """Returns an epilogue thread's initial state.

        In ping-pong the state of ``ab`` skips the other group's k tiles: group 1 skips the first tile here,
        and `accumulate` skips one tile after each.
        """
        ab = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.ab_stages)
        turn = None
        if self.config.epilogue_groups > 1:
            ab.advance(group * self.part_of_k(ops)[1])
            turn = res.turn.state
        first_thread = None
        if self.config.promotes:
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_EPILOGUE_WARP
            part = warp // GROUP_WARPS % (self.config.epilogue_threads // 128)
            first_thread = part * 32 * GROUP_WARPS
        return ConsumerState(ab, turn, first_thread)

    @cute.jit
    def accumulate(
        self, res: Sm90Resources, ops: OperandViews, state: ConsumerState
    ) -> tuple[Any, ConsumerState]:
        """Computes the next tile of the group in registers.

        1. Ping-pong: waits for the group's MMA turn.
        2. Per k tile: waits on ab.full, issues the products, releases the preceding stage. (With promotion:
           waits for the products, and releases their stage.)
        3. Ping-pong: gives the MMA turn to the other group.
        4. Waits for the last products and releases their stage. (With promotion: done in 2.)
        5. Ping-pong: waits for the group's epilogue turn, which `drain` gives away.

        Returns:
            The accumulator, and the state after it. All stages of the tile are released.
        """
        cfg, mma = self.config, ops.mma
        pingpong = cfg.epilogue_groups > 1
        ab, turn, read = res.ab, res.turn, state.ab
        thread, _, _ = cute.arch.thread_idx()
        part = mma.get_slice((thread - 32 * FIRST_EPILOGUE_WARP) % cfg.epilogue_threads)
        first, second = self.config.mma_order
        stages = (res.sA, res.sB)
        operands_of = part
        if cutlass.const_expr(cfg.promotes):
            # Descriptors, which a group shares, in uniform registers: fewer instructions before the products.
            operands_of = mma.get_slice(state.first_thread)
        tCrA = mma.make_fragment_A(operands_of.partition_A(stages[first]))
        tCrB = mma.make_fragment_B(operands_of.partition_B(stages[second]))
        acc = cute.make_rmem_tensor(mma.partition_shape_C(self.mma_tile), cutlass.Float32)
        nodes = leaves.nodes_of(cfg, cute.size(acc))
        first_k, k_tiles = self.part_of_k(ops)
        operands = (tCrA, tCrB)
        freed = read.clone()

        if cutlass.const_expr(pingpong):
            turn.wait(state.turn)
        if cutlass.const_expr(cfg.promotes):
            scales = None
            if cutlass.const_expr(res.scales is not None):
                scales = partial(res.scales.factors, cfg, blocks.rows_of(part, cfg.tile))
            read = accumulate_promoted(cfg, mma, acc, nodes, operands, ab, read, first_k, k_tiles, scales)
        else:
            of_leaf = k_tiles // cfg.accumulations
            if cutlass.const_expr(nodes is not None):
                for leaf in cutlass.range(cfg.leaves - 1, unroll=1):
                    mma, read, freed = self._accumulate(mma, acc, operands, ab, read, freed, of_leaf)
                    warpgroup.wait_group(0)
                    ab.consumer_release(freed)
                    freed.advance()
                    leaves.park(cfg, acc, nodes, leaf)
            mma, read, freed = self._accumulate(mma, acc, operands, ab, read, freed, of_leaf)
        next_turn = state.turn
        if cutlass.const_expr(pingpong):
            next_turn = self._arrive(turn, next_turn)
        if cutlass.const_expr(not cfg.promotes):
            warpgroup.wait_group(0)
            ab.consumer_release(freed)
        if cutlass.const_expr(nodes is not None):
            leaves.finish(cfg, acc, nodes)
        if cutlass.const_expr(pingpong):
            read.advance(k_tiles)
            turn.wait(next_turn)
        return acc, ConsumerState(read, next_turn, state.first_thread)

    @cute.jit
    def _accumulate(
        self,
        mma: Any,
        acc: cute.Tensor,
        operands: tuple[Any, Any],
        ab: Any,
        read: pipeline.PipelineState,
        freed: pipeline.PipelineState,
        k_tiles: Int32,
    ) -> tuple[Any, pipeline.PipelineState, pipeline.PipelineState]:
        """Sums ``k_tiles`` k tiles into ``acc``, from zero.

        Per k tile: waits on ab.full, issues the products, waits until those of the k tile before are complete
        (``wait_group 1``), releases the stage before. On return the last products are in flight; ``freed`` is
        their stage, which the caller releases.
        """
        num_blocks = cute.size(operands[0], mode=[2])
        ab.consumer_wait(read)
        mma = multiply(mma, acc, operands, range(num_blocks), read)
        read.advance()
        for _ in cutlass.range(1, k_tiles, unroll=1):
            ab.consumer_wait(read)
            mma = multiply(mma, acc, operands, range(num_blocks), read, adds=True)
            warpgroup.wait_group(1)
            ab.consumer_release(freed)
            freed.advance()
            read.advance()
        return mma, read, freed

    def drain(
        self,
        res: Sm90Resources,
        acc: cute.Tensor,
        state: ConsumerState,
        writer: SubtileWriter,
        ring_state: pipeline.PipelineState,
    ) -> tuple[ConsumerState, pipeline.PipelineState]:
        """Passes the accumulator to ``writer`` by subtiles; then (ping-pong) gives the epilogue turn away."""
        cfg = self.config
        if cfg.k_split > 1:
            ring_state = self._drain_split(res, acc, writer, ring_state)
        else:
            ring_state = self._write(acc, writer, ring_state)
        if cfg.epilogue_groups > 1:
            state = ConsumerState(state.ab, self._arrive(res.turn, state.turn), state.first_thread)
        return state, ring_state

    @cute.jit
    def _drain_split(
        self, res: Sm90Resources, acc: cute.Tensor, writer: SubtileWriter, ring_state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Adds the other CTAs' accumulators and writes the sum (first part of K), or sends its part."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = (warp - FIRST_EPILOGUE_WARP) // 4
        if part_of_k() == 0:
            split.add(self.config, res.parts, acc, group, writer.thread)
            ring_state = self._write(acc, writer, ring_state)
        else:
            split.send(self.config, res.parts, acc, group, writer.thread)
        return ring_state

    def _write(
        self, acc: cute.Tensor, writer: SubtileWriter, ring_state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Visits and writes the accumulator's subtiles in order; returns the ring state after them."""
        cfg = self.config
        values = cfg.epi_tile[0] * cfg.epi_tile[1] // cfg.epilogue_threads
        layout = cute.make_layout(((2, 2, values // 4), 1, 1))
        # A thread's values of one 64-row instruction are contiguous, by column: so are a subtile's (swapped:
        # its columns are the tile's rows).
        fragments = [cute.make_tensor(acc.iterator + i * values, layout) for i in range(cfg.subtiles)]
        number, step = max(VISITED, writer.at_once), cfg.subtile_step
        for first in range(0, cfg.subtiles, number):
            indices = range(first, min(first + number, cfg.subtiles))
            for index in indices:
                writer.visit(fragments[index], index)
            joined = [writer.joined(fragments[i : i + step], i) for i in indices[::step]]
            ring_state = writer.write_all(joined, first, ring_state)
        return ring_state

    def store_to_stage(
        self, res: Sm90Resources, ops: OperandViews, thread: Int32, fragment: Fragment, stage: Any
    ) -> None:
        """Writes ``fragment``, converted to the stage's dtype, to the swizzled ``stage``."""
        cfg, dtype, stage = self.config, stage.element_type, as_accumulated(self.config, stage)
        matrix = cute.make_copy_atom(StMatrix8x8x16bOp(cfg.is_swap_ab, 4), DTYPES[cfg.half_dtype])
        adjacent = 1 if cfg.is_swap_ab else 2  # a thread's values in a row of the stage
        other = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=adjacent * dtype.width
        )
        tiled = cute.make_tiled_copy_S(
            matrix if dtype.width == 16 else other, cute.make_tiled_copy_C_atom(matrix, ops.mma)
        )
        part = tiled.get_slice(thread)
        converted = cute.make_rmem_tensor(part.partition_S(stage).shape, dtype)
        converted.store(fragment.load().to(dtype).reshape(converted.shape))
        cute.copy(tiled, converted, part.partition_D(stage))

    def fragment_part(self, res: Sm90Resources, ops: OperandViews, thread: Int32, subtile: Scalar) -> Any:
        """Returns this thread's part of a tensor shaped as a subtile, in the order of the fragment."""
        return ops.mma.get_slice(thread).partition_C(as_accumulated(self.config, subtile))

    # -- details

    @cute.jit
    def _arrive(self, turn: Scalar, state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Arrives once per warp on the other group's barrier of turn ``state``; returns the next state."""
        after = state.clone()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            turn.arrive(state.clone())
        after.advance()
        return after

    def _smem_layouts(self) -> tuple[Any, Any]:
        cfg = self.config
        tiler, dtype = (*cfg.tile, cfg.tile_k), DTYPES[cfg.in_dtype]
        row, col = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        return (
            utils.sm90.make_smem_layout_a(row if cfg.a_major == "k" else col, tiler, dtype, cfg.ab_stages),
            utils.sm90.make_smem_layout_b(row if cfg.b_major == "k" else col, tiler, dtype, cfg.ab_stages),
        )
