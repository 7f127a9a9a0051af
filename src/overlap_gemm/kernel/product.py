"""Common part of the ops whose product is the output: nothing of it is summed or sent to slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import LinearOrder
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.stages import stage_layout
from overlap_gemm.kernel.surface import Output


@dataclass(frozen=True)
class OutputOp:
    """An op (`surface.KernelOp`) whose tiles are parts of the output, stored to their places in it.

    Attributes:
        config: The kernel's configuration.
    """

    config: GemmConfig

    @property
    @final
    def stage_dtype(self) -> str:
        """Returns the output's dtype: a subtile in the ring is a part of the output."""
        return self.config.out_dtype

    @property
    @final
    def visits(self) -> Visits:
        """Returns visits of both kinds: an accumulator is a complete sum."""
        return Visits(self.config, ("partial", "complete"))

    @property
    def order(self) -> Any:
        """Returns the order of all tiles of this rank, as one shard."""
        return LinearOrder(self.config.raster_group)

    def more_sources(self, mainloop: Any, exchange: Any) -> Any:
        """Returns None: A is the only source."""

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """Returns the TMA store from the ring's stages."""
        return output_store(self.config, self.stage_dtype, out)


def output_store(config: GemmConfig, dtype: str, out: cute.Tensor) -> Output:
    """Returns the TMA store of ring stages of ``dtype`` to ``out``; on the host."""
    layout, op = stage_layout(config, dtype), cpasync.CopyBulkTensorTileS2GOp()
    return Output(*cpasync.make_tiled_tma_atom(op, out, layout, config.epi_tile))
