"""Rounding by the book, in rational arithmetic: what the emulator's floats are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A binary format: bits of its significand, exponents of its least bit and of its top bit."""

    bits: int
    lowest: int
    highest: int

    @property
    def largest(self) -> Fraction:
        return (2 - Fraction(1, 1 << self.bits - 1)) * Fraction(2) ** self.highest


F16, BF16, TF32, F32, F64 = (
    Format(11, -24, 15),
    Format(8, -133, 127),
    Format(11, -136, 127),
    Format(24, -149, 127),
    Format(53, -1074, 1023),
)


def _top(x: Fraction) -> int:
    """Exponent of the top bit."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def rounded(x: Fraction, to: Format, mode: str) -> float:
    """A number that is not zero in a format: `rn`, `rna`, `rz`, `rm` or `rp`, overflow as in IEEE 754."""
    size, minus = abs(x), x < 0
    unit = Fraction(2) ** max(_top(size) - to.bits + 1, to.lowest)
    whole, rest = divmod(size / unit, 1)
    outward = {"rz": False, "rm": minus, "rp": not minus}.get(mode)
    if outward is None:
        half = Fraction(1, 2)
        up = rest > half or rest == half and (mode == "rna" or whole % 2 == 1)
    else:
        up = outward and rest > 0
    out = (whole + up) * unit
    if out > to.largest:
        return math.copysign(float(to.largest) if outward is False else math.inf, -1 if minus else 1)
    return math.copysign(float(out), -1 if minus else 1)


def exactly(function: Callable[..., Fraction], *values: float) -> Fraction | None:
    """The exact result of finite operands; `None` where IEEE's rules for infinities, NaN and zeros decide."""
    if not all(map(math.isfinite, values)):
        return None
    try:
        return function(*map(Fraction, values)) or None
    except (ZeroDivisionError, ValueError):
        return None


def root(x: Fraction) -> Fraction:
    """A square root to 200 bits, and beyond these on the right side of everything."""
    if x < 0:
        raise ValueError("no root")
    scaled = x * Fraction(4) ** 300
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(whole) ** 2 != scaled
    return (whole + Fraction(inexact, 2)) / Fraction(2) ** 300


def expected(
    function: Callable[..., Fraction], ieee: Callable[..., float], to: Format, mode: str, *columns: np.ndarray
) -> np.ndarray:
    """Each rounded result as float64; `ieee` decides of what is not finite, and of zeros."""
    out = []
    for values in zip(*(c.astype(np.float64).tolist() for c in columns), strict=True):
        exact = exactly(function, *values)
        with np.errstate(all="ignore"):
            out.append(float(ieee(*map(np.float64, values))) if exact is None else rounded(exact, to, mode))
    return np.array(out)


def same(got: np.ndarray, want: np.ndarray, what: object = "") -> None:
    """Compares values and the signs of zeros; any NaN equals another."""
    got = got.astype(np.float64)
    np.testing.assert_array_equal(got, want, err_msg=str(what))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number], err_msg=f"signs: {what}")
