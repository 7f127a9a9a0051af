"""Scales of blocks: of A one for each row, of B one for 128 rows, both for 128 elements of K.

They are applied where sums are promoted: the sum of a k tile is multiplied by both scales as it is added to
the fp32 registers. Epilogue warps read them by ordinary loads, a k tile's while its products are under way;
so a thread has 2 scales of A (its rows of a 64-row instruction) and 1 of B, in whose block the tile lies.

Matrices, both the first of the kernel's ``extras``: of A ``(M, ceil(K / 128))``, of B
``(ceil(N / 128), ceil(K / 128))``, fp32, K contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from overlap_gemm.device.traced import Extras, Scalar

NUM_OPERANDS = 2
"""Of the kernel's ``extras``."""


class BlockScales(NamedTuple):
    """Where a tile's scales are.

    Attributes:
        a: (rows, k blocks).
        b: (blocks of rows, k blocks).
        row: the tile's first row in ``a``.
        block: its block in ``b``.
    """

    a: Any
    b: Any
    row: Scalar
    block: Scalar

    def at(self, rows: tuple[Any, ...], k: Scalar) -> list[Any]:
        """The scales of ``rows`` of the tile in a k tile, the column's multiplied into each.

        After the end of A, of B or of K the last one's: what they scale is clipped, or zero.
        """
        k = cutlass.min(k, cute.size(self.a, mode=[1]) - 1)
        last_row, last_block = cute.size(self.a, mode=[0]) - 1, cute.size(self.b, mode=[0]) - 1
        column = self.b[cutlass.min(self.block, last_block), k]
        return [self.a[cutlass.min(self.row + row, last_row), k] * column for row in rows]


def block_scales(config: Any, extras: Extras, row: Scalar, column: Scalar) -> BlockScales:
    """Those of the tile that begins at ``row`` of A and ``column``, a row of B."""
    return BlockScales(extras[0], extras[1], row, Int32(column // config.blocks[1]))
