"""Common part of the mainloops: order of the MMA's operands, stages of operands, a CTA's part of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.memory import DTYPES
from overlap_gemm.kernel import split
from overlap_gemm.kernel.operand_views import OperandViews


@dataclass(frozen=True)
class LoadedMainloop:
    """Base of the mainloops (`surface.Mainloop`): one warp loads A and B by TMA into stages of ``ab``.

    Attributes:
        config: The kernel's configuration.
    """

    config: GemmConfig

    @property
    def majors(self) -> tuple[OperandMajorMode, OperandMajorMode]:
        """Returns the majors of the MMA's operands, in the MMA's order."""
        majors = self.config.a_major, self.config.b_major
        first, second = (
            OperandMajorMode.K if majors[operand] == "k" else OperandMajorMode.MN
            for operand in self.config.mma_order
        )
        return first, second

    @property
    def mma_tile(self) -> tuple[int, int]:
        """Returns (M, N) of the MMA."""
        first, second = self.config.mma_order
        return self.config.tile[first], self.config.tile[second]

    def allocate(self, smem: Any, layouts: tuple[Any, Any]) -> list[Any]:
        """Allocates the stages of A and of B."""
        return [
            smem.allocate_tensor(DTYPES[dtype], layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for dtype, layout in zip(self.config.in_dtypes, layouts, strict=True)
        ]

    def load_state(self) -> pipeline.PipelineState:
        """Returns the initial state of the load warp."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.ab_stages)

    def load_tail(self, res: Any, state: pipeline.PipelineState) -> None:
        """Waits until every stage has been consumed: then no CTA arrives on barriers of this CTA any more."""
        res.ab.producer_tail(state)

    def part_of_k(self, ops: OperandViews) -> tuple[Any, Any]:
        """Returns the first k tile of this CTA, and the number of its k tiles over all leaves."""
        number = split.num_k_tiles(self.config, ops.b) * self.config.accumulations
        return split.part_of_k() * number if self.config.k_split > 1 else Int32(0), number
