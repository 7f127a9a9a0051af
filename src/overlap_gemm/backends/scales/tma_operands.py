"""Operands as the kernels read them: used in place if TMA can load them, else copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROW_BYTES = 16
"""TMA requires rows at multiples of 16 bytes (CUDA driver API, tensor maps)."""

ROW_ELEMENTS = 8
"""Elements of a 16-bit dtype in `ROW_BYTES`."""


def padded(extent: int, itemsize: int = 2) -> int:
    """Returns the elements of a row of `extent` elements padded to whole 16 bytes, at least 16 bytes."""
    unit = ROW_BYTES // itemsize
    return max(-(-extent // unit), 1) * unit


MAX_STRIDE = 1 << 40
"""Limit in bytes of a stride of a TMA descriptor, which has 40 bits."""


def aligned(matrix: Tensor, shard: int = 0) -> Tensor:
    """Returns `matrix` `[rows, K]` as TMA can read it: itself, or a copy with zeros appended along K.

    Rows (or, of a transposed matrix, columns) must begin at multiples of 16 bytes. Zeros along K add nothing
    to a product, and if the other operand is shorter the hardware reads zeros.

    Args:
        matrix: Operand.
        shard: Rows of an owner's shard, see `has_tma_strides`.
    """
    if has_tma_strides(matrix, shard) and matrix.data_ptr() % 16 == 0:
        return matrix
    return widened(matrix)


def weight_pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two weights of one shape as a kernel reads them by one descriptor: themselves, or copies.

    Args:
        first: Weight `[rows, K]`.
        second: Weight of the same shape, at another address, less than `MAX_STRIDE` bytes away.
    """
    pair = aligned(first), aligned(second)
    if is_weight_pair(*pair):
        return pair
    rows, depth = first.shape
    both = first.new_zeros(2, rows, padded(depth, first.itemsize))
    both[0, :, :depth], both[1, :, :depth] = first, second
    return both[0], both[1]


def is_weight_pair(first: Tensor, second: Tensor) -> bool:
    """Returns whether a kernel reads two aligned weights of one shape by one descriptor."""
    is_one_pitch = first.stride() == second.stride() and first.stride(1) == 1
    return is_one_pitch and 0 < abs(first.data_ptr() - second.data_ptr()) < MAX_STRIDE


def widened(matrix: Tensor) -> Tensor:
    """Returns a contiguous copy of `matrix` `[rows, K]` with zeros appended along K to whole 16 bytes."""
    rows, depth = matrix.shape
    wide = matrix.new_zeros(rows, padded(depth, matrix.itemsize))
    wide[:, :depth] = matrix
    return wide


def has_tma_strides(matrix: Tensor, shard: int = 0) -> bool:
    """Returns whether TMA can read `matrix` `[rows, K]` if it begins at a multiple of 16 bytes.

    Args:
        matrix: Operand.
        shard: Rows of an owner's shard if tiles begin with each shard. Along the contiguous dimension a load
            begins at multiples of 16 bytes only (measured: docs/design/facts.md).
    """
    inner, outer = (1, 0) if matrix.stride(1) == 1 else (0, 1)
    return (
        matrix.stride(inner) == 1
        and matrix.stride(outer) * matrix.itemsize % ROW_BYTES == 0
        and matrix.stride(outer) >= matrix.shape[inner]
        and matrix.shape[1] > 0
        and (inner == 1 or shard * matrix.itemsize % ROW_BYTES == 0)
    )


def aligned_vector(vector: Tensor, size: int) -> Tensor:
    """Returns `vector` as the epilogue reads it, 16 bytes at a time: itself, or a contiguous aligned copy.

    A single element is copied `size` times.
    """
    if vector.shape[0] == size and vector.stride(0) == 1 and vector.data_ptr() % 16 == 0:
        return vector
    return vector.expand(size).clone(memory_format=torch.contiguous_format)


def major(matrix: Tensor, other: str) -> Any:
    """Returns ``"k"`` if K is the contiguous dimension of `[rows, K]`, else ``other``."""
    return "k" if matrix.stride(1) == 1 else other
