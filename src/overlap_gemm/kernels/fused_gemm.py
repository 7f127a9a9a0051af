"""The kernel: a mainloop, an op and a ring, composed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute, memory
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import allocate_stages, output_stage_layout
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.operands import Operands
from overlap_gemm.kernels.roles import epilogue_role, load_role
from overlap_gemm.kernels.work import plan_work
from overlap_gemm.pipelines import EpilogueRing


@dataclass(frozen=True)
class FusedGemm:
    """A persistent, warp-specialised GEMM whose subtiles leave through a ring emptied by a comm lane.

    Attributes:
        mainloop: :class:`MainloopSm90` or :class:`MainloopSm100`.
        op: :class:`PlainGemm` or :class:`ReduceScatter`.
    """

    mainloop: Any
    op: Any

    @property
    def config(self) -> GemmConfig:
        """The kernel's configuration."""
        return self.mainloop.config

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        exchange: Exchange | None,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Encodes the TMA descriptors and launches ``num_clusters`` clusters on ``stream``."""
        cfg = self.config
        ops = self.mainloop.operands(a, b)
        tma_out, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, output_stage_layout(cfg), cfg.epi_tile
        )
        self.kernel(ops.mma, ops.tma_a, ops.a, ops.tma_b, ops.b, tma_out, out_view, bias, exchange).launch(
            grid=(num_clusters * cfg.cluster[0], cfg.cluster[1], 1),
            block=(cfg.threads, 1, 1),
            cluster=(*cfg.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        a: cute.Tensor,
        tma_b: cute.CopyAtom,
        b: cute.Tensor,
        tma_out: cute.CopyAtom,
        out: cute.Tensor,
        bias: Any,
        exchange: Any,
    ) -> None:
        """Sets up shared memory and pipelines, then gives each warp its role."""
        cfg, mainloop, op = self.config, self.mainloop, self.op
        ops = Operands(mma, tma_a, a, tma_b, b)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == mainloop.load_warp:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_out)
        rows, cols = cute.size(a, mode=[0]), cute.size(b, mode=[0])
        work = plan_work(cfg, op.order, rows, cols, *op.place(exchange, rows))
        context = op.context(bias, exchange, work)

        smem = memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, mainloop.num_barriers + 2 * cfg.ring_stages, byte_alignment=8)
        res = mainloop.setup(ops, barriers + 2 * cfg.ring_stages, smem)
        ring = EpilogueRing.create(barriers, cfg.ring_stages, cfg.inflight, cfg.epilogue_threads // 32)
        stages = allocate_stages(cfg, smem)
        # Not relaxed: it also orders every thread's read of the epoch before this CTA's ticket at the end.
        pipeline_init_arrive(cluster_shape_mn=cute.make_layout(cfg.cluster), is_relaxed=False)
        pipeline_init_wait(cluster_shape_mn=cute.make_layout(cfg.cluster))

        if (
            warp < mainloop.first_epilogue_warp
            or warp >= mainloop.first_epilogue_warp + mainloop.num_epilogue_warps
        ):
            mainloop.adjust_registers(is_epilogue=False)
            if warp == mainloop.load_warp:
                load_role(mainloop, op, res, ops, work)
            for private_warp, role in mainloop.private_roles():
                if warp == private_warp:
                    role(res, ops, work)
            if warp == mainloop.comm_warp and cute.arch.lane_idx() == 0:
                op.comm_role(ring, stages, work, context, tma_out, out)
        else:
            mainloop.adjust_registers(is_epilogue=True)
            group = (warp - mainloop.first_epilogue_warp) * 32 // cfg.epilogue_threads
            epilogue_role(mainloop, op, res, ops, ring, stages, work, context, group)
