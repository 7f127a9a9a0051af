"""The A and B operands as mainloops pass them to their kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.traced import Scalar
from overlap_gemm.epilogues import PAIR


class OperandViews(NamedTuple):
    """TMA views of A (M x K) and B (N x K) and the tiled MMA that reads them.

    Attributes:
        mma: ``cute.TiledMma``.
        tma_a: TMA load atom of A.
        a: Coordinate tensor (M, K) of A.
        tma_b: TMA load atom of B.
        b: Coordinate tensor (N, K) of B.
        scales: Scales of blocks (`mx.MxScales`, `blocks.BlockScales`), or None.
        is_swapped: For two matrices B, whether a pair's second column comes first (`interleaved`); else None.
        others: ``(tma_b, b)`` of further matrices B along N (`GemmConfig.weights`), or None.
        later: ``(tma_a, a, tma_b, b)`` of further parts of K, which are matrices too, or None.
    """

    mma: Any
    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    scales: Any = None
    is_swapped: Any = None
    others: Any = None
    later: Any = None

    @property
    def parts_of_k(self) -> tuple[OperandViews, ...]:
        """Returns the views of each part of K; these, if K is in one matrix."""
        fields, first = ("tma_a", "a", "tma_b", "b"), self._replace(later=None)
        later = [first._replace(**dict(zip(fields, part, strict=True))) for part in self.later or ()]
        return first, *later

    @property
    def columns(self) -> Any:
        """Returns N, or a tuple with N of each matrix B."""
        if self.others is None:
            return cute.size(self.b, mode=[0])
        return tuple([cute.size(b, mode=[0]) for b in (self.b, *(b for _, b in self.others))])

    def of_weight(self, index: int) -> OperandViews:
        """Returns the views with one of several matrices B."""
        if index == 0:
            return self
        tma_b, b = self.others[index - 1]
        return self._replace(tma_b=tma_b, b=b)

    def of_shard(self, shard: Scalar, work: Any) -> OperandViews:
        """Returns the views for a tile of an owner's shard."""
        if self.scales is None:
            return self
        return self._replace(scales=self.scales.of_shard(shard, work))


@cute.jit
def interleaved(first: cute.Tensor, second: cute.Tensor) -> tuple[cute.Tensor, Int32]:
    """Returns two matrices B (N, K) as one view (2 N, K), and ``is_swapped``.

    The view has bands of 32 rows (`PAIR`) of the two matrices in turn, so N is a multiple of 32. Both have
    the same strides; their distance is a multiple of 16 bytes. The first band is of the matrix with the lower
    address, since strides of TMA are not negative. ``is_swapped`` (``Int32``) is 1 if this is ``second``.
    Then `Visits.on_pair` exchanges the two values of each pair.
    """
    begins, other = first.iterator.toint(), second.iterator.toint()
    is_swapped = Int32(other < begins)
    base = first.iterator
    if other < begins:
        base = second.iterator
    distance = cutlass.max(other, begins) - cutlass.min(other, begins)
    divby = 128 // first.element_type.width
    band_stride = cute.assume(Int64(distance // (first.element_type.width // 8)), divby=divby)
    pitch = first.stride[0]
    shape = ((PAIR, 2, cute.size(first, mode=[0]) // PAIR), first.shape[1])
    layout = cute.make_layout(shape, stride=((pitch, band_stride, pitch * PAIR), 1))
    return cute.make_tensor(base, layout), is_swapped


def as_accumulated(config: GemmConfig, subtile: Scalar) -> Any:
    """Returns a tensor shaped as a subtile of the output, with the modes of the accumulator."""
    if not config.is_swap_ab:
        return subtile
    return cute.make_tensor(subtile.iterator, cute.select(subtile.layout, mode=[1, 0]))
