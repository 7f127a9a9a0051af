"""Bit-field functions of PTX 9.7.1 and dot products of bytes, computed lane by lane.

These instructions are rare: simple code is preferred to fast code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_emulator.numbers.lanes import MASK, Value, _each


def popc(a: Value, width: int, sign: bool) -> Value:
    """Returns the number of one bits (`popc`)."""
    return _each(int.bit_count, 32, a)


def clz(a: Value, width: int, sign: bool) -> Value:
    """Returns the number of leading zeros (`clz`)."""
    return _each(lambda x: width - x.bit_length(), 32, a)


def brev(a: Value, width: int, sign: bool) -> Value:
    """Returns the bits in reverse order (`brev`)."""
    return _each(lambda x: int(f"{x:0{width}b}"[::-1], 2), width, a)


def bfe(a: Value, position: Value, length: Value, width: int, sign: bool) -> Value:
    """Returns a bit field (`bfe`), sign-extended for signed types.

    The position of its sign is clamped to the register's top bit.
    """

    def field(x: int, pos: int, n: int) -> int:
        pos, n = pos & 0xFF, n & 0xFF
        out = x >> pos & ((1 << n) - 1) if pos < width else 0
        if not sign or n == 0:
            return out & MASK[width]
        if x >> min(pos + n - 1, width - 1) & 1:
            have = max(0, min(n, width - pos))
            out |= MASK[width] & ~((1 << have) - 1)
        return out & MASK[width]

    return _each(field, width, a, position, length)


def bfi(a: Value, b: Value, position: Value, length: Value, width: int, sign: bool) -> Value:
    """Returns `b` with the low bits of `a` inserted (`bfi`)."""

    def insert(x: int, y: int, pos: int, n: int) -> int:
        hole = ((1 << (n & 0xFF)) - 1) << (pos & 0xFF) & MASK[width]
        return y & ~hole | x << (pos & 0xFF) & hole

    return _each(insert, width, a, b, position, length)


def bfind(a: Value, width: int, sign: bool, shift: bool) -> Value:
    """Returns the position of the most significant bit that differs from the sign, or -1 (`bfind`)."""

    def find(x: int) -> int:
        if sign and x >> (width - 1):
            x ^= MASK[width]
        top = x.bit_length() - 1
        return (width - 1 - top if shift and top >= 0 else top) & MASK[32]

    return _each(find, 32, a)


def prmt(a: Value, b: Value, selector: Value) -> Value:
    """Returns selected bytes of {b, a} (`prmt.b32`); bit 3 of a selector replicates the byte's sign."""

    def permute(x: int, y: int, s: int) -> int:
        source, out = x | y << 32, 0
        for n in range(4):
            pick = s >> (4 * n) & 0xF
            byte = source >> (8 * (pick & 7)) & 0xFF
            out |= ((0xFF if byte & 0x80 else 0) if pick & 8 else byte) << (8 * n)
        return out

    return _each(permute, 32, a, b, selector)


def _elements(word: Value, size: int, sign: bool) -> Any:
    """Returns the parts of 32-bit patterns as `int64 [..., 4 / size]`."""
    patterns = np.asarray(word).astype(np.uint32)[..., None]
    return patterns.view(f"{'i' if sign else 'u'}{size}").astype(np.int64)


def _sum(products: Any, c: Value) -> Value:
    out: Any = (products.sum(-1) + np.asarray(c, np.int64)).astype(np.uint32)
    return int(out) if out.ndim == 0 else out


def dp4a(a: Value, b: Value, c: Value, a_sign: bool, b_sign: bool, high: bool) -> Value:
    """Returns the dot product of four bytes of `a` and four of `b`, added to `c` (`dp4a`)."""
    return _sum(_elements(a, 1, a_sign) * _elements(b, 1, b_sign), c)


def dp2a(a: Value, b: Value, c: Value, a_sign: bool, b_sign: bool, high: bool) -> Value:
    """Returns the dot product of two halves of `a` and two bytes of `b`, added to `c` (`dp2a`).

    Args:
        a: Two 16-bit integers.
        b: Four bytes.
        c: Addend.
        a_sign: Whether the halves of `a` are signed.
        b_sign: Whether the bytes of `b` are signed.
        high: Whether the upper two bytes of `b` are used, not the lower two.
    """
    right = _elements(b, 1, b_sign)
    return _sum(_elements(a, 2, a_sign) * (right[..., 2:] if high else right[..., :2]), c)


FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (popc, clz, brev, bfe, bfi, bfind, prmt, dp4a, dp2a)}
