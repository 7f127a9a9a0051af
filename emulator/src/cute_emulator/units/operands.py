"""Elements of a tensor-core operand: packing of 4- and 6-bit formats, and integers.

- Location (PTX ISA 9.7.16.3)                 16 elements of 4 bits         of 6 bits
- shared memory, kinds mxf4 and mxf4nvf4      8 bytes, lower half first
- shared memory, kinds f8f6f4 and mxf8f6f4    16 bytes, the first 8 used    the first 12 used
- tensor memory, kinds f8f6f4 and mxf8f6f4    a byte each, bits 5..2        a byte each, bits 6..1

A TMA load of a padded type writes the chunks of 16 bytes (`units.tma.PADDED`). The bits within a byte of
tensor memory are those that an example of CuTe DSL states (`tcgen05.cp` with decompression).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers import formats
from cute_emulator.numbers.arrays import F32, Bits

BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}
"""Bits of the formats that are narrower than a byte."""


def split_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the 4-bit codes of bytes, the lower half first: `[..., n]` to `[..., 2 n]`."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & np.uint8(0xF)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def split_chunks(chunks: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Returns the 4- or 6-bit codes of padded chunks, 16 in each 16 bytes: `[..., n]` to `[..., n]`."""
    groups = np.ascontiguousarray(chunks).reshape(*chunks.shape[:-1], -1, 16)
    if bits == 4:
        codes = split_nibbles(groups[..., :8])
    else:
        words = groups[..., :12].reshape(*groups.shape[:-1], 4, 3).astype(np.uint32)
        word = words[..., 0] | words[..., 1] << np.uint32(8) | words[..., 2] << np.uint32(16)
        shifts = np.arange(0, 24, 6, dtype=np.uint32)
        codes = (word[..., None] >> shifts & np.uint32(0x3F)).astype(np.uint8)
    return codes.reshape(chunks.shape)


def hold(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Returns codes of 4 or 6 bits at their bit positions in the bytes of tensor memory."""
    return codes << np.uint8((8 - bits) // 2)


def from_smem(tile: Bits, kind: str, packed: bool, mn_major: bool) -> F32:
    """Returns the values of a tile gathered from shared memory.

    Args:
        tile: Element patterns `[rows, k]`; for formats narrower than a byte the bytes that hold them.
        kind: Element type.
        packed: Whether a byte holds two 4-bit elements.
        mn_major: Whether rows rather than k are contiguous.
    """
    if kind not in BITS:
        return formats.widen(tile, kind)
    if packed:
        return formats.widen(split_nibbles(tile), kind)
    lines = tile.T if mn_major else tile
    codes = split_chunks(lines, BITS[kind])
    return formats.widen(codes.T if mn_major else codes, kind)


def from_tmem(cells: NDArray[np.uint32], kind: str, packed: bool) -> F32:
    """Returns the values of A in tensor memory from its cells `[rows, columns]`."""
    elements = np.ascontiguousarray(cells).view(f"u{formats.ELEMENT_BYTES[kind]}")
    if kind in BITS:
        if packed:
            elements = split_nibbles(elements)
        else:
            elements = elements >> np.uint8((8 - BITS[kind]) // 2)
    return formats.widen(elements, kind)
