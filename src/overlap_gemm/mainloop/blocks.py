"""Scales of blocks: for A one per row, for B one per 128 rows (or 32), both per as many elements of K.

They are applied when sums are promoted: the sum of a block of K is multiplied by both scales as it is added
to the fp32 registers.

- Load warp, per k tile: TMA of the scales of the CTA's rows of A, and of the tile's blocks of columns, into
  the stage of A and B, counted with them on ab.full.
- Epilogue warps, after ab.wait: each thread reads the scales of its 2 rows of a 64-row instruction, and of
  all blocks of columns, before it releases the stage.

Ordinary loads in the epilogue warps would separate the products of a k tile. Copies of 4 bytes, one per row,
took a seventh of all time (docs/design/fp8.md). So A's scales are contiguous along M.

Matrices, both the first of the kernel's ``extras``, fp32, with blocks of b: of A ``(ceil(K / b), M)``, M
contiguous; of B ``(ceil(N / b), ceil(K / b))``, K contiguous; both with lines of whole 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import STAGE_ALIGNMENT, TMA_SCALES
from overlap_gemm.device.traced import Scalar
from overlap_gemm.kernel.loads import JointLoads, OperandLoads
from overlap_gemm.spec.sharding import ceil_div


class BlockScales(NamedTuple):
    """TMA sources of the scales of A and of B.

    Attributes:
        tma_a: TMA load atom of the scales of a CTA's rows, of a k tile.
        a: Coordinate tensor (k blocks, rows).
        tma_b: TMA load atom of the scales of the tile's blocks of columns.
        b: Coordinate tensor (blocks of rows, k blocks).
        padding: Rows of A by which the shards before the tile's were padded: boxes begin at 16 bytes.
    """

    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    padding: Any = 0

    def of_shard(self, shard: Scalar, work: Any) -> BlockScales:
        """Returns the scales for a tile of an owner's shard, whose lines begin at whole 16 bytes."""
        step = work.shards.row_step
        return self._replace(padding=shard * (ceil_div(step, TMA_SCALES) * TMA_SCALES - step))

    def with_gathered(self, scales: tuple[Any, Any]) -> BlockScales:
        """Returns scales of A gathered with a shard (TMA atom, coordinate tensor), and local ones of B."""
        tma, tensor = scales
        return self._replace(tma_a=tma, a=tensor)

    def joined(
        self,
        config: GemmConfig,
        a: OperandLoads,
        b: OperandLoads,
        stages: StageScales,
        row: Scalar,
        column: Scalar,
    ) -> tuple[JointLoads, JointLoads]:
        """Returns the loads of A and B with their scales: of A from ``row`` on, of B from ``column`` on.

        ``column`` is a row of B. Past the end of A, of B or of K scales are zeros: the scaled values are
        clipped, or zero.
        """
        rows, parts = config.cta_tile[0], config.k_parts
        of_a = cute.local_tile(cute.domain_offset((0, row + self.padding), self.a), (parts, rows), (None, 0))
        begin = (column // config.block_rows, 0)
        of_b = cute.local_tile(
            cute.domain_offset(begin, self.b), (config.column_blocks, TMA_SCALES), (0, None)
        )
        from_a = OperandLoads.shared(self.tma_a, 0, 1, stages.a, of_a, None)
        from_b = OperandLoads.shared(self.tma_b, 0, 1, stages.b, of_b, None)
        return JointLoads((a, from_a)), JointLoads((b, SharedBoxes(from_b, TMA_SCALES // parts)))


class SharedBoxes(NamedTuple):
    """Loads of boxes that serve several k tiles, each of which loads its box: a box begins at 16 bytes.

    Attributes:
        boxes: Loads of a box.
        tiles: Number of k tiles whose scales are in a box.
    """

    boxes: OperandLoads
    tiles: int

    def load(self, ab: Any, state: pipeline.PipelineState, k: Scalar) -> None:
        """Starts to load the box of k tile ``k`` into an acquired stage."""
        self.boxes.load(ab, state, k // self.tiles)


class StageScales(NamedTuple):
    """Stages of scales in shared memory: the last mode is the stage.

    Attributes:
        a: (parts of a k tile, the CTA tile's rows, stages).
        b: (blocks of columns, k blocks of a TMA box, stages).
    """

    a: Any
    b: Any

    def factors(
        self, config: GemmConfig, rows: tuple[Any, Any], stage: Scalar, k: Scalar, part: int
    ) -> list[list[Any]]:
        """Returns, for each block of columns, the products of its scale and those of a thread's rows.

        Args:
            config: The kernel's configuration.
            rows: Rows of the thread.
            stage: Stage with the scales of k tile ``k``.
            k: Number of the k tile.
            part: Part of the k tile.
        """
        at = k * config.k_parts % TMA_SCALES + part
        of_rows = [self.a[(part, row, stage)] for row in rows]
        of_columns = [self.b[(block, at, stage)] for block in range(config.column_blocks)]
        return [[row * column for row in of_rows] for column in of_columns]


# -- host side of the launch


def scales_of(config: GemmConfig, a: Any, b: Any) -> BlockScales:
    """Returns the TMA loads of the scales of A and B."""
    return BlockScales(*tma_of_a(config, a), *_tma(b, (config.column_blocks, TMA_SCALES)))


def tma_of_a(config: GemmConfig, scales: Any) -> tuple[Any, Any]:
    """Returns the TMA load of A's scales, and the coordinate tensor, whose further modes others slice."""
    return _tma(scales, (config.k_parts, config.cta_tile[0]))


def _tma(scales: Any, box: tuple[int, int]) -> tuple[Any, Any]:
    layout = cute.make_layout(box, stride=(box[1], 1))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), scales, layout, box)


def fake_scales() -> Any:
    """Returns a fake matrix of scales for compilation."""
    extents, pitch = (cute.sym_int32(), cute.sym_int32()), cute.sym_int64(divisibility=TMA_SCALES)
    return make_fake_tensor(Float32, extents, stride=(pitch, 1), assumed_align=16)


def fake_gathered() -> Any:
    """Returns a fake tensor of the scales of all shards in a gather buffer."""
    extents = cute.sym_int32(), cute.sym_int32(divisibility=TMA_SCALES), cute.sym_int32()
    pitch, shard = (cute.sym_int64(divisibility=TMA_SCALES) for _ in range(2))
    return make_fake_tensor(Float32, extents, stride=(pitch, 1, shard), assumed_align=16)


# -- epilogue warps


def setup(config: GemmConfig, smem: Any) -> StageScales:
    """Allocates the stages."""
    parts, rows, blocks = config.k_parts, config.cta_tile[0], config.column_blocks
    of_a = cute.make_layout((parts, rows, config.ab_stages), stride=(rows, 1, parts * rows))
    pitch = STAGE_ALIGNMENT // 4
    of_b = cute.make_layout((blocks, TMA_SCALES, config.ab_stages), stride=(TMA_SCALES, 1, pitch))
    return StageScales(
        *(smem.allocate_tensor(Float32, layout, byte_alignment=STAGE_ALIGNMENT) for layout in (of_a, of_b))
    )


def rows_of(part: Any, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Returns a thread's 2 rows of an instruction's 64: of its elements 0, 1 and of 2, 3 of every 4."""
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
    """Returns the factors of the ``part``-th of ``parts`` equal parts of a tile's blocks of columns."""
    if factors is None or len(factors) < parts:
        return factors
    width = len(factors) // parts
    return factors[part * width : (part + 1) * width]
