"""Operands as the kernels read them: where TMA can, copied where it cannot."""

from __future__ import annotations

from typing import Any

from torch import Tensor

ROW_ELEMENTS = 8
"""TMA wants rows at multiples of 16 bytes: 8 elements of a 16-bit type (CUDA driver API, tensor maps)."""


def aligned(matrix: Tensor) -> Tensor:
    """`matrix` `[rows, K]` as TMA can read it: itself, or a copy with zeros appended along K.

    Rows (or, of a transposed matrix, columns) must begin at multiples of 16 bytes. Zeros along K add nothing
    to a product, and where the other operand is shorter the hardware reads zeros.
    """
    if has_tma_strides(matrix) and matrix.data_ptr() % 16 == 0:
        return matrix
    rows, depth = matrix.shape
    padded = matrix.new_zeros(rows, max(-(-depth // ROW_ELEMENTS), 1) * ROW_ELEMENTS)
    padded[:, :depth] = matrix
    return padded


def has_tma_strides(matrix: Tensor) -> bool:
    """Whether TMA could read `matrix` `[rows, K]`, if it begins at a multiple of 16 bytes."""
    inner, outer = (1, 0) if matrix.stride(1) == 1 else (0, 1)
    return (
        matrix.stride(inner) == 1
        and matrix.stride(outer) % ROW_ELEMENTS == 0
        and matrix.stride(outer) >= matrix.shape[inner]
        and matrix.shape[1] > 0
    )


def aligned_bias(bias: Tensor) -> Tensor:
    """`bias` as the epilogue reads it, 16 bytes at a time: itself, or a contiguous and aligned copy."""
    return bias if bias.stride(0) == 1 and bias.data_ptr() % 16 == 0 else bias.clone()


def major(matrix: Tensor, other: str) -> Any:
    """``"k"`` if K is the contiguous dimension of `[rows, K]`, else ``other``."""
    return "k" if matrix.stride(1) == 1 else other
