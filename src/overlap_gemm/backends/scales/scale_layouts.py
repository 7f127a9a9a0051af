"""Scales of operands as kernels load them and as ranks send them: a `ScaleLayout` for each kind of scales.

Scales of rows are vectors. Scales of blocks are a matrix that kernels load by TMA: each line is a multiple of
16 bytes. In a shard, the matrix follows the space for the rows of a full shard, so its offset is the same for
every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.scale_blocks import ATOM_BYTES, ATOM_ROWS, MX, PROMOTED, Blocks, in_words
from ...exchange.geometry import SHARD_ALIGN
from ...spec.sharding import Shards, ceil_div
from . import mx_scales as mx
from .tma_operands import ROW_BYTES, aligned_vector, has_tma_strides, padded, widened

Extents = tuple[int, int]
"""(rows, K) of an operand."""

CUBLAS_ROWS = ROW_BYTES // 4
"""Unit of the leading extents of scales of blocks: cuBLAS loads four float32 elements."""


class ScaleLayout(ABC):
    """Layout of one kind of scales; scales in the public layout are those of `scaling`.

    Attributes:
        element: Dtype of the scales in memory.
        is_in_shard: Whether sent scales follow the rows of their shard. If not, they follow all shards,
            unless a relay puts rows and scales together.
    """

    element = torch.float32
    is_in_shard = True

    @abstractmethod
    def extents(self, rows: int, depth: int) -> Extents:
        """Returns A's extents (lines, elements of a line) for an operand `[rows, depth]`, padded."""

    @abstractmethod
    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the scales of A: a view of `scale` if its strides and address allow it, else a copy.

        Args:
            scale: Scales in the public layout.
            shape: `[rows, K]` of the operand.
            step: Rows of a full shard if tiles restart at each shard; None: they do not.
        """

    @abstractmethod
    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the scales of B; arguments as in `of_a`."""

    @abstractmethod
    def of_shard(self, scale: Tensor, rows: int, depth: int) -> Tensor:
        """Returns the scales of the local shard as they are sent: address and size are multiples of 16 bytes.

        The result is a view of `scale` if possible, else a copy padded with zeros.

        Args:
            scale: Scales in the public layout, of at most `rows` rows.
            rows: Rows whose scales are sent (`rows_sent`).
            depth: K in memory, padding included.
        """

    @abstractmethod
    def unit(self, x: Extents, weight: Extents, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns new scales of value 1 in the public layout; of rows as columns, `[M, 1]` and `[N, 1]`.

        Args:
            x: Shape of x; its K may be a part of the weight's.
            weight: Shape of the weight.
            device: Device of the scales.
        """

    @abstractmethod
    def dequantised(self, matrix: Tensor, scale: Tensor) -> Tensor:
        """Returns `matrix * scale` in float32, `[rows, K]`, each element rounded once.

        Args:
            matrix: 8-bit operand `[rows, K]`.
            scale: Scales in the public layout.
        """

    def num_bytes(self, rows: int, depth: int) -> int:
        """Returns the bytes of A's scales for an operand `[rows, depth]`, padding included."""
        lines, width = self.extents(rows, depth)
        return lines * width * self.element.itemsize

    def shard_bytes(self, rows: int, depth: int) -> tuple[int, int]:
        """Returns (bytes of a row, bytes for the scales) of a full shard in a gather buffer.

        The second is a multiple of `SHARD_ALIGN`. Its place: `gather_plans.BufferLayout`.

        Args:
            rows: Rows of a full shard.
            depth: K in memory, padding included.
        """
        return depth, ceil_div(self.num_bytes(rows, depth), SHARD_ALIGN) * SHARD_ALIGN

    def rows_sent(self, local: int, full: int) -> int:
        """Returns the rows whose scales a rank sends, of `local` rows of a shard of `full` rows."""
        return full

    def gathered(self, buffer: Tensor, owners: int, chunk: int, depth: int, full: int) -> Tensor | None:
        """Returns a view of the scales in a gather buffer: `[lines, elements, owners]`, A's of each shard.

        None if kernels load them without TMA.

        Args:
            buffer: Gather buffer, one-byte elements. The view does not own the memory.
            owners: Number of ranks that have rows.
            chunk: Rows of a full shard.
            depth: K in memory, padding included; also the bytes of a row.
            full: Bytes from the start of a shard to the start of the next.
        """
        (lines, width), itemsize = self.extents(chunk, depth), self.element.itemsize
        flat = buffer.view(self.element)
        first = flat.storage_offset() + chunk * depth // itemsize
        return flat.as_strided((lines, width, owners), (width, 1, full // itemsize), first)

    def for_torch(self, x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scales of x `[M, K]` and of a weight `[N, K]` for `scaling.scaled_mm_by_torch`.

        - rows: `[M, 1]` and `[1, N]`, or no dimensions if both have one element; inputs are vectors or
          columns
        - blocks of 128: `[4 * ceil(M / 4), ceil(K / 128)]` and `[4 * ceil(K / 512), ceil(N / 128)]`, both
          with contiguous columns (torch 2.13, ScaledBlas.cpp)
        - blocks, if K is a single block: as for rows
        """
        if scale_x.numel() == scale_w.numel() == 1:
            return scale_x.reshape(()), scale_w.reshape(())
        return (
            aligned_vector(scale_x.reshape(-1), len(x))[:, None],
            aligned_vector(scale_w.reshape(-1), len(weight))[None],
        )


@dataclass(frozen=True)
class ScaleVectors(ScaleLayout):
    """Layout of float32 scales of rows: a vector for A, which epilogues load, and one for B."""

    is_in_shard = False

    def extents(self, rows: int, depth: int) -> Extents:
        """Returns (1, rows padded to a multiple of 4)."""
        return 1, padded(rows, self.element.itemsize)

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns a vector of `shape[0]` elements; see `tma_operands.aligned_vector`."""
        return aligned_vector(scale, shape[0])

    of_b = of_a

    def of_shard(self, scale: Tensor, rows: int, depth: int) -> Tensor:
        """Returns the scales of `rows` rows; a single element is repeated."""
        if rows % (ROW_BYTES // 4) == 0:
            return aligned_vector(scale, rows)
        sent = scale.new_zeros(padded(rows, scale.itemsize))
        sent[:rows] = scale
        return sent

    def unit(self, x: Extents, weight: Extents, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns two columns of ones."""
        return torch.ones((x[0], 1), device=device), torch.ones((weight[0], 1), device=device)

    def dequantised(self, matrix: Tensor, scale: Tensor) -> Tensor:
        """Returns each row times its scale."""
        return matrix.float() * scale[:, None]

    def rows_sent(self, local: int, full: int) -> int:
        """Returns `local`: places in the buffer do not depend on the number of scales."""
        return local

    def gathered(self, buffer: Tensor, owners: int, chunk: int, depth: int, full: int) -> Tensor | None:
        """Returns None: epilogues load the scales of rows."""
        return None


class BlockLayout(ScaleLayout):
    """Layout of scales of blocks, which can be sent with columns of x, too (`spec.OpSpec.reshards_k`)."""

    @abstractmethod
    def by_shard(self, scale: Tensor, shards: Shards, depth: int) -> Tensor:
        """Returns A's scales of each shard of the rows as they are sent, `[shards * lines, elements]`.

        Each shard has the extents of a full one, with zeros for rows that it lacks.

        Args:
            scale: Scales in the public layout.
            shards: Division of the rows.
            depth: K of the operand; in the all-to-all GEMM K / P.
        """

    @abstractmethod
    def in_order(self, scale: Tensor, rank: int, shards: int) -> Tensor:
        """Returns a weight's scales as kernels of a rank read them that sum K from its part of it on.

        Args:
            scale: Scales in the public layout.
            rank: Rank of the kernel.
            shards: Number of parts of K, one for each rank.
        """

    @abstractmethod
    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies A's scales into a zeroed matrix of the same K, and of at least as many rows."""

    @abstractmethod
    def as_sent(self, scale: Tensor, extents: Extents) -> Tensor | None:
        """Returns a contiguous view of A's scales with these extents, or None if only a copy has them."""

    def of_shard(self, scale: Tensor, rows: int, depth: int) -> Tensor:
        """Returns A's matrix for the rows of a full shard, contiguous."""
        extents = self.extents(rows, depth)
        if (matrix := self.as_sent(scale, extents)) is not None and matrix.data_ptr() % ROW_BYTES == 0:
            return matrix
        matrix = scale.new_zeros(extents, dtype=self.element)
        self.put(scale, matrix)
        return matrix


@dataclass(frozen=True)
class MxAtoms(BlockLayout):
    """Layout of e8m0 scales, which the MMA reads (`mainloop.mx`): a line of atoms per 128 rows."""

    element = torch.int16

    def __str__(self) -> str:
        """Returns a description of the blocks, for messages."""
        return in_words(MX)

    def extents(self, rows: int, depth: int) -> Extents:
        """Returns (ceil(rows / 128), int16 elements of a line, of at least one atom)."""
        return ceil_div(rows, ATOM_ROWS), max(mx.atoms_along(depth), 1) * ATOM_BYTES // 2

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the matrix for A or B; see `mx_scales.words_of`."""
        return mx.words_of(scale, shape, step)

    of_b = of_a

    def by_shard(self, scale: Tensor, shards: Shards, depth: int) -> Tensor:
        """Returns the scales of each shard; a view if all shards are full, of a multiple of 128 rows."""
        matrix = self.of_a(scale, (shards.total, depth), shards.chunk)
        lines = shards.parts * ceil_div(shards.chunk, ATOM_ROWS)
        return F.pad(matrix, (0, 0, 0, lines - len(matrix))) if lines > len(matrix) else matrix

    def in_order(self, scale: Tensor, rank: int, shards: int) -> Tensor:
        """Returns `scale`: a kernel's loads begin at each part's scales."""
        return scale

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies all bytes to the start of the matrix: fewer rows fill fewer lines."""
        matrix.view(torch.uint8).view(-1)[: scale.numel()] = scale.view(torch.uint8).reshape(-1)

    def as_sent(self, scale: Tensor, extents: Extents) -> Tensor | None:
        """Returns a view if `scale` is contiguous and has as many bytes as the matrix; else None."""
        lines, width = extents
        if not scale.is_contiguous() or scale.numel() != lines * width * self.element.itemsize:
            return None
        return scale.view(self.element).view(extents)

    def unit(self, x: Extents, weight: Extents, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns two vectors of ones, with padding."""
        of_x, of_weight = (torch.ones(mx.num_scales(*shape), device=device) for shape in (x, weight))
        return of_x.to(mx.SCALE), of_weight.to(mx.SCALE)

    def dequantised(self, matrix: Tensor, scale: Tensor) -> Tensor:
        """Returns each element times the scale of its row's block."""
        rows, depth = matrix.shape
        wide = mx.rows_of(scale, rows, depth).float()
        return matrix.float() * wide.repeat_interleave(mx.WIDTH, 1)[:, :depth]


@dataclass(frozen=True)
class PaddedScaleRows(BlockLayout):
    """Layout of float32 scales, by which kernels multiply partial sums on promotion (`mainloop.blocks`).

    The matrix of A is transposed: a line per block of K, whose elements are the scales of the rows. The
    matrix of B has a line per block of rows of the weight.

    Attributes:
        width: Elements of K in a block, and rows of a weight.
    """

    width: int

    def __str__(self) -> str:
        """Returns a description of the blocks, for messages."""
        return in_words((1, self.width, self.width))

    def along(self, depth: int) -> int:
        """Returns the number of blocks along K, at least 1."""
        return blocks_along(depth, self.width)

    def extents(self, rows: int, depth: int) -> Extents:
        """Returns A's extents: (ceil(depth / width), rows padded to a multiple of 4)."""
        return ceil_div(depth, self.width), padded(rows, self.element.itemsize)

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns `scale` `[rows, blocks of K]` transposed.

        The result is a view if columns of `scale` are contiguous and TMA can load them. If tiles restart at
        each shard, a shard's scales must begin at a multiple of 16 bytes. They are copied if `step` is no
        multiple of 4.
        """
        lines, unit = scale.t(), padded(1, scale.itemsize)
        if step is None or step >= len(scale) or step % unit == 0:
            return self._readable(lines)
        return torch.cat([F.pad(part, (0, -part.shape[1] % unit)) for part in lines.split(step, 1)], 1)

    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns `scale` `[blocks of rows, blocks of K]`, or a copy with padded lines.

        A weight without rows, which is not read, gets one line. `step` has no effect: shards of columns begin
        at a block (`ExchangeShape.even`).
        """
        return self._readable(scale if len(scale) else scale.new_zeros(1, scale.shape[1]))

    def by_shard(self, scale: Tensor, shards: Shards, depth: int) -> Tensor:
        """Returns a copy of the scales of each shard, transposed."""
        extents = self.extents(shards.chunk, depth)
        rows = F.pad(scale, (0, 0, 0, shards.parts * shards.chunk - len(scale)))
        matrix = scale.new_zeros(shards.parts, *extents)
        matrix[..., : shards.chunk].copy_(rows.unflatten(0, (shards.parts, shards.chunk)).transpose(1, 2))
        return matrix.flatten(0, 1)

    def in_order(self, scale: Tensor, rank: int, shards: int) -> Tensor:
        """Returns a copy that begins with the scales of this rank's part of K."""
        return scale.roll(-rank * scale.shape[1] // shards, 1)

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies the transposed scales to the first columns of the matrix."""
        matrix[:, : len(scale)] = scale.t()

    def as_sent(self, scale: Tensor, extents: Extents) -> Tensor | None:
        """Returns the transposed view if it is contiguous and has these extents; else None."""
        lines = scale.t()
        return lines if lines.shape == extents and lines.is_contiguous() else None

    def unit(self, x: Extents, weight: Extents, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns a column for each block of K."""
        shapes = (x[0], self.along(x[1])), (ceil_div(weight[0], self.width), self.along(weight[1]))
        of_x, of_weight = (torch.ones(shape, device=device) for shape in shapes)
        return of_x, of_weight

    def dequantised(self, matrix: Tensor, scale: Tensor) -> Tensor:
        """Returns each element times the scale of its block."""
        rows, depth = matrix.shape
        wide = scale if len(scale) == rows else scale.repeat_interleave(self.width, 0)[:rows]
        return matrix.float() * wide.repeat_interleave(self.width, 1)[:, :depth]

    def for_torch(self, x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor) -> tuple[Tensor, Tensor]:
        """Returns matrices with contiguous columns, or scales of rows; see `ScaleLayout.for_torch`."""
        if scale_x.shape[1] > 1:
            return along_rows(scale_x), along_rows(scale_w.t())
        return super().for_torch(x, weight, scale_x, scale_w.repeat_interleave(self.width, 0)[: len(weight)])

    @staticmethod
    def _readable(lines: Tensor) -> Tensor:
        if lines.stride(1) == 1 and has_tma_strides(lines) and lines.data_ptr() % ROW_BYTES == 0:
            return lines
        return widened(lines)


LAYOUTS: dict[Blocks | None, ScaleLayout] = {
    None: ScaleVectors(),
    **{kind: PaddedScaleRows(kind[2]) for kind in PROMOTED},
    MX: MxAtoms(),
}
"""Layout of scales by the blocks that share one; None: rows."""


def blocks_along(depth: int, width: int) -> int:
    """Returns the number of blocks of ``width`` elements along K, at least 1."""
    return max(ceil_div(depth, width), 1)


def along_rows(scale: Tensor) -> Tensor:
    """Returns scales of blocks `[rows, blocks]` with contiguous columns, of a multiple of 4 rows.

    cuBLAS and TMA require the strides (1, multiple of 4). Scales that have them are not copied; others are
    padded with zeros.
    """
    by_block, short = scale.t(), -scale.shape[0] % CUBLAS_ROWS
    return (F.pad(by_block, (0, short)) if short else by_block.contiguous()).t()
