"""`FusedGemm`: the kernel, composed of a mainloop, an op and a ring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute, memory
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.rules import CONTROL_WORDS
from overlap_gemm.device.traced import Extras, Stages
from overlap_gemm.kernel.dependent_launch import (
    launch_dependents,
    load_weights_early,
    wait_for_prerequisite,
)
from overlap_gemm.kernel.operand_views import OperandViews, interleaved
from overlap_gemm.kernel.protocols import KernelOp, Mainloop
from overlap_gemm.kernel.roles import epilogue_role, load_role
from overlap_gemm.kernel.shared_words import CtaCounters, smem_peer_table
from overlap_gemm.kernel.split import end_together, sent_of
from overlap_gemm.kernel.stages import allocate_stages
from overlap_gemm.kernel.work import plan_work
from overlap_gemm.pipelines import EpilogueRing


@dataclass(frozen=True)
class FusedGemm:
    """A persistent, warp-specialised GEMM whose subtiles are sent through a ring that a comm lane empties.

    Attributes:
        mainloop: :class:`MainloopSm90` or :class:`MainloopSm100`.
        op: :class:`PlainGemm`, :class:`ReduceScatter` or another.
        cooperative: Whether the launch is refused unless all its CTAs are resident at once.
    """

    mainloop: Mainloop
    op: KernelOp
    cooperative: bool = False

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""
        return self.mainloop.config

    @property
    def name(self) -> str:
        """Returns the name of the entry: the op and the configuration."""
        return f"overlap_gemm_{type(self.op).__name__}_{self.config.name}"

    @cute.jit
    def __call__(
        self,
        a: Any,
        b: Any,
        out: Any,
        extras: Extras,
        exchange: Any,
        num_clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Encodes the TMA descriptors and launches ``num_clusters`` clusters on ``stream``."""
        cfg = self.config
        is_swapped = others = later = None
        if cutlass.const_expr(cfg.has_two_weights):
            b, is_swapped = interleaved(*b)
        if cutlass.const_expr(isinstance(a, tuple)):
            a, b, later = self._parts_of_k(a, b, extras, exchange)
        if cutlass.const_expr(cfg.weights > 1 and later is None):
            further = [self.mainloop.operands(a, other, extras) for other in b[1:]]
            b, others = b[0], tuple([(views.tma_b, views.b) for views in further])
        b = self.op.view_of_b(b, exchange, 0)
        ops = self.mainloop.operands(a, b, extras)
        ops = ops._replace(is_swapped=is_swapped, others=others, later=later)
        more = self.op.more_sources(self.mainloop, exchange)
        self.kernel(ops, more, self.op.output(out, exchange), out, extras, exchange).launch(
            grid=(num_clusters * cfg.cluster[0], cfg.cluster[1], cfg.k_split),
            block=(cfg.threads, 1, 1),
            cluster=(*cfg.cluster, cfg.k_split),
            min_blocks_per_mp=1,
            stream=stream,
            cooperative=self.cooperative,
            use_pdl=cfg.is_dependent,
        )

    def _parts_of_k(self, a: Any, b: Any, extras: Extras, exchange: Any) -> tuple[Any, Any, Any]:
        """Returns A and B of the first part of K, and `OperandViews.later` of the others."""
        later = []
        for i in range(1, len(a)):
            of_part = self.op.view_of_b(b[i], exchange, i)
            views = self.mainloop.operands(a[i], of_part, extras)
            later.append((views.tma_a, views.a, views.tma_b, views.b))
        return a[0], b[0], tuple(later)

    @cute.kernel
    def kernel(
        self,
        ops: OperandViews,
        more: Any,
        output: Any,
        out: Any,
        extras: Extras,
        exchange: Any,
    ) -> None:
        """Sets up shared memory and pipelines, then runs each warp's role."""
        cfg, mainloop, op = self.config, self.mainloop, self.op
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == mainloop.load_warp:
            cpasync.prefetch_descriptor(ops.tma_a)
            cpasync.prefetch_descriptor(ops.tma_b)
        rows = cute.size(ops.a, mode=[0])
        work = plan_work(cfg, op.order, op.share(exchange, rows, ops.columns, out))
        smem = memory.SmemAllocator()
        peer_table, call = smem_peer_table(smem), None
        if cutlass.const_expr(not cfg.loads_weights_early):
            wait_for_prerequisite(cfg)
            call = op.begin(exchange, peer_table)
        res, ring, stages, counters = self._set_up(ops, smem)
        receive: Any = op.receive
        if cutlass.const_expr(self._is_counted):  # noqa: SIM102
            if warp == mainloop.comm_warp and cute.arch.lane_idx() == 0:
                counters.clear()
        # Not relaxed: it also orders every thread's read of the epoch before this CTA's ticket at the end.
        cluster = cute.make_layout((*cfg.cluster, cfg.k_split))
        pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=False)
        pipeline_init_wait(cluster_shape_mn=cluster)
        if cutlass.const_expr(cfg.loads_weights_early):
            if warp == mainloop.load_warp:
                load_weights_early(mainloop, op, res, ops, work)
            wait_for_prerequisite(cfg)
            call = op.begin(exchange, peer_table)
            cute.arch.sync_threads()
        sent = sent_of(cfg, work)
        if _is_one_of(warp, self._other_warps):
            mainloop.adjust_registers(is_epilogue=False)
            if warp == mainloop.load_warp:
                load_role(mainloop, op, res, ops, more, work, call)
                if cutlass.const_expr(op.gate is not None):
                    op.end(call, counters, self._ending_warps)
            for private_warp, role in mainloop.private_roles():
                if warp == private_warp:
                    role(res, ops, work)
            if warp == mainloop.comm_warp:
                launch_dependents(cfg)
                op.comm_role(ring, stages, sent, call, output)
                if cutlass.const_expr(self._is_counted):
                    op.end(call, counters, self._ending_warps)
            if cutlass.const_expr(receive is not None and not receive.with_epilogue):  # noqa: SIM102
                if _is_one_of(warp, self._receiving_warps):
                    receive(call, work, counters, out, extras)
                    op.end(call, counters, self._ending_warps)
        else:
            mainloop.adjust_registers(is_epilogue=True)
            group = (warp - mainloop.first_epilogue_warp) * 32 // cfg.epilogue_threads
            epilogue_role(mainloop, op, res, ops, ring, stages, work, extras, group, call)
            if cutlass.const_expr(self._epilogue_ends):
                cast(Any, op.gate).end(call)
                op.end(call, counters, self._ending_warps)
        # One copy of the code for both kinds of warps, so with the registers of the smaller count: the tool
        # `compile-check` reads the SASS.
        if cutlass.const_expr(receive is not None and receive.with_epilogue):  # noqa: SIM102
            if _is_one_of(warp, self._receiving_warps):
                receive(call, work, counters, out, extras)
                op.end(call, counters, self._ending_warps)
        end_together(cfg)

    def _set_up(self, ops: OperandViews, smem: Any) -> tuple[Any, EpilogueRing, Stages, Any]:
        """Returns mainloop resources, ring, stages, and the counters of ended warps (None if not counted).

        The caller synchronises the cluster afterwards. All shared memory other than stages is in the first
        `BARRIER_BYTES`, because the stages fill the rest.
        """
        cfg, mainloop = self.config, self.mainloop
        ringed = 2 * cfg.ring_stages
        words = mainloop.num_barriers + ringed
        assert words + 1 <= 2 * (cfg.ab_stages + cfg.ring_stages) + CONTROL_WORDS
        barriers = smem.allocate_array(Int64, words + 1, byte_alignment=8)
        res = mainloop.setup(ops, barriers + ringed, smem)
        ring = EpilogueRing.create(
            num_stages=cfg.ring_stages,
            inflight=cfg.inflight,
            num_warps=cfg.epilogue_threads // 32,
            barrier_storage=barriers,
            defer_sync=True,
        )
        stages = allocate_stages(cfg, self.op.stage_dtype, smem)
        return res, ring, stages, CtaCounters.at(barriers + words) if self._is_counted else None

    @property
    def _is_counted(self) -> bool:
        """Returns whether a CTA's warps are counted, so that the last one ends the call.

        It is so for ops with a receive role or a gate. Lane 0 of the comm warp zeroes the counters before the
        cluster's first barrier.
        """
        return self.op.receive is not None or self.op.gate is not None

    @property
    def _epilogue_ends(self) -> bool:
        """Returns whether epilogue warps end as readers: they read scales that peers send with rows of A."""
        return self.op.gate is not None and self.config.visits_rows

    @property
    def _epilogue_warps(self) -> range:
        """Returns the mainloop's epilogue warps."""
        first = self.mainloop.first_epilogue_warp
        return range(first, first + self.mainloop.num_epilogue_warps)

    @property
    def _other_warps(self) -> set[int]:
        """Returns all warps except the epilogue's: load, comm, the mainloop's private ones, receive."""
        return set(range(self.config.threads // 32)).difference(self._epilogue_warps)

    @property
    def _receiving_warps(self) -> list[int]:
        """Returns the warps that run the receive role.

        They include the epilogue warps if these join (`ReceiveRole.with_epilogue`), after their last tile.
        """
        first, receive = self.config.first_receive_warp, self.op.receive
        if receive is None:
            return []
        joining = self._epilogue_warps if receive.with_epilogue else ()
        return [*range(first, first + self.config.receive_warps), *joining]

    @property
    def _ending_warps(self) -> int:
        """Returns the number of calls of ``op.end`` in a CTA: one per warp and role that uses the workspace.

        These are comm, load with a gate, and the warps of the receive role, joining epilogue warps included.
        If epilogue warps read gathered scales, each is counted once more.
        """
        warps = 1 + (self.op.gate is not None) + len(self._receiving_warps)
        return warps + self._epilogue_ends * self.mainloop.num_epilogue_warps


def _is_one_of(warp: Int32, warps: Iterable[int]) -> Any:
    """Returns whether a warp is one of these, fewer than 32 of a CTA."""
    return ((Int32(sum(1 << number for number in warps)) >> warp) & 1) != 0
