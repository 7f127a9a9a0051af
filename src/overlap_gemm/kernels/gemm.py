"""The plain GEMM as an op of the fused kernel: every tile is own, nothing is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32, cute

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import add_bias
from overlap_gemm.kernels.roles import CtaTile, OwnTileSender, SubtileWriter
from overlap_gemm.kernels.work import Work
from overlap_gemm.schedules import LinearOrder


class GemmContext(NamedTuple):
    """Run-time values of a plain GEMM's epilogue."""

    bias: Any


@dataclass(frozen=True)
class PlainGemm:
    """``out = a @ b.T (+ bias)`` on one rank.

    Attributes:
        config: the kernel's configuration.
    """

    config: GemmConfig

    @property
    def order(self) -> LinearOrder:
        """One shard, walked once."""
        return LinearOrder(self.config.raster_group)

    def context(self, bias: Any, exchange: None, work: Work) -> GemmContext:
        """Run-time values of the epilogue."""
        return GemmContext(bias)

    def place(self, exchange: None, rows: Any) -> tuple[int, Any]:
        """(rank, rows of a full shard): one rank owns all of them."""
        return 0, rows

    def await_partials(self, context: GemmContext, tile: CtaTile, own: Any) -> None:
        """Waits for nobody."""

    def combine(self, writer: SubtileWriter, fragment: cute.Tensor, subtile: Any) -> None:
        """Adds the bias."""
        finish_subtile(self.config, writer, fragment, subtile)

    def store(self, writer: SubtileWriter, fragment: cute.Tensor, stage: Int32) -> None:
        """Writes the output subtile into its stage."""
        store_output(writer, fragment, stage)

    @cute.jit
    def comm_role(self, ring: Any, stages: Any, work: Work, context: Any, tma_out: Any, out: Any) -> None:
        """One lane: stores every tile to the output."""
        own = OwnTileSender(self.config, self, work, 0, tma_out, out, stages)
        ring.drain(ring.consumer_state(), work.num_tiles, self.config.subtiles, own)


def finish_subtile(config: GemmConfig, writer: SubtileWriter, fragment: cute.Tensor, subtile: Any) -> None:
    """What every complete subtile gets before it is stored: the bias."""
    if config.bias:
        column = writer.tile.column + subtile % config.epi_columns * config.epi_tile[1]
        bias = writer.context.bias

        def own(subtile_like: Any) -> Any:
            return writer.mainloop.fragment_part(writer.res, writer.ops, writer.thread, subtile_like)

        first = own(cute.make_identity_tensor(config.epi_tile))[0][1]
        row = own(cute.make_tensor(bias.iterator, cute.make_layout(config.epi_tile, stride=(0, 1))))
        add_bias(fragment, row, column + first, bias)


def store_output(writer: SubtileWriter, fragment: cute.Tensor, stage: Int32) -> None:
    """Writes a complete subtile into ``stage`` as the output's TMA store expects it."""
    target = writer.stages.tiled[(None, None, stage)]
    writer.mainloop.store_to_stage(writer.res, writer.ops, writer.thread, fragment, target)
