"""Bit-field functions of PTX 9.7.1, lane by lane: rare, so simple beats fast."""

from __future__ import annotations

from typing import Any

from overlap_gemm.emulator.ptx.lanes import MASK, Value, _each


def popc(a: Value, width: int, sign: bool) -> Value:
    """`popc`: number of one bits."""
    return _each(int.bit_count, 32, a)


def clz(a: Value, width: int, sign: bool) -> Value:
    """`clz`: number of leading zeros."""
    return _each(lambda x: width - x.bit_length(), 32, a)


def brev(a: Value, width: int, sign: bool) -> Value:
    """`brev`: bits in reverse order."""
    return _each(lambda x: int(f"{x:0{width}b}"[::-1], 2), width, a)


def bfe(a: Value, position: Value, length: Value, width: int, sign: bool) -> Value:
    """`bfe`: a bit field, sign-extended for signed types (its sign is clamped to the register's top bit)."""

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
    """`bfi`: inserts the low bits of `a` into `b`."""

    def insert(x: int, y: int, pos: int, n: int) -> int:
        hole = ((1 << (n & 0xFF)) - 1) << (pos & 0xFF) & MASK[width]
        return y & ~hole | x << (pos & 0xFF) & hole

    return _each(insert, width, a, b, position, length)


def bfind(a: Value, width: int, sign: bool, shift: bool) -> Value:
    """`bfind`: the most significant bit that is not a copy of the sign; -1 if there is none."""

    def find(x: int) -> int:
        if sign and x >> (width - 1):
            x ^= MASK[width]
        top = x.bit_length() - 1
        return (width - 1 - top if shift and top >= 0 else top) & MASK[32]

    return _each(find, 32, a)


def prmt(a: Value, b: Value, selector: Value) -> Value:
    """`prmt.b32`: picks bytes of the pair {b, a}; bit 3 of a selector replicates the byte's sign."""

    def permute(x: int, y: int, s: int) -> int:
        source, out = x | y << 32, 0
        for n in range(4):
            pick = s >> (4 * n) & 0xF
            byte = source >> (8 * (pick & 7)) & 0xFF
            out |= ((0xFF if byte & 0x80 else 0) if pick & 8 else byte) << (8 * n)
        return out

    return _each(permute, 32, a, b, selector)


FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (popc, clz, brev, bfe, bfi, bfind, prmt)}
