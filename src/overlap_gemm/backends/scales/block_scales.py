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


def rows_and_scales(x: Tensor, scale: Tensor, blocks: Blocks, chunk: int) -> Tensor:
    """`x` `[rows, depth]` as kernels send a shard: `[chunk, depth]`, and in memory after it the scales.

    Zeros are appended along K to whole 16 bytes, and after the rows.
    """
    (rows, depth), width = x.shape, padded(x.shape[1], x.itemsize)
    packed = x.new_empty(chunk * width + num_bytes(blocks, chunk, width), dtype=torch.uint8)
    packed[rows * width :] = 0
    own = packed[: rows * width].view(rows, width)
    own[:, :depth], own[:, depth:] = x.view(torch.uint8), 0
    shard = packed.view(x.dtype)[: chunk * width].view(chunk, width)
    layout_of(blocks).put(scale, scales_after(shard, blocks))
    return shard


def scales_after(shard: Tensor, blocks: Blocks) -> Tensor:
    """The scales in memory after what `rows_and_scales` made: A's matrix."""
    chunk, depth = shard.shape
    nbytes = num_bytes(blocks, chunk, depth)
    layout = layout_of(blocks)
    found = shard.view(torch.uint8).as_strided((nbytes,), (1,), shard.storage_offset() + chunk * depth)
    return found.view(layout.element).view(layout.extents(chunk, depth))


def gathered_scales(buffer: Tensor, owners: int, chunk: int, depth: int, blocks: Blocks) -> Tensor:
    """Those in a gather buffer of bytes, after the rows of each shard: A's matrices, `[..., owners]`."""
    layout, nbytes = layout_of(blocks), num_bytes(blocks, chunk, depth)
    (lines, width), itemsize = layout.extents(chunk, depth), layout.element.itemsize
    flat, shard = buffer.view(layout.element), (chunk * depth + nbytes) // itemsize
    first = flat.storage_offset() + chunk * depth // itemsize
    return flat.as_strided((lines, width, owners), (width, 1, shard), first)
