"""Exact rounding of fused multiply-add, of directed modes and of integers.

Rounding twice can differ from rounding once, unless the first rounding is *to odd*. Rounding to odd replaces
an inexact value by the neighbour whose last bit is 1. That neighbour is no tie of a format with two bits
less, and it is on the correct side of each number of that format. So doubles rounded to odd carry exact sums
to `float32`, and `float32` rounded to odd carries them to 16 bits.
"""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from typing import Any

import numpy as np

from cute_emulator.numbers.lanes import DTYPE, SIGNED, Value

Number = Any  # np.float32 / np.float64, scalar or array
f32, f64 = np.float32, np.float64
_BEYOND, _TIE = np.uint64(35), (1 << 63).to_bytes(8, "little")
_ONE = np.uint64(1)
_BELOW = np.uint64((1 << 11) - 1)


def unwrapped(x: Any) -> Number:
    """Returns a 0-d array as a scalar, other arrays unchanged."""
    return x if x.ndim else x[()]


def sum_to_odd(a: Number, b: Number) -> Number:
    """Returns `a + b` of doubles, rounded to odd."""
    a, b = np.asarray(a, f64), np.asarray(b, f64)
    total = np.asarray(a + b)
    other = total - a
    error = (a - (total - other)) + (b - other)  # exactly what `total` lacks
    bits = total.view(np.uint64)
    outward = (error > 0) == (total > 0)
    odd: Any = np.where(outward, bits + _ONE, bits - _ONE)
    wrong = ((error > 0) | (error < 0)) & (bits & _ONE == 0)
    return unwrapped(np.asarray(np.where(wrong, odd, bits)).view(f64))


def to_odd32(x: Number) -> Number:
    """Converts a double to a single, rounded to odd."""
    y = np.asarray(directed(x, "rz"))
    bits = y.view(np.uint32)
    return unwrapped(np.asarray(bits | (y != x).astype(np.uint32)).view(f32))


def fma32(a: Number, b: Number, c: Number) -> Number:
    """Returns `a * b + c` (`fma.rn.f32`).

    The product is exact in double. The sum in double is exact too, or it is far from a tie of two singles.
    Ties below the normal singles are not handled: there a product that ends beyond 2**-202 could matter.
    """
    total = np.multiply(a, b, dtype=f64) + c
    if _TIE in (total.view(np.uint64) << _BEYOND).tobytes():  # the bits that a single does not keep
        total = sum_to_odd(np.multiply(a, b, dtype=f64), c)
    return total.astype(f32)


def fma_directed(a: Number, b: Number, c: Number, mode: str) -> Number:
    """Returns `a * b + c` with directed rounding (`fma.{rz,rm,rp}.f32`)."""
    return add_directed(np.multiply(a, b, dtype=f64), c, mode)


def fma_to_odd(a: Number, b: Number, c: Number) -> Number:
    """Returns `a * b + c` as a single rounded to odd, the input of a rounding to 16 bits."""
    return to_odd32(sum_to_odd(np.multiply(a, b, dtype=f64), c))


def fma64(a: Number, b: Number, c: Number) -> Number:
    """Returns `a * b + c` of doubles (`fma.rn.f64`)."""
    a, b, c = np.broadcast_arrays(a, b, c)
    each = [_fma64(*map(float, xs)) for xs in zip(a.flat, b.flat, c.flat, strict=True)]
    return unwrapped(np.array(each, f64).reshape(a.shape))


def _fma64(a: float, b: float, c: float) -> float:
    if not (isfinite(a) and isfinite(b) and isfinite(c)):
        return float(f64(a) * f64(b) + f64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return float(f64(a) * f64(b) + f64(c))  # has the sign of the zero
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def directed(x: Number, mode: str) -> Number:
    """Rounds a double to single towards zero (rz), down (rm) or up (rp)."""
    y = np.asarray(x, f64).astype(f32)
    if mode == "rz":
        wrong, to = np.abs(y) > np.abs(x), f32(0)
    elif mode == "rm":
        wrong, to = y > x, f32(-np.inf)
    else:
        wrong, to = y < x, f32(np.inf)
    out: Any = np.where(wrong, np.nextafter(y, to), y)
    return unwrapped(out.astype(f32))


def add_directed(a: Number, b: Number, mode: str) -> Number:
    """Returns `a + b` with directed rounding (`add.{rz,rm,rp}.f32`).

    `a` may be a product that a double holds. With rounding down, a difference that vanishes is -0.
    """
    out = np.asarray(directed(sum_to_odd(a, b), mode))
    if mode == "rm":
        vanishes = (out == 0) & (np.signbit(a) != np.signbit(b))
        out = np.asarray(np.where(vanishes, f32(-0.0), out))
    return unwrapped(out)


def int_to_odd(value: Value, width: int, sign: bool) -> Number:
    """Converts an integer to a double, rounded to odd; at most 32 bits are exact."""
    n: Any = np.asarray(value, DTYPE[width])
    if width < 64:
        return unwrapped((n.view(SIGNED[width]) if sign else n).astype(f64))
    negative = (n >> np.uint64(63) != 0) & sign
    n = np.where(negative, np.uint64(0) - n, n)
    sticky = ((n & _BELOW) != 0).astype(np.uint64) << np.uint64(11)
    exact: Any = np.where(n >> np.uint64(53) != 0, n & ~_BELOW | sticky, n).astype(f64)
    return unwrapped(np.where(negative, -exact, exact))


_DIGITS = {"f16": (10, -24, 13), "bf16": (7, -133, 16)}
"""Bits after the leading one, exponent of the least bit, random bits that `.rs` takes."""


def stochastic(x: Number, random: Any, kind: str) -> Number:
    """Rounds singles to `f16` or `bf16` values: away from zero if the random bits carry (`.rs`).

    The result is singles. The random bits are added to the first bits that the format does not keep. The
    caller that packs the result handles values beyond the format's range.
    """
    digits, least, taken = _DIGITS[kind]
    size = np.abs(np.asarray(x, f32).astype(f64))
    with np.errstate(invalid="ignore"):
        last = np.maximum(np.frexp(size)[1] - 1 - digits, least)
        units = np.ldexp(size, -last)
        integral = np.floor(units)
        carry = np.floor(np.ldexp(units - integral, taken)) + random >= 1 << taken
        return np.copysign(np.ldexp(integral + carry, last), x).astype(f32)
