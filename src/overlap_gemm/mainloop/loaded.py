"""Base class of the mainloops: order and majors of the MMA's operands, their stages, a CTA's part of K."""

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
    """Base of the mainloops (`protocols.Mainloop`): one warp loads A and B by TMA into the stages of ``ab``.

    Attributes:
        config: The kernel's configuration.
    """

    config: GemmConfig

    @property
    def majors(self) -> tuple[OperandMajorMode, OperandMajorMode]:
        """Returns the majors of the MMA's first and second operand (B and A if swapped)."""
        majors = self.config.a_major, self.config.b_major
        first, second = (
            OperandMajorMode.K if majors[operand] == "k" else OperandMajorMode.MN
            for operand in self.config.mma_order
        )
        return first, second

    @property
    def mma_tile(self) -> tuple[int, int]:
        """Returns (M, N) of the MMA: the tile's, exchanged if swapped."""
        first, second = self.config.mma_order
        return self.config.tile[first], self.config.tile[second]

    def allocate(self, smem: Any, layouts: tuple[Any, Any]) -> list[Any]:
        """Allocates the stages of A and of B in ``layouts``, aligned to 1024 bytes for the swizzle."""
        return [
            smem.allocate_tensor(DTYPES[dtype], layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for dtype, layout in zip(self.config.in_dtypes, layouts, strict=True)
        ]

    def load_state(self) -> pipeline.PipelineState:
        """Returns the load warp's initial producer state of ``ab``."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.ab_stages)

    def load_tail(self, res: Any, state: pipeline.PipelineState) -> None:
        """Waits, in the load warp, until the consumers have released every stage.

        After that no CTA of the cluster arrives on barriers of this CTA, so it may exit.
        """
        res.ab.producer_tail(state)

    def part_of_k(self, ops: OperandViews) -> tuple[Any, Any]:
        """Returns (first k tile, number of k tiles) of this CTA; the number covers all leaves."""
        number = split.k_tiles_of(self.config, ops) * self.config.accumulations
        return split.part_of_k() * number if self.config.k_split > 1 else Int32(0), number
