"""fp32 block scales of promoted mainloops (`scale_blocks.PROMOTED`): one scale per b elements of K.

A has one scale per row and block of K; B has one per b rows and block of K. ``config.blocks`` is (1, b, b), b
= 128 or 32. The sum of a block of K is multiplied by both scales when it is added to the fp32 accumulator
(`promote`).

- Load warp, per k tile: acquires the stage, starts TMA loads of A, B and their scales. The bytes of the
  scales are part of the transaction count of ab.full.
- Epilogue warps, per k tile: wait on ab.full. Each thread reads the scales of its 2 rows of a 64-row
  instruction, and of all blocks of columns, while the products are in flight. Then the stage is released.

Global memory: the first two tensors of the kernel's ``extras``, fp32:

- A: ``(ceil(K / b), M)``, M contiguous. So a TMA box has the scales of a tile's rows. One 4-byte copy per row
  took a seventh of the kernel's time (docs/design/fp8.md).
- B: ``(ceil(N / b), ceil(K / b))``, K contiguous.
- The pitch of both is a multiple of 16 bytes.
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
        tma_a: TMA load atom; box (parts of a k tile, rows of the CTA tile).
        a: Coordinate tensor (blocks of K, rows of A, ...) of A's scales.
        tma_b: TMA load atom; box (column blocks of the CTA tile, `TMA_SCALES`).
        b: Coordinate tensor (blocks of B's rows, blocks of K) of B's scales.
        padding: Number of columns of ``a`` before the tile's shard that belong to no row. They are there
            because each shard's scales begin at a multiple of 16 bytes.
        lines: Number of blocks of K in ``a`` before the first one that is loaded.
        k_tiles: Number of k tiles in ``b`` before the first one that is loaded.
    """

    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    padding: Any = 0
    lines: Any = 0
    k_tiles: Any = 0

    def of_shard(self, shard: Scalar, work: Any) -> BlockScales:
        """Returns the scales for tiles of shard ``shard``, with the padding of the shards before it."""
        step = work.shards.row_step
        return self._replace(padding=shard * (ceil_div(step, TMA_SCALES) * TMA_SCALES - step))

    def with_gathered(self, scales: tuple[Any, Any]) -> BlockScales:
        """Returns the scales with gathered ones of A, (TMA atom, coordinate tensor); those of B are local."""
        tma, tensor = scales
        return self._replace(tma_a=tma, a=tensor)

    def of_local_slice(self, config: GemmConfig, rank: Scalar, rows: Scalar, k_tiles: Scalar) -> BlockScales:
        """Returns the scales for this rank's rows of the local slice of K (`gather.input_exchange`).

        Args:
            config: The kernel's configuration.
            rank: This rank.
            rows: Rows of a full shard; ``a`` has the scales of each rank's rows.
            k_tiles: Number of k tiles of a slice.
        """
        return self._replace(padding=-rank * rows, lines=rank * k_tiles * config.k_parts)

    def of_slice(
        self, scales: tuple[Any, Any], source: Scalar, number: Scalar, k_tiles: Scalar
    ) -> BlockScales:
        """Returns the scales for a peer's slice of K.

        Args:
            scales: Gathered scales of A, (TMA atom, coordinate tensor).
            source: Rank that has the slice.
            number: Number of slices that are summed before this one.
            k_tiles: Number of k tiles of a slice.
        """
        return self.with_gathered(scales)._replace(k_tiles=number * k_tiles)

    def joined(
        self,
        config: GemmConfig,
        a: OperandLoads,
        b: OperandLoads,
        stages: StageScales,
        row: Scalar,
        column: Scalar,
    ) -> tuple[JointLoads, JointLoads]:
        """Returns the loads of A and of B, each together with its scales.

        Scales outside the tensors are loaded as zeros. The values that they multiply are zeros or are
        clipped.

        Args:
            config: The kernel's configuration.
            a: Loads of A's tile.
            b: Loads of B's tile.
            stages: Stages of the scales.
            row: First row of A in the CTA tile, without padding.
            column: First row of B in the CTA tile.
        """
        rows, parts = config.cta_tile[0], config.k_parts
        begin = (self.lines, row + self.padding)
        of_a = cute.local_tile(cute.domain_offset(begin, self.a), (parts, rows), (None, 0))
        begin = (column // config.block_rows, 0)
        of_b = cute.local_tile(
            cute.domain_offset(begin, self.b), (config.column_blocks, TMA_SCALES), (0, None)
        )
        from_a = OperandLoads.shared(self.tma_a, 0, 1, stages.a, of_a, None)
        from_b = OperandLoads.shared(self.tma_b, 0, 1, stages.b, of_b, None)
        return JointLoads((a, from_a)), JointLoads(
            (b, SharedBoxes(from_b, TMA_SCALES // parts, self.k_tiles))
        )


class SharedBoxes(NamedTuple):
    """Loads of boxes of B's scales, each with the scales of several k tiles.

    A box of TMA has at least 16 bytes along the contiguous dimension, K: four scales. Each k tile loads the
    box that has its scales, all four, into its stage.

    Attributes:
        boxes: Loads of the boxes, numbered along K.
        tiles: Number of k tiles per box.
        before: Number of k tiles before the first one that is loaded.
    """

    boxes: OperandLoads
    tiles: int
    before: Any

    def load(self, ab: Any, state: pipeline.PipelineState, k: Scalar) -> None:
        """Starts the load of the box of k tile ``k`` into the acquired stage; counted on ab.full."""
        self.boxes.load(ab, state, (self.before + k) // self.tiles)


class StageScales(NamedTuple):
    """Stages of the scales in shared memory, fp32; the last mode is the stage.

    Attributes:
        a: (parts of a k tile, rows of the CTA tile, stages).
        b: (column blocks of the CTA tile, `TMA_SCALES` blocks of K, stages).
    """

    a: Any
    b: Any

    def factors(
        self, config: GemmConfig, rows: tuple[Any, Any], stage: Scalar, k: Scalar, part: int
    ) -> list[list[Any]]:
        """Returns the products of both scales, ``[column block][row of the thread]``, of a part of a k tile.

        The stage is full and not yet released.

        Args:
            config: The kernel's configuration.
            rows: The thread's two rows in the CTA tile (`rows_of`).
            stage: Index of the stage that has k tile ``k``.
            k: Number of the k tile.
            part: Part of the k tile, 0 to ``config.k_parts - 1``.
        """
        at = k * config.k_parts % TMA_SCALES + part
        of_rows = [self.a[(part, row, stage)] for row in rows]
        of_columns = [self.b[(block, at, stage)] for block in range(config.column_blocks)]
        return [[row * column for row in of_rows] for column in of_columns]


# -- host side of the launch


def scales_of(config: GemmConfig, a: Any, b: Any) -> BlockScales:
    """Returns the TMA sources of A's and B's scales, two fp32 matrices as the module describes."""
    return BlockScales(*tma_of_a(config, a), *_tma(b, (config.column_blocks, TMA_SCALES)))


def tma_of_a(config: GemmConfig, scales: Any) -> tuple[Any, Any]:
    """Returns the TMA load atom of A's scales and their coordinate tensor.

    ``scales`` may have modes after (blocks of K, rows), for example shards; the caller slices them.
    """
    return _tma(scales, (config.k_parts, config.cta_tile[0]))


def _tma(scales: Any, box: tuple[int, int]) -> tuple[Any, Any]:
    layout = cute.make_layout(box, stride=(box[1], 1))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), scales, layout, box)


def fake_scales() -> Any:
    """Returns a symbolic fp32 matrix of scales for compilation; its pitch is a multiple of `TMA_SCALES`."""
    extents, pitch = (cute.sym_int32(), cute.sym_int32()), cute.sym_int64(divisibility=TMA_SCALES)
    return make_fake_tensor(Float32, extents, stride=(pitch, 1), assumed_align=16)


def fake_gathered() -> Any:
    """Returns a symbolic tensor (blocks of K, rows, shards) of gathered scales of A, for compilation."""
    extents = cute.sym_int32(), cute.sym_int32(divisibility=TMA_SCALES), cute.sym_int32()
    pitch, shard = (cute.sym_int64(divisibility=TMA_SCALES) for _ in range(2))
    return make_fake_tensor(Float32, extents, stride=(pitch, 1, shard), assumed_align=16)


# -- epilogue warps


def setup(config: GemmConfig, smem: Any) -> StageScales:
    """Allocates the stages of the scales in shared memory, as many as stages of A and B."""
    parts, rows, blocks = config.k_parts, config.cta_tile[0], config.column_blocks
    of_a = cute.make_layout((parts, rows, config.ab_stages), stride=(rows, 1, parts * rows))
    pitch = STAGE_ALIGNMENT // 4
    of_b = cute.make_layout((blocks, TMA_SCALES, config.ab_stages), stride=(TMA_SCALES, 1, pitch))
    return StageScales(
        *(smem.allocate_tensor(Float32, layout, byte_alignment=STAGE_ALIGNMENT) for layout in (of_a, of_b))
    )


def rows_of(part: Any, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Returns a thread's two rows in the tile: of elements 0, 1 and of elements 2, 3 of every four.

    Args:
        part: The thread's slice of the tiled MMA.
        tile: (M, N) of the CTA tile.
    """
    coordinates = part.partition_C(cute.make_identity_tensor(tile))
    return coordinates[0][0], coordinates[2][0]


def promote(acc: cute.Tensor, done: cute.Tensor, factors: list[list[Any]] | None) -> None:
    """Adds the sum ``done`` to ``acc``, times the factor of each element's column block and row.

    Args:
        acc: fp32 accumulator in registers.
        done: fp32 sum of the same size; its wgmma group has completed.
        factors: Result of `StageScales.factors`, or None to add without scales.
    """
    if factors is None:
        acc.store(acc.load() + done.load().reshape(acc.shape))
    else:
        values = cute.size(acc)
        for i in range(values):
            acc[i] = acc[i] + done[i] * factors[i * len(factors) // values][i // 2 % 2]


def share_of(factors: list[list[Any]] | None, part: int, parts: int) -> list[list[Any]] | None:
    """Returns the factors of the ``part``-th of ``parts`` equal ranges of a tile's columns.

    One column block may cover several ranges; then all of them have its factors. None stays None.
    """
    if factors is None or len(factors) < parts:
        return factors
    width = len(factors) // parts
    return factors[part * width : (part + 1) * width]
