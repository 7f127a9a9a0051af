"""What the ops have in common whose product is the output: nothing of it is summed or sent to slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import LinearOrder
from overlap_gemm.kernel.epilogue import Visits, stage_layout
from overlap_gemm.kernel.surface import Output


@dataclass(frozen=True)
class OutputOp:
    """An op (`surface.KernelOp`) whose tiles are parts of the output, stored where they belong.

    Attributes:
        config: the kernel's configuration.
    """

    config: GemmConfig

    @property
    @final
    def stage_dtype(self) -> str:
        """A subtile in the ring is a part of the output."""
        return self.config.out_dtype

    @property
    @final
    def visits(self) -> Visits:
        """An accumulator is a complete sum."""
        return Visits(self.config, ("partial", "complete"))

    @property
    def order(self) -> Any:
        """All that this rank computes, as one shard."""
        return LinearOrder(self.config.raster_group)

    def more_sources(self, mainloop: Any, exchange: Any) -> Any:
        """A is all there is to load."""

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """By TMA, from the ring's stages."""
        return output_store(self.config, self.stage_dtype, out)


def output_store(config: GemmConfig, dtype: str, out: cute.Tensor) -> Output:
    """Host side: how ring stages of ``dtype`` are stored to ``out`` by TMA."""
    layout, op = stage_layout(config, dtype), cpasync.CopyBulkTensorTileS2GOp()
    return Output(*cpasync.make_tiled_tma_atom(op, out, layout, config.epi_tile))
