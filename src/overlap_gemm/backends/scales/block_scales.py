"""Scales of blocks: the matrix that kernels load by TMA, and its place in a shard that is sent.

Each line of the matrix is a multiple of 16 bytes. In a shard, the matrix follows the space for the rows of a
full shard, so its offset is the same for every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.scale_blocks import ATOM_BYTES, ATOM_ROWS, MX, Blocks
from ...spec.sharding import Shards, ceil_div
from . import mx_scales as mx
from .tma_operands import ROW_BYTES, has_tma_strides, padded, widened


class ScaleLayout(Protocol):
    """Layout of the matrix for one kind of blocks (`config.scale_blocks`).

    Attributes:
        element: Dtype of the matrix.
    """

    element: torch.dtype

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """Returns A's extents (lines, elements of a line) for an operand `[rows, depth]`, with padding."""

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns A's matrix: a view of `scale` if its strides and address allow it, else a copy.

        Args:
            scale: Scales in the public layout, see `scaling`.
            shape: `[rows, K]` of the operand.
            step: Rows of a full shard if tiles restart at each shard; None: they do not.
        """

    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the matrix for operand B; arguments as in `of_a`."""

    def by_shard(self, scale: Tensor, shards: Shards, depth: int) -> Tensor:
        """Returns A's scales of each shard of the rows as they are sent, `[shards * lines, elements]`.

        Each shard has the extents of a full one, with zeros for rows that it lacks.

        Args:
            scale: Scales in the public layout.
            shards: Division of the rows.
            depth: K of the operand; in the all-to-all GEMM K / P.
        """

    def in_order(self, scale: Tensor, rank: int, shards: int) -> Tensor:
        """Returns a weight's scales as kernels of a rank read them that sum K from its part of it on.

        Args:
            scale: Scales in the public layout.
            rank: Rank of the kernel.
            shards: Number of parts of K, one for each rank.
        """

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies A's scales into a zeroed matrix of the same K, and of at least as many rows."""

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns a contiguous view of A's scales with these extents, or None if only a copy has them."""


@dataclass(frozen=True)
class MxAtoms:
    """Layout of e8m0 scales, which the MMA reads (`mainloop.mx`): a line of atoms per 128 rows."""

    element = torch.int16

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
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

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns a view if `scale` is contiguous and has as many bytes as the matrix; else None."""
        lines, width = extents
        if not scale.is_contiguous() or scale.numel() != lines * width * self.element.itemsize:
            return None
        return scale.view(self.element).view(extents)


@dataclass(frozen=True)
class PaddedScaleRows:
    """Layout of float32 scales, by which kernels multiply partial sums on promotion (`mainloop.blocks`).

    The matrix of A is transposed: a line per block of K, whose elements are the scales of the rows. The
    matrix of B has a line per block of rows of the weight.

    Attributes:
        width: Elements of K in a block.
    """

    width: int

    element = torch.float32

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
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

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns the transposed view if it is contiguous and has these extents; else None."""
        lines = scale.t()
        return lines if lines.shape == extents and lines.is_contiguous() else None

    @staticmethod
    def _readable(lines: Tensor) -> Tensor:
        if lines.stride(1) == 1 and has_tma_strides(lines) and lines.data_ptr() % ROW_BYTES == 0:
            return lines
        return widened(lines)


def layout_of(blocks: Blocks) -> ScaleLayout:
    """Returns the layout of scales of these blocks."""
    return MxAtoms() if blocks == MX else PaddedScaleRows(blocks[2])


def num_bytes(blocks: Blocks, rows: int, depth: int) -> int:
    """Returns the bytes of A's matrix for an operand `[rows, depth]`, padding included."""
    layout = layout_of(blocks)
    lines, width = layout.extents(rows, depth)
    return lines * width * layout.element.itemsize


def scales_of_shard(scale: Tensor, blocks: Blocks, rows: int, depth: int) -> Tensor:
    """Returns the scales of the local shard as they are sent: A's matrix for the rows of a full shard.

    The result is contiguous and begins at a multiple of 16 bytes. It is a view of `scale` if possible, else a
    copy padded with zeros.

    Args:
        scale: Scales in the public layout, of at most `rows` rows.
        blocks: Blocks that share a scale.
        rows: Rows of a full shard.
        depth: K in memory, padding included.
    """
    layout = layout_of(blocks)
    extents = layout.extents(rows, depth)
    if (matrix := layout.as_sent(scale, extents)) is not None and matrix.data_ptr() % ROW_BYTES == 0:
        return matrix
    matrix = scale.new_zeros(extents, dtype=layout.element)
    layout.put(scale, matrix)
    return matrix


def gathered_scales(buffer: Tensor, owners: int, chunk: int, depth: int, full: int, blocks: Blocks) -> Tensor:
    """Returns a view of the scales in a gather buffer: `[lines, elements, owners]`, A's matrix of each shard.

    Args:
        buffer: Gather buffer, one-byte elements. The view does not own the memory.
        owners: Number of ranks that have rows.
        chunk: Rows of a full shard.
        depth: K in memory, padding included; also the bytes of a row.
        full: Bytes from the start of a shard to the start of the next.
        blocks: Blocks that share a scale.
    """
    layout = layout_of(blocks)
    (lines, width), itemsize = layout.extents(chunk, depth), layout.element.itemsize
    flat = buffer.view(layout.element)
    first = flat.storage_offset() + chunk * depth // itemsize
    return flat.as_strided((lines, width, owners), (width, 1, full // itemsize), first)
