"""Layout rules of operands that TMA loads, and the copies of tensors that break these rules.

A copy is a new tensor on the same device, made on the current stream. A tensor that obeys the rules is
returned unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROW_BYTES = 16
"""Unit of addresses and of row pitches in bytes: a rule of TMA (CUDA driver API, tensor maps)."""

ROW_ELEMENTS = 8
"""Number of 16-bit elements in `ROW_BYTES`."""


def padded(extent: int, itemsize: int = 2) -> int:
    """Returns `extent` rounded up to a multiple of 16 bytes, in elements; at least 16 bytes.

    Args:
        extent: Number of elements.
        itemsize: Bytes of an element: 1, 2 or 4.
    """
    unit = ROW_BYTES // itemsize
    return max(-(-extent // unit), 1) * unit


MAX_STRIDE = 1 << 40
"""Exclusive upper bound in bytes of a stride in a TMA descriptor, whose stride fields have 40 bits."""


def aligned(matrix: Tensor, shard: int = 0) -> Tensor:
    """Returns `matrix` if TMA can load it, else a row-major copy with padded K (`widened`).

    TMA needs a base address and a pitch that are multiples of 16 bytes. The padding adds zero to each sum
    over K. The other operand needs no padding: TMA fills elements out of bounds with zeros.

    Args:
        matrix: Operand `[rows, K]`, row-major or transposed.
        shard: Rows of a full shard if tiles restart at each shard; else 0. See `has_tma_strides`.
    """
    if has_tma_strides(matrix, shard) and matrix.data_ptr() % 16 == 0:
        return matrix
    return widened(matrix)


def of_one_major(matrices: Sequence[Tensor], shard: int = 0) -> list[Tensor]:
    """Returns `aligned` matrices of one `major`: if they differ, row-major copies of the transposed ones.

    ``contiguous()`` would return a transposed column `[rows, 1]` itself.

    Args:
        matrices: Operands `[rows, K]`, row-major or transposed.
        shard: As in `aligned`.
    """
    loaded = [aligned(matrix, shard) for matrix in matrices]
    if len({major(matrix, "rows") for matrix in loaded}) > 1:
        loaded = [matrix if major(matrix, "rows") == "k" else widened(matrix) for matrix in loaded]
    return loaded


def weight_pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two weights that one TMA descriptor covers: the inputs, aligned, or the two halves of one copy.

    Args:
        first: Weight `[N, K]`.
        second: Weight of the same shape and dtype.
    """
    pair = aligned(first), aligned(second)
    if is_weight_pair(*pair):
        return pair
    rows, depth = first.shape
    both = first.new_zeros(2, rows, padded(depth, first.itemsize))
    both[0, :, :depth], both[1, :, :depth] = first, second
    return both[0], both[1]


def is_weight_pair(first: Tensor, second: Tensor) -> bool:
    """Returns whether one TMA descriptor covers two aligned weights of one shape.

    Both must be row-major with equal pitch. The distance of their addresses becomes a stride of the
    descriptor: it is not 0 and is less than `MAX_STRIDE`.
    """
    is_one_pitch = first.stride() == second.stride() and first.stride(1) == 1
    return is_one_pitch and 0 < abs(first.data_ptr() - second.data_ptr()) < MAX_STRIDE


def widened(matrix: Tensor) -> Tensor:
    """Returns a row-major copy of `matrix` `[rows, K]`, with zeros up to `padded(K)` columns."""
    rows, depth = matrix.shape
    wide = matrix.new_zeros(rows, padded(depth, matrix.itemsize))
    wide[:, :depth] = matrix
    return wide


def has_tma_strides(matrix: Tensor, shard: int = 0) -> bool:
    """Returns whether the strides of `matrix` `[rows, K]` allow a TMA load; the address is not checked.

    One dimension is contiguous. The other stride is a multiple of 16 bytes, and rows (or columns) do not
    overlap. K is at least 1.

    Args:
        matrix: Operand, row-major or transposed.
        shard: Rows of a full shard if tiles restart at each shard; else 0. In a transposed matrix, whose rows
            are contiguous, it must be a multiple of 16 bytes: loads begin at multiples of 16 bytes only
            (measured: docs/design/facts.md).
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
    """Returns a contiguous vector at a multiple of 16 bytes, as epilogues load it.

    Args:
        vector: `[size]`, or `[1]`, which is repeated. It is returned unchanged if it obeys the rule.
        size: Number of elements.
    """
    if vector.shape[0] == size and vector.stride(0) == 1 and vector.data_ptr() % 16 == 0:
        return vector
    return vector.expand(size).clone(memory_format=torch.contiguous_format)


def major(matrix: Tensor, other: str) -> Any:
    """Returns "k" if K is contiguous in `matrix` `[rows, K]`, else `other`: "m" for A, "n" for B."""
    return "k" if matrix.stride(1) == 1 else other
