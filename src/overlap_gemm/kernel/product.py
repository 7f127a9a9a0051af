"""Base of ops whose tiles are parts of the local output: no sums of other ranks, no slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import LinearOrder
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.stages import stage_layout


@dataclass(frozen=True)
class OutputOp:
    """Op (`protocols.KernelOp`) whose ring stages are stored to the output by TMA.

    Attributes:
        config: The kernel's configuration.
    """

    config: GemmConfig

    @property
    @final
    def stage_dtype(self) -> str:
        """Returns the dtype of a ring stage: the output's."""
        return self.config.out_dtype

    @property
    @final
    def visits(self) -> Visits:
        """Returns visits of partial and of complete sums: an accumulator is both."""
        return Visits(self.config, ("partial", "complete"))

    @property
    def order(self) -> Any:
        """Returns the order of the tiles: linear, all tiles of this rank as one shard."""
        return LinearOrder(self.config.raster_group)

    def view_of_b(self, b: cute.Tensor, exchange: Any, part: int) -> cute.Tensor:
        """Returns B."""
        return b

    def more_sources(self, mainloop: Any, exchange: Any) -> Any:
        """Returns None: A is the only source of the load role."""

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """Returns the TMA store from ring stages to ``out``, M x N; on the host."""
        return output_store(self.config, self.stage_dtype, out)


def output_store(config: GemmConfig, dtype: str, out: cute.Tensor) -> Output:
    """Returns the TMA store from ring stages of ``dtype`` to ``out``, one subtile each; on the host."""
    layout, op = stage_layout(config, dtype), cpasync.CopyBulkTensorTileS2GOp()
    return Output(*cpasync.make_tiled_tma_atom(op, out, layout, config.epi_tile))
