"""The A and B operands as every mainloop hands them to its kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.traced import Scalar


class OperandViews(NamedTuple):
    """TMA views of A (M x K) and B (N x K) and the tiled MMA that reads them.

    Attributes:
        mma: ``cute.TiledMma``.
        tma_a: TMA load atom of A.
        a: A's coordinate tensor (M, K).
        tma_b: TMA load atom of B.
        b: B's coordinate tensor (N, K).
        scales: those of blocks (`mx.MxScales`, `blocks.BlockScales`), or None.
    """

    mma: Any
    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    scales: Any = None

    def of_shard(self, shard: Scalar, work: Any) -> OperandViews:
        """Those of a tile of an owner's shard."""
        if self.scales is None:
            return self
        return self._replace(scales=self.scales.of_shard(shard, work))


def as_accumulated(config: GemmConfig, subtile: Scalar) -> Any:
    """A tensor shaped as a subtile of the output, with the modes of the accumulator."""
    if not config.is_swap_ab:
        return subtile
    return cute.make_tensor(subtile.iterator, cute.select(subtile.layout, mode=[1, 0]))
