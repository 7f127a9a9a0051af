"""Scales of blocks as kernels read them, and as they travel with a shard: after all of its rows.

What a kernel reads is a matrix, whose lines are whole 16 bytes: TMA loads them.
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
    """How the scales of blocks of one kind lie where kernels read them.

    Attributes:
        element: what the matrix is of.
    """

    element: torch.dtype

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """(Lines, elements of each) of the matrix of an operand `[rows, depth]`, with what fills lines up."""

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Those of A.

        Args:
            scale: As callers pass them.
            shape: Of the operand.
            step: Rows after which tiles begin anew; None: nowhere.
        """

    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """Those of B."""

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """Copies A's scales to a matrix for at least as many rows."""

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """Returns A's scales as a contiguous matrix of these extents if they lie so, else None."""


@dataclass(frozen=True)
class Words:
    """Those that the MMA multiplies with (`mainloop.mx`): a line for each 128 rows."""

    element = torch.int16

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """See `ScaleLayout`."""
        return ceil_div(rows, ATOM_ROWS), max(mx.atoms_along(depth), 1) * ATOM_BYTES // 2

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """See `ScaleLayout`."""
        return mx.words_of(scale, shape, step)

    of_b = of_a

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """See `ScaleLayout`."""
        matrix.view(torch.uint8).view(-1)[: scale.numel()] = scale.view(torch.uint8).reshape(-1)

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """See `ScaleLayout`."""
        lines, width = extents
        if not scale.is_contiguous() or scale.numel() != lines * width * self.element.itemsize:
            return None
        return scale.view(self.element).view(extents)


@dataclass(frozen=True)
class Lines:
    """Those that promoted sums are multiplied with (`mainloop.blocks`): of A a line for each block of K.

    Attributes:
        width: Elements of K in a block.
    """

    width: int

    element = torch.float32

    def extents(self, rows: int, depth: int) -> tuple[int, int]:
        """See `ScaleLayout`."""
        return ceil_div(depth, self.width), padded(rows, self.element.itemsize)

    def of_a(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """See `ScaleLayout`; `[rows, ...]` with adjacent elements below each other are not copied.

        But where tiles begin anew, lines do at whole 16 bytes.
        """
        lines, unit = scale.t(), padded(1, scale.itemsize)
        if step is None or step >= len(scale) or step % unit == 0:
            return self._readable(lines)
        return torch.cat([F.pad(part, (0, -part.shape[1] % unit)) for part in lines.split(step, 1)], 1)

    def of_b(self, scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
        """See `ScaleLayout`; of a matrix without rows, which is not read, one line.

        Tiles begin anew with a block (`ExchangeShape.even`), wherever that is.
        """
        return self._readable(scale if len(scale) else scale.new_zeros(1, scale.shape[1]))

    def put(self, scale: Tensor, matrix: Tensor) -> None:
        """See `ScaleLayout`."""
        matrix[:, : len(scale)] = scale.t()

    def as_sent(self, scale: Tensor, extents: tuple[int, int]) -> Tensor | None:
        """See `ScaleLayout`."""
        lines = scale.t()
        return lines if lines.shape == extents and lines.is_contiguous() else None

    @staticmethod
    def _readable(lines: Tensor) -> Tensor:
        if lines.stride(1) == 1 and has_tma_strides(lines) and lines.data_ptr() % ROW_BYTES == 0:
            return lines
        return widened(lines)


def layout_of(blocks: Blocks) -> ScaleLayout:
    """Of scales of these blocks."""
    return Words() if blocks == MX else Lines(blocks[2])


def num_bytes(blocks: Blocks, rows: int, depth: int) -> int:
    """Of the scales after so many rows."""
    layout = layout_of(blocks)
    lines, width = layout.extents(rows, depth)
    return lines * width * layout.element.itemsize


def scales_of_shard(scale: Tensor, blocks: Blocks, rows: int, depth: int) -> Tensor:
    """Scales as kernels send them and read the own ones: A's matrix for a full shard.

    Themselves, where they lie so, or a copy, with zeros after.

    Args:
        scale: As callers pass them, of as many rows or fewer.
        blocks: Blocks that share a scale.
        rows: Rows of a full shard.
        depth: K as it lies in memory.
    """
    layout = layout_of(blocks)
    extents = layout.extents(rows, depth)
    if (matrix := layout.as_sent(scale, extents)) is not None and matrix.data_ptr() % ROW_BYTES == 0:
        return matrix
    matrix = scale.new_zeros(extents, dtype=layout.element)
    layout.put(scale, matrix)
    return matrix


def gathered_scales(buffer: Tensor, owners: int, chunk: int, depth: int, full: int, blocks: Blocks) -> Tensor:
    """Those in a gather buffer of bytes, after the rows of each shard: A's matrices, `[..., owners]`.

    Args:
        buffer: Gather buffer, of bytes.
        owners: Ranks that have rows.
        chunk: Rows of a full shard.
        depth: K as it lies in memory.
        full: Bytes from one shard to the next.
        blocks: Blocks that share a scale.
    """
    layout = layout_of(blocks)
    (lines, width), itemsize = layout.extents(chunk, depth), layout.element.itemsize
    flat = buffer.view(layout.element)
    first = flat.storage_offset() + chunk * depth // itemsize
    return flat.as_strided((lines, width, owners), (width, 1, full // itemsize), first)
