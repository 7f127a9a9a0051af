"""Scales of blocks: of A one for each row, of B one for 128 rows (or 32), both for as many elements of K.

They are applied where sums are promoted: the sum of a block of K is multiplied by both scales as it is added
to the fp32 registers. Epilogue warps read them by ordinary loads, while the block's products are under way;
so a thread has 2 scales of A (its rows of a 64-row instruction) and 1 of B, in whose block the tile lies, or,
of blocks of 32, as many as the tile has.

Matrices, both the first of the kernel's ``extras``, with blocks of b: of A ``(M, ceil(K / b))``, of B
``(ceil(N / b), ceil(K / b))``, fp32, K contiguous.
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
        block: its first block in ``b``.
    """

    a: Any
    b: Any
    row: Scalar
    block: Scalar

    def at(self, rows: tuple[Any, ...], k: Scalar, blocks: int) -> list[list[Any]]:
        """For each of so many blocks of columns the scales of ``rows`` in a block of K, times the block's.

        After the end of A, of B or of K the last one's: what they scale is clipped, or zero.
        """
        k = cutlass.min(k, cute.size(self.a, mode=[1]) - 1)
        last_row, last_block = cute.size(self.a, mode=[0]) - 1, cute.size(self.b, mode=[0]) - 1
        columns = [self.b[cutlass.min(self.block + i, last_block), k] for i in range(blocks)]
        return [
            [self.a[cutlass.min(self.row + row, last_row), k] * column for row in rows] for column in columns
        ]


def promotions(config: Any) -> int:
    """How many sums of a k tile are promoted, each with scales of its own."""
    return 1 if config.blocks is None else max(config.tile_k // config.blocks[2], 1)


def column_blocks(config: Any) -> int:
    """Blocks of B's rows in a tile, of those that share a scale."""
    return max(config.cta_tile[1] // config.blocks[1], 1)


def rows_of(part: Any, tile: tuple[int, int]) -> tuple[Any, Any]:
    """A thread's rows in the tile, 2 of an instruction's 64: of its elements 0, 1 and 2, 3 of every 4."""
    coordinates = part.partition_C(cute.make_identity_tensor(tile))
    return coordinates[0][0], coordinates[2][0]


def promote(acc: cute.Tensor, done: cute.Tensor, factors: list[list[Any]] | None) -> None:
    """Adds a sum, multiplied by the factor of the element's block of columns and row (`rows_of`).

    Of every 8 columns a thread has 2, in 2 rows.
    """
    if factors is None:
        acc.store(acc.load() + done.load())
    else:
        values = cute.size(acc)
        for i in range(values):
            acc[i] = acc[i] + done[i] * factors[i * len(factors) // values][i // 2 % 2]


def block_scales(config: Any, extras: Extras, row: Scalar, column: Scalar) -> BlockScales:
    """Those of the tile that begins at ``row`` of A and ``column``, a row of B."""
    return BlockScales(extras[0], extras[1], row, Int32(column // config.blocks[1]))
