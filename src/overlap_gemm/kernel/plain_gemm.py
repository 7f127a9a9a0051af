"""The plain GEMM as an op of the fused kernel: nothing is exchanged, the comm lane stores the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.memory import CHUNK_BYTES
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.kernel.product import OutputOp, output_store
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.work import CtaTile, Share, Work


@dataclass(frozen=True)
class PlainGemm(OutputOp):
    """``out = a @ b.T (+ bias)`` on one rank.

    Attributes:
        config: The kernel's configuration.
    """

    gate = receive = None

    def share(self, exchange: Any, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns the full product: one rank computes everything."""
        return Share.unsharded(rows, cols, cols)

    def begin(self, exchange: Any, peer_table: Any) -> None:
        """Returns None: there is no exchange."""

    def end(self, call: Any, counters: Any, warps: int) -> None:
        """Does nothing: there is no exchange to end."""

    @cute.jit
    def comm_role(self, ring: Any, stages: Stages, work: Work, call: Any, output: Output) -> None:
        """Stores every tile to the output; one lane."""
        if cute.arch.lane_idx() == 0:
            sender = OutputSender(self, work, output, stages)
            ring.drain(ring.consumer_state(), self.config.stored_subtiles, sender)


@dataclass(frozen=True)
class OutputSender:
    """One clipped TMA tensor store per subtile into the caller's output (a ``TileSender``).

    Attributes:
        op: Op with configuration and order: `PlainGemm`, or another whose tiles are the output's.
        work: Work of this cluster.
        output: TMA atom and coordinate tensor (rows, cols) of the output, as `Output`.
        stages: Stages of the ring.
    """

    op: Any
    work: Work
    output: Any
    stages: Stages

    def has(self, tile: Scalar) -> Any:
        """Returns whether this cluster has a tile of this number."""
        return tile < self.work.num_tiles

    def locate(self, tile: Scalar) -> CtaTile:
        """Returns the CTA tile's place."""
        return CtaTile.at(self.op.config, self.work.place(self.op.order, tile))

    @cute.jit
    def send(self, place: CtaTile, subtile: Int32, stage: Int32) -> None:
        """Starts one TMA tensor store; the hardware clips rows and columns past the output's end."""
        store_subtile(self.op.config, self.output.tma, self.output.tensor, self.stages, place, subtile, stage)

    def publish(self, tile: Scalar, place: CtaTile) -> None:
        """Does nothing: no thread waits for the output before the kernel ends."""


def local_columns(config: GemmConfig, dtype: str, out: cute.Tensor, exchange: Any) -> Output:
    """Returns the `Output` of this rank's columns of ``out``, a shard of ``exchange``; on the host.

    A rank without columns gets the last ones' descriptor, and stores nothing.
    """
    columns, shard = cute.size(out, mode=[1]), exchange.shard_rows
    first = cutlass.min(exchange.rank, (columns - 1) // shard) * shard
    first = cute.assume(first, divby=CHUNK_BYTES // 2)
    local_extent = cutlass.min(shard, columns - first)
    layout = cute.make_layout((cute.size(out, mode=[0]), local_extent), stride=out.stride)
    return output_store(config, dtype, cute.make_tensor(out.iterator + first, layout))


@cute.jit
def store_subtile(
    config: cutlass.Constexpr,
    tma: cute.CopyAtom,
    tensor: cute.Tensor,
    stages: Stages,
    place: CtaTile,
    subtile: Int32,
    stage: Int32,
) -> None:
    """Starts the TMA store of a ring stage to the place of its subtile in ``tensor``, clipped; one thread.

    Args:
        config: The kernel's configuration.
        tma: Atom of the store.
        tensor: Coordinate tensor (rows, columns) of the atom.
        stages: Stages of the ring.
        place: Place of the tile in ``tensor``.
        subtile: Number of the subtile in the tile.
        stage: Number of its stage.
    """
    epi_m, epi_n = config.epi_tile
    tiles = cute.zipped_divide(tensor, config.epi_tile)
    source, target = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(stages.tiled, 0, 2), tiles
    )
    columns = config.epi_columns // config.subtile_step
    m = place.row // epi_m + subtile // columns
    n = place.column // config.subtile_step // epi_n + subtile % columns
    cute.copy(tma, source[(None, stage)], target[(None, (m, n))])
