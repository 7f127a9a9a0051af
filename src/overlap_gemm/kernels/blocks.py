"""Scales of blocks: of A one for each row, of B one for 128 rows (or 32), both for as many elements of K.

They are applied where sums are promoted: the sum of a block of K is multiplied by both scales as it is added
to the fp32 registers. Four that follow each other along K are a *chunk* of 16 bytes: of blocks of 128 those
of four k tiles, of blocks of 32 those of one.

    load warp       with the first k tile of a chunk: cp.async of a chunk for each of the CTA's rows of A and
                    of the tile's blocks of columns, to the next slot. With every k tile each lane arrives on
                    ab.full when what it copied is there
    epilogue warps  after ab.wait: each thread reads those of its 2 rows of a 64-row instruction, and of all
                    blocks of columns, before it releases the stage

There are as many slots as stages of A and B, in turn, and they need no barriers of their own. A slot is
filled again with the chunks that are as many later as there are slots, so with a k tile that is at least as
many after the last one that reads it; and that k tile's stage is acquired when what was there so many k
tiles before has been released.

Words of 4 bytes for each k tile, and ordinary loads in the epilogue warps, were slower (docs/design/fp8.md).

Matrices, both the first of the kernel's ``extras``, with blocks of b: of A ``(M, ceil(K / b))``, of B
``(ceil(N / b), ceil(K / b))``, fp32, K contiguous, both up to whole chunks along K and 16-byte aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from overlap_gemm.device.memory import CHUNK_BYTES, CHUNK_WORDS, LANES, copy_chunk
from overlap_gemm.device.traced import Scalar
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.loads import JointLoads, OperandLoads
from overlap_gemm.spec.sharding import ceil_div

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
        self,
        config: GemmConfig,
        a: OperandLoads,
        b: OperandLoads,
        stages: Any,
        row: Scalar,
        column: Scalar,
        k_tiles: Scalar,
    ) -> tuple[Any, Any]:
        """The loads of A, and of the scales of both: of A from ``row`` on, of B from ``column``, a row of it.

        After the end of A or of B the last one's: what they scale is clipped.
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
        target = Int32(stages.iterator.toint()) + lane * CHUNK_BYTES
        return JointLoads((a, ScaleLoads(config, tuple(lines), target, Int32(k_tiles)))), b


def first_slot(config: GemmConfig, count: Scalar, k_tiles: Scalar) -> Any:
    """The slot of a tile's first chunks, whose first k tile is number ``count`` of the pipeline."""
    return count // k_tiles * ceil_div(k_tiles, config.chunk_k_tiles) % config.ab_stages


def slot_of(config: GemmConfig, first: Scalar, k: Scalar) -> Any:
    """That of k tile ``k``'s."""
    return (first + k // config.chunk_k_tiles) % config.ab_stages


@dataclass(frozen=True)
class ScaleLoads:
    """A lane's copies of scales, as one of the loads of a stage (`loads.JointLoads`).

    Attributes:
        config: the kernel's configuration.
        lines: addresses of the lines along K of which this lane copies chunks, each a warp's after the other.
        target: shared address of the first one's in the first slot.
        k_tiles: of a tile.
    """

    config: GemmConfig
    lines: tuple[Any, ...]
    target: Scalar
    k_tiles: Scalar

    @cute.jit
    def load(self, ab: Any, state: Any, k: Int32) -> None:
        """All lanes: starts the copies that go with k tile ``k``, and arrives when those before it end."""
        cfg = self.config
        if k % cfg.chunk_k_tiles == 0:
            slot = slot_of(cfg, first_slot(cfg, state.count - k, self.k_tiles), k)
            offset = Int64(k // cfg.chunk_k_tiles) * CHUNK_BYTES
            for i in cutlass.range_constexpr(len(self.lines)):
                target = self.target + (slot * cfg.scale_lines + i * LANES) * CHUNK_BYTES
                if cutlass.const_expr((i + 1) * LANES <= cfg.scale_lines):
                    copy_chunk(target, self.lines[i] + offset)
                else:
                    if cute.arch.lane_idx() < cfg.scale_lines - i * LANES:
                        copy_chunk(target, self.lines[i] + offset)
        cute.arch.cp_async_mbarrier_arrive_noinc(ab.producer_get_barrier(state))


class StageScales(NamedTuple):
    """What an epilogue thread reads of a tile's scales.

    Attributes:
        words: (4 of a chunk, lines: rows, then blocks of columns; slots).
        rows: the thread's rows in the CTA tile.
        first: slot of the tile's first chunks.
        last: the last block of K.
    """

    words: Any
    rows: tuple[Any, Any]
    first: Scalar
    last: Scalar

    def factors(self, config: GemmConfig, k: Scalar, part: int) -> list[list[Any]]:
        """For each block of columns the products of its scale and the rows', of a part of k tile ``k``.

        After the end of K the last one's: what they scale is zero.
        """
        slot, word = slot_of(config, self.first, k), k % config.chunk_k_tiles
        if promotions(config) > 1:
            word = cutlass.min(Int32(part), self.last - k * promotions(config))
        of_rows = [self.words[(word, row, slot)] for row in self.rows]
        first = config.cta_tile[0]
        of_columns = [self.words[(word, first + i, slot)] for i in range(config.column_blocks)]
        return [[row * column for row in of_rows] for column in of_columns]


def tile_scales(
    config: GemmConfig, slots: Any, a: cute.Tensor, part: Any, count: Scalar, k_tiles: Scalar
) -> StageScales | None:
    """What a partition's thread reads of a tile, whose first k tile is number ``count``, or None."""
    if config.blocks is None:
        return None
    last = cute.ceil_div(cute.size(a, mode=[1]), config.blocks[2]) - 1
    return StageScales(slots, rows_of(part, config.tile), first_slot(config, count, k_tiles), last)


def slots_of(config: GemmConfig, smem: Any) -> Any:
    """Allocates the slots."""
    layout = cute.make_layout((CHUNK_WORDS, config.scale_lines, config.ab_stages))
    return smem.allocate_tensor(Float32, layout, byte_alignment=CHUNK_BYTES)


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
