"""Accumulation of Hopper's tensor cores: every term is cut to one grid, which the largest term sets.

Measured on an H200; the model equals the device bit for bit for every value that was compared
(`emulator/tests/test_tensor_cores.py`). For one instruction and one element of D, with products ``a[k] *
b[k]`` of all its K and the accumulator ``c``:

1. ``E``: the largest of ``exponent(a[k]) + exponent(b[k])`` and ``exponent(c)``. A product's exponent is the
   sum of its factors' exponents, also where the product of their significands is 2 or more.
2. Every product and ``c`` are cut toward zero to multiples of ``2 ** (E - fraction)``, then added exactly.
3. The sum is cut toward zero to ``kept`` bits after its leading one.

The result is the ``c`` of the next instruction. All K of an instruction are one sum, in no order.

Not measured:

- the exponent of a subnormal factor of the largest product (the model treats the factor as if it were normal)
- products below fp32's normal range, and sums beyond fp32's range
- D in f16
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers.arrays import F32

_LEAST_POWER = 2.0**-126


class Width(NamedTuple):
    """Number of bits of an accumulation.

    Attributes:
        fraction: Bits of a term after the leading one of the largest term.
        kept: Bits of the sum after its leading one.
    """

    fraction: int
    kept: int


HOPPER: dict[str, Width] = {
    "e4m3": Width(13, 13),
    "e5m2": Width(13, 13),
    "f16": Width(25, 23),
    "bf16": Width(25, 23),
    "tf32": Width(25, 23),
}
"""Widths of sm_90's wgmma with D in fp32, by the type of A."""

BLACKWELL: dict[str, Width] = dict.fromkeys(("e4m3", "e5m2", "f16", "bf16"), Width(25, 23))
"""Assumed widths of sm_100's tcgen05.mma with D in fp32, by the type of A, also scaled; not measured."""


def aligned_sum(a: F32, b: F32, c: F32, width: Width) -> F32:
    """Returns ``c + a @ b.T`` of one instruction.

    Args:
        a: ``[rows, k]``, exact in fp32.
        b: ``[columns, k]``.
        c: ``[rows, columns]``.
        width: Bits that the accumulation keeps.
    """
    # Terms are integers of ``fraction + 2`` bits on the grid: fp32 adds 2 ** 7 such exactly. K is the first
    # axis, so that each step is one loop over all of D.
    kind = np.float32 if width.fraction <= 14 else np.float64
    left, right = (np.ascontiguousarray(x.T, kind) for x in (a, b))
    left, right, old = left[:, :, None], right[:, None], c.astype(kind)
    terms = _power(left) * _power(right)
    largest = np.maximum(np.maximum(terms.max(0), _power(old)), kind(_LEAST_POWER))
    grid = largest * kind(2.0**-width.fraction)
    np.multiply(left, right, out=terms)
    np.trunc(np.divide(terms, grid, out=terms), out=terms)
    total = terms.sum(0) + np.trunc(old / grid)
    step = np.maximum(_power(total) * kind(2.0**-width.kept), kind(1))
    result = (np.trunc(total / step) * step * grid).astype(np.float32)
    if all(np.isfinite(operand).all() for operand in (a, b, c)):
        return result
    plain = (left * right).sum(0) + old
    return np.where(np.isfinite(plain), result, plain.astype(np.float32))


def add_steps(c: F32 | None, a: F32, b: F32, k: int, width: Width) -> F32:
    """Returns ``c + a @ b.T`` of a sequence of instructions: `aligned_sum` of each ``k`` elements.

    Args:
        c: ``[rows, columns]``; None: zeros.
        a: ``[rows, steps * k]``, exact in fp32.
        b: ``[columns, steps * k]``.
        k: Elements of K of one instruction.
        width: Bits that the accumulation keeps.
    """
    total = np.zeros((len(a), len(b)), np.float32) if c is None else c
    for first in range(0, a.shape[1], k):
        step = slice(first, first + k)
        total = aligned_sum(a[:, step], b[:, step], total, width)
    return total


def _power(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Returns the power of two of a normal number's leading bit; 0 for 0 and for subnormal numbers."""
    bits, exponent = (np.uint32, 0xFF << 23) if x.dtype == np.float32 else (np.uint64, 0x7FF << 52)
    return (x.view(bits) & bits(exponent)).view(x.dtype)
