"""Scales of blocks: of A one for each row, of B one for 128 rows (or 32), both for as many elements of K.

They are applied where sums are promoted: the sum of a block of K is multiplied by both scales as it is added
to the fp32 registers.

    load warp       per k tile: cp.async of the scales of the CTA's rows of A, and of the tile's blocks of
                    columns, into the stage of A and B; each lane arrives on ab.full when its own are there
    epilogue warps  after ab.wait: each thread reads those of its 2 rows of a 64-row instruction, and of all
                    blocks of columns, before it releases the stage

By ordinary loads in the epilogue warps they stood between the products of a k tile (docs/design/fp8.md).

Matrices, both the first of the kernel's ``extras``, with blocks of b: of A ``(M, ceil(K / b))``, of B
``(ceil(N / b), ceil(K / b))``, fp32, K contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from overlap_gemm.device.memory import LANES, WORD_BYTES, copy_word
from overlap_gemm.device.traced import Scalar
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.loads import JointLoads, OperandLoads

NUM_OPERANDS = 2
"""Of the kernel's ``extras``."""


class BlockScales(NamedTuple):
    """Where the scales of A and of B are.

    Attributes:
        a: (rows, k blocks).
        b: (blocks of rows, k blocks).
    """

    a: Any
    b: Any

    def of_shard(self, shard: Scalar, work: Any) -> BlockScales:
        """Those of a tile of an owner's shard, whose row is A's: the same."""
        return self

    def with_gathered(self, scales: Any) -> BlockScales:
        """Those of a shard that was gathered, and the own ones of B."""
        return self._replace(a=scales)

    def joined(
        self, config: GemmConfig, a: OperandLoads, b: OperandLoads, stages: Any, row: Scalar, column: Scalar
    ) -> tuple[Any, Any]:
        """The loads of A, and of the scales of both: of A from ``row`` on, of B from ``column``, a row of it.

        After the end of A, of B or of K the last one's: what they scale is clipped, or zero.
        """
        lane, rows = cute.arch.lane_idx(), config.cta_tile[0]
        block = column // config.block_rows
        last_row, last_block = cute.size(self.a, mode=[0]) - 1, cute.size(self.b, mode=[0]) - 1
        lines = []
        for first in range(0, config.scale_lines, LANES):
            line = first + lane
            if first < rows:
                start = self.a[(cutlass.min(row + line, last_row), None)]
            else:
                start = self.b[(cutlass.min(block + line - rows, last_block), None)]
            lines.append(start.iterator.toint())
        last = Int32(cute.size(self.a, mode=[1]) - 1)
        return JointLoads((a, ScaleLoads(config, tuple(lines), stages, last))), b


@dataclass(frozen=True)
class ScaleLoads:
    """A lane's copies of scales of a k tile, as one of the loads of a stage (`loads.JointLoads`).

    Attributes:
        config: the kernel's configuration.
        lines: addresses of the lines along K of which this lane copies, each a warp's after the other.
        words: those of the stages, see `StageScales`.
        last: the last block of K.
    """

    config: GemmConfig
    lines: tuple[Any, ...]
    words: Any
    last: Scalar

    @cute.jit
    def load(self, ab: Any, state: Any, k: Int32) -> None:
        """All lanes: starts the copies of k tile ``k``, and arrives on the stage's barrier when they end."""
        number, parts = self.config.scale_lines, promotions(self.config)
        first = cute.crd2idx((cute.arch.lane_idx(), state.index), self.words.layout)
        stage = Int32(self.words.iterator.toint()) + first * WORD_BYTES
        for part in cutlass.range_constexpr(parts):
            offset = Int64(cutlass.min(parts * k + part, self.last)) * WORD_BYTES
            for i in cutlass.range_constexpr(len(self.lines)):
                target = stage + WORD_BYTES * (part * number + i * LANES)
                if cutlass.const_expr((i + 1) * LANES <= number):
                    copy_word(target, self.lines[i] + offset)
                else:
                    if cute.arch.lane_idx() < number - i * LANES:
                        copy_word(target, self.lines[i] + offset)
        cute.arch.cp_async_mbarrier_arrive_noinc(ab.producer_get_barrier(state))


class StageScales(NamedTuple):
    """What an epilogue thread reads of the stages' scales.

    Attributes:
        words: (words of a k tile, stages): rows, then blocks of columns, for each part of K.
        rows: the thread's rows in the CTA tile.
    """

    words: Any
    rows: tuple[Any, Any]

    def factors(self, config: GemmConfig, stage: Scalar, part: int) -> list[list[Any]]:
        """For each block of columns the products of its scale and the rows', of a part of a k tile."""
        first = part * config.scale_lines
        columns = first + config.cta_tile[0]
        of_rows = [self.words[(first + row, stage)] for row in self.rows]
        of_columns = [self.words[(columns + i, stage)] for i in range(config.column_blocks)]
        return [[row * column for row in of_rows] for column in of_columns]


def stages_of(config: GemmConfig, smem: Any) -> Any:
    """Allocates the stages of scales."""
    layout = cute.make_layout((config.scale_lines * promotions(config), config.ab_stages))
    return smem.allocate_tensor(Float32, layout, byte_alignment=16)


def promotions(config: GemmConfig) -> int:
    """How many sums of a k tile are promoted, each with scales of its own."""
    return 1 if config.blocks is None else max(config.tile_k // config.blocks[2], 1)


def rows_of(part: Any, tile: tuple[int, int]) -> tuple[Any, Any]:
    """A thread's rows in the tile, 2 of an instruction's 64: of its elements 0, 1 and 2, 3 of every 4."""
    coordinates = part.partition_C(cute.make_identity_tensor(tile))
    return coordinates[0][0], coordinates[2][0]


def promote(acc: cute.Tensor, done: cute.Tensor, factors: list[list[Any]] | None) -> None:
    """Adds a sum, multiplied by the factor of the element's block of columns and row (`rows_of`).

    Of every 8 columns a thread has 2, in 2 rows.
    """
    if factors is None:
        acc.store(acc.load() + done.load().reshape(acc.shape))
    else:
        values = cute.size(acc)
        for i in range(values):
            acc[i] = acc[i] + done[i] * factors[i * len(factors) // values][i // 2 % 2]


def share_of(factors: list[list[Any]] | None, part: int, parts: int) -> list[list[Any]] | None:
    """Of the factors of a tile's blocks of columns those of its ``part``-th of ``parts`` equal parts."""
    if factors is None or len(factors) < parts:
        return factors
    width = len(factors) // parts
    return factors[part * width : (part + 1) * width]
