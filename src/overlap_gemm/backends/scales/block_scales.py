"""Scales of blocks in the layout that kernels read, and in the layout sent with a shard: after all its rows.

A kernel reads them as a matrix whose lines are whole 16 bytes: TMA loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.scale_blocks import ATOM_BYTES, ATOM_ROWS, MX, Blocks
from ...spec.sharding import ceil_div
from . import mx_scales as mx
from .tma_operands import ROW_BYTES, has_tma_strides, padded, widened


class ScaleLayout(Protocol):
    """Layout of the scales of one kind of blocks, as kernels read them.

    Attributes:
        element: Dtype of the matrix.
    """

    element: torch.dtype

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """Returns (lines, elements per line) of the matrix of an operand `[rows, depth]`, with padding."""

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the matrix of A's scales.

        Args:
            scale: Scales as callers pass them.
            shape: Shape of the operand.
            step: Rows after which tiles restart; None: nowhere.
        """

    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the matrix of B's scales; arguments as in `of_a`."""

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies A's scales to a matrix for at least as many rows."""

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns A's scales as a contiguous matrix of these extents if it needs no copy, else None."""


@dataclass(frozen=True)
class Words:
    """Scales that the MMA reads (`mainloop.mx`): a line for each 128 rows."""

    element = torch.int16

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """Returns (lines, int16 words per line); see `ScaleLayout.extents`."""
        return ceil_div(rows, ATOM_ROWS), max(mx.atoms_along(depth), 1) * ATOM_BYTES // 2

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the words of the scales; see `ScaleLayout.of_a`."""
        return mx.words_of(scale, shape, step)

    of_b = of_a

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies the scales' bytes to the start of the matrix; see `ScaleLayout.put`."""
        matrix.view(torch.uint8).view(-1)[: scale.numel()] = scale.view(torch.uint8).reshape(-1)

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns a view of contiguous scales without padding, else None; see `ScaleLayout.as_sent`."""
        lines, width = extents
        if not scale.is_contiguous() or scale.numel() != lines * width * self.element.itemsize:
            return None
        return scale.view(self.element).view(extents)


@dataclass(frozen=True)
class PaddedScaleRows:
    """Scales that promoted sums are multiplied with (`mainloop.blocks`): for A a line for each block of K.

    Attributes:
        width: Elements of K in a block.
    """

    width: int

    element = torch.float32

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """Returns (lines, padded rows); see `ScaleLayout.extents`."""
        return ceil_div(depth, self.width), padded(rows, self.element.itemsize)

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the transposed scales; see `ScaleLayout.of_a`.

        Scales `[rows, ...]` whose columns are contiguous are not copied. Lines restart at whole 16 bytes
        where tiles restart, which needs a copy.
        """
        lines, unit = scale.t(), padded(1, scale.itemsize)
        if step is None or step >= len(scale) or step % unit == 0:
            return self._readable(lines)
        return torch.cat([F.pad(part, (0, -part.shape[1] % unit)) for part in lines.split(step, 1)], 1)

    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Returns the scales; see `ScaleLayout.of_b`. A matrix without rows, not read, gets one line.

        Tiles restart at a block boundary (`ExchangeShape.even`).
        """
        return self._readable(scale if len(scale) else scale.new_zeros(1, scale.shape[1]))

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies the transposed scales to the first columns; see `ScaleLayout.put`."""
        matrix[:, : len(scale)] = scale.t()

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns the transposed scales if they are contiguous, else None; see `ScaleLayout.as_sent`."""
        lines = scale.t()
        return lines if lines.shape == extents and lines.is_contiguous() else None

    @staticmethod
    def _readable(lines: Tensor) -> Tensor:
        if lines.stride(1) == 1 and has_tma_strides(lines) and lines.data_ptr() % ROW_BYTES == 0:
            return lines
        return widened(lines)


def layout_of(blocks: Blocks) -> ScaleLayout:
    """Returns the layout of scales of these blocks."""
    return Words() if blocks == MX else PaddedScaleRows(blocks[2])


def num_bytes(blocks: Blocks, rows: int, depth: int) -> int:
    """Returns the bytes of the scales of `rows` rows with `depth` elements of K."""
    layout = layout_of(blocks)
    lines, width = layout.extents(rows, depth)
    return lines * width * layout.element.itemsize


def scales_of_shard(scale: Tensor, blocks: Blocks, rows: int, depth: int) -> Tensor:
    """Returns the scales of a shard as kernels send and read them: A's matrix for a full shard.

    The result is a view of `scale` if the layout allows it, else a copy padded with zeros.

    Args:
        scale: Scales as callers pass them, of at most `rows` rows.
        blocks: Blocks that share a scale.
        rows: Rows of a full shard.
        depth: Extent of K in memory, padding included.
    """
    layout = layout_of(blocks)
    extents = layout.extents(rows, depth)
    if (matrix := layout.as_sent(scale, extents)) is not None and matrix.data_ptr() % ROW_BYTES == 0:
        return matrix
    matrix = scale.new_zeros(extents, dtype=layout.element)
    layout.put(scale, matrix)
    return matrix


def gathered_scales(buffer: Tensor, owners: int, chunk: int, depth: int, full: int, blocks: Blocks) -> Tensor:
    """Returns the scales in a gather buffer, after the rows of each shard: A's matrices, `[..., owners]`.

    Args:
        buffer: Gather buffer, of bytes.
        owners: Number of ranks that have rows.
        chunk: Rows of a full shard.
        depth: Extent of K in memory, padding included.
        full: Bytes from one shard to the next.
        blocks: Blocks that share a scale.
    """
    layout = layout_of(blocks)
    (lines, width), itemsize = layout.extents(chunk, depth), layout.element.itemsize
    flat = buffer.view(layout.element)
    first = flat.storage_offset() + chunk * depth // itemsize
    return flat.as_strided((lines, width, owners), (width, 1, full // itemsize), first)
