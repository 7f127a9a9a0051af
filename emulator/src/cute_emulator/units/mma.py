"""Warp-level matrix fragments: mma.sync, ldmatrix, stmatrix.

A fragment is `uint32 [registers, 32 lanes]`. Seen as matrices of 32-bit words (two 16-bit or four 8-bit
elements, consecutive in k), all element sizes share one layout (PTX ISA 9.7.14.5). With g = lane // 4 and q =
lane % 4:

A  [16, words]   register i: row g + 8 * (i % 2), word q + 4 * (i // 2)
B  [8, words]    register i: column g, word q + 4 * i
C  [16, columns] 32-bit elements: register i: row g + 8 * (i // 2 % 2), column 8 * (i // 4) + 2 q + i % 2
                 16-bit elements: register i: row g + 8 * (i % 2), columns 8 * (i // 2) + 2 q + {0, 1}

One 8x8 matrix of 16-bit elements (ldmatrix): row g, word q; `.trans` exchanges rows and columns.
Matrices of bytes are only moved transposed, 16x16 of two registers by ldmatrix, 16x8 of one by stmatrix:

ldmatrix  byte v of register h: row 4 q + v, column g + 8 h of the 16 rows in shared memory
stmatrix  byte v: row 2 q + v % 2, column g + 8 * (v // 2) of the 8 rows in shared memory
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers import formats
from cute_emulator.numbers.arrays import F32, U32, Bits

Matrix = NDArray[np.float32] | NDArray[np.int32]


def a_matrix(registers: U32, element_bytes: int) -> Bits:
    """Returns the A operand `[16, k]` of patterns from `[registers, 32]`.

    Also used for wgmma's A in registers, per warp.
    """
    words = registers.reshape(-1, 2, 8, 4).transpose(1, 2, 0, 3).reshape(16, -1)
    return words.view(f"u{element_bytes}")


def b_matrix(registers: U32, element_bytes: int) -> Bits:
    """Returns the transposed B operand, `[8 columns, k]` of element patterns, from `[registers, 32]`."""
    words = registers.reshape(-1, 8, 4).transpose(1, 0, 2).reshape(8, -1)
    return words.view(f"u{element_bytes}")


def add(product: NDArray[np.floating], old: Matrix | None, dtype: str, saturate: bool = False) -> Matrix:
    """Adds a product to an accumulator, or to zero.

    Args:
        product: Product; exact for integers. A sum in `float64` is rounded once. The array may become the
            sum.
        old: Accumulator, or `None`.
        dtype: `f32`, `f16` or `s32`.
        saturate: Whether an integer sum saturates (`.satfinite`) instead of wrapping.
    """
    if dtype != "s32":
        if old is not None:
            product += old
        return product.astype(np.float32, copy=False)
    total = product.astype(np.int64) + (0 if old is None else old)
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.uint32).view(np.int32)


def c_matrix(registers: U32, dtype: str) -> Matrix:
    """Returns the accumulator `[16, columns]` from its registers.

    `f32` and `s32` have 4 registers per 8 columns; `f16` has 2 and is returned as `float32`.
    """
    if dtype != "f16":
        words = registers.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, -1)
        values: Matrix = words.view(np.float32) if dtype == "f32" else words.view(np.int32)
        return values
    words = registers.reshape(-1, 2, 8, 4).transpose(1, 2, 0, 3).reshape(16, -1)
    return words.view(np.float16).astype(np.float32)


def c_registers(matrix: Matrix, dtype: str) -> U32:
    """Rounds `[16, columns]` to `dtype` and distributes it over `[registers, 32]`.

    The inverse of `c_matrix`.
    """
    if dtype != "f16":
        words = matrix.astype(np.float32 if dtype == "f32" else np.int32, copy=False).view(np.uint32)
        tiles = words.reshape(2, 8, -1, 4, 2)
        return tiles.transpose(2, 0, 4, 1, 3).reshape(-1, 32)
    words = formats.f32_to_f16(matrix.astype(np.float32, copy=False)).view(np.uint32)
    return words.reshape(2, 8, -1, 4).transpose(2, 0, 1, 3).reshape(-1, 32)


def mma_sync(a: U32, b: U32, c: U32, a_type: str, b_type: str, d_type: str, saturate: bool = False) -> U32:
    """Computes D = A * B + C of one warp, rounded once (`mma.sync.m16n8kK`).

    K follows from the number of A registers.

    Args:
        a: A fragment.
        b: B fragment.
        c: C fragment, of `d_type`.
        a_type: Element type of A, a name of `formats.ELEMENT_BYTES`.
        b_type: Element type of B.
        d_type: `f32`, `f16` or `s32`.
        saturate: Whether an integer D saturates.

    Returns:
        D fragment.
    """
    left = formats.widen(a_matrix(a, formats.ELEMENT_BYTES[a_type]), a_type).astype(np.float64)
    right = formats.widen(b_matrix(b, formats.ELEMENT_BYTES[b_type]), b_type).astype(np.float64)
    with np.errstate(all="ignore"):
        return c_registers(add(left @ right.T, c_matrix(c, d_type), d_type, saturate), d_type)


def scale_factors(words: U32, first: int, lanes: int, byte: int, count: int, kind: str) -> F32:
    """Returns the factors of A's rows (`lanes` 2) or B's columns (`lanes` 1), `float32 [8 * lanes, count]`.

    Args:
        words: Operand, `uint32 [32]`.
        first: Lane of every four that holds the factors of row g; the next lane holds those of A's rows g +
            8.
        lanes: Number of lanes of every four that are read.
        byte: Byte of the first block's factor.
        count: Blocks along K.
        kind: `ue8m0` or `ue4m3`.
    """
    held = words.reshape(8, 4)[:, first : first + lanes].T.reshape(-1)
    codes = np.ascontiguousarray(held).view(np.uint8).reshape(-1, 4)[:, byte : byte + count]
    return formats.ue8m0_to_f32(codes) if kind == "ue8m0" else formats.widen(codes, "e4m3")


def mma_sync_scaled(
    a: U32, b: U32, c: U32, a_type: str, b_type: str, scale_a: F32, scale_b: F32, packed: bool
) -> U32:
    """Computes a block-scaled `mma.sync.m16n8kK` with float32 accumulators.

    Args:
        a: A fragment.
        b: B fragment.
        c: C fragment.
        a_type: Element type of A.
        b_type: Element type of B.
        scale_a: Factors `[16, blocks]`.
        scale_b: Factors `[8, blocks]`.
        packed: Whether a byte holds two elements, the first in its low half.

    Returns:
        D fragment.
    """

    def scaled(codes: Bits, kind: str, factors: F32) -> NDArray[np.float64]:
        if packed:
            codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
        values = formats.widen(codes, kind).astype(np.float64)
        return values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)

    left, right = scaled(a_matrix(a, 1), a_type, scale_a), scaled(b_matrix(b, 1), b_type, scale_b)
    with np.errstate(all="ignore"):
        return c_registers(add(left @ right.T, c_matrix(c, "f32"), "f32"), "f32")


def ldmatrix(rows: Bits, trans: bool) -> U32:
    """Returns the registers of `ldmatrix.m8n8.x{num}.b16`.

    Args:
        rows: The 16-byte rows read, any dtype, `num * 8 * 16` bytes: matrix i is addressed by lanes 8 i to 8
            i + 7.
        trans: Whether the instruction has `.trans`.

    Returns:
        `uint32 [num, 32]`.
    """
    matrices = np.ascontiguousarray(rows).reshape(-1).view(np.uint16).reshape(-1, 8, 8)
    if trans:
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    return matrices.view(np.uint32).reshape(-1, 32)


def stmatrix(registers: U32, trans: bool) -> NDArray[np.uint16]:
    """Returns the rows `[num, 8, 8]` (16 bytes each) that `stmatrix.m8n8.x{num}.b16` writes."""
    matrices = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrices.transpose(0, 2, 1)) if trans else matrices


def ldmatrix_bytes(rows: Bits) -> U32:
    """Returns the registers `[2 * num, 32]` of `ldmatrix.m16n16.x{num}.trans.b8`.

    `rows` contains `num * 16` rows of 16 bytes.
    """
    matrices = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 4, 4, 2, 8)
    return np.ascontiguousarray(matrices.transpose(0, 3, 4, 1, 2)).view(np.uint32).reshape(-1, 32)


def stmatrix_bytes(registers: U32) -> NDArray[np.uint8]:
    """Returns the rows `uint8 [num, 8, 16]` that `stmatrix.m16n8.x{num}.trans.b8` writes."""
    lanes = np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 8, 4, 2, 2)
    return np.ascontiguousarray(lanes.transpose(0, 2, 4, 3, 1)).reshape(-1, 8, 16)
