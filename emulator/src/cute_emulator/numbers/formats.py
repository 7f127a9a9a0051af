"""Exact number formats of PTX, vectorised over arrays of any shape.

A value is either a bit pattern (an unsigned integer array) or a `float32` array. Conversions to narrower
formats take `float32`, conversions from them take the bit pattern, so that a chain of instructions copies as
little as possible. Rounding and special values follow the PTX ISA, section 9.7.9.22 (`cvt`); no function
warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers.arrays import F32, Bits

# NumPy scalars made once: building one costs as much as an operation on 32 lanes.
_1, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)
_HALF_BF16, _HIGH, _LOW = np.uint32(0x7FFF), np.uint32(0xFFFF0000), np.uint32(0xFFFF)

CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)
CANONICAL_NAN_16 = np.uint16(0x7FFF)


def as_f32(bits: Bits) -> F32:
    """Views 32-bit patterns as `float32` without copying (a copy only where the input is not `uint32`)."""
    return np.asarray(bits, np.uint32).view(np.float32)


def as_u32(values: F32) -> NDArray[np.uint32]:
    """Views `float32` values as their bit patterns without copying."""
    return np.asarray(values, np.float32).view(np.uint32)


# -- bf16 ------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Bits) -> F32:
    """Widens bf16 patterns (in the low 16 bits of any unsigned type) to `float32`."""
    return (np.asarray(bits).astype(np.uint32) << _16).view(np.float32)


def f32_to_bf16(x: F32, rounding: str = "rn", satfinite: bool = False) -> NDArray[np.uint16]:
    """Rounds to bf16: `rn` (nearest even) or `rz`; `satfinite` clamps to the largest. NaN becomes 0x7FFF."""
    bits = as_u32(x)
    if rounding == "rn":
        out = ((bits + (((bits >> _16) & _1) + _HALF_BF16)) >> _16).astype(np.uint16)
    elif rounding == "rz":
        out = (bits >> _16).astype(np.uint16)
    else:
        raise ValueError(f"{rounding=} is not a bf16 rounding; use 'rn' or 'rz'")
    if satfinite:
        out = _finite(out, 0x7F80)
    return _canonical_nan(out, x, CANONICAL_NAN_16)


def _finite(out: Bits, infinity: int) -> Bits:
    """Clamps patterns beyond the largest finite number to that number."""
    sign = out & out.dtype.type(1 << 8 * out.itemsize - 1)
    return np.where(out ^ sign >= infinity, sign | out.dtype.type(infinity - 1), out)


# -- f16 -------------------------------------------------------------------------------------------


def f16_to_f32(bits: Bits) -> F32:
    """Widens f16 patterns (in the low 16 bits of any unsigned type) to `float32`."""
    return np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)


def f32_to_f16(x: F32, rounding: str = "rn", satfinite: bool = False) -> NDArray[np.uint16]:
    """Rounds to f16: `rn` or `rz`; `satfinite` clamps to +-65504. NaN becomes 0x7FFF."""
    if rounding not in ("rn", "rz"):
        raise ValueError(f"{rounding=} is not an f16 rounding; use 'rn' or 'rz'")
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    out = half.view(np.uint16)
    if rounding == "rz":
        # Finite magnitudes order as their patterns do, so one step down undoes a rounding away from zero.
        away = np.abs(half.astype(np.float32)) > np.abs(x)
        out = out - away.astype(np.uint16)
    if satfinite:
        out = _finite(out, 0x7C00)
    return _canonical_nan(out, x, CANONICAL_NAN_16)


# -- packed pairs ----------------------------------------------------------------------------------


def pack16(lo: Bits, hi: Bits) -> NDArray[np.uint32]:
    """Packs two 16-bit patterns into one 32-bit register, `lo` in bits 15..0."""
    return np.asarray(lo).astype(np.uint32) | (np.asarray(hi).astype(np.uint32) << _16)


def unpack16(word: Bits) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Splits 32-bit registers into their low and high 16-bit patterns."""
    word = np.asarray(word, np.uint32)
    return word.astype(np.uint16), (word >> _16).astype(np.uint16)


def f32_to_bf16x2(hi: F32, lo: F32) -> NDArray[np.uint32]:
    """Rounds two singles to bf16 and packs them, `hi` in the upper half (`cvt.rn.bf16x2.f32 d, hi, lo`)."""
    low, high = as_u32(lo), as_u32(hi)
    low = (low + (((low >> _16) & _1) + _HALF_BF16)) >> _16
    high = (high + (((high >> _16) & _1) + _HALF_BF16)) & _HIGH
    out: NDArray[np.uint32] = low | high
    if np.isnan(lo).any() or np.isnan(hi).any():
        out = np.where(np.isnan(lo), (out & _HIGH) | _HALF_BF16, out)
        out = np.where(np.isnan(hi), (out & _LOW) | np.uint32(0x7FFF0000), out)
    return out


def bf16x2_to_f32(word: Bits) -> tuple[F32, F32]:
    """Widens both halves of packed bf16 registers: `(low, high)`."""
    word = np.asarray(word, np.uint32)
    return (word << _16).view(np.float32), (word & _HIGH).view(np.float32)


def f32_to_f16x2(hi: F32, lo: F32, rounding: str = "rn", satfinite: bool = False) -> NDArray[np.uint32]:
    """Rounds two singles to f16 and packs them, `hi` in the upper half (`cvt.rn.f16x2.f32 d, hi, lo`)."""
    return pack16(f32_to_f16(lo, rounding, satfinite), f32_to_f16(hi, rounding, satfinite))


def f16x2_to_f32(word: Bits) -> tuple[F32, F32]:
    """Widens both halves of packed f16 registers: `(low, high)`."""
    low, high = unpack16(word)
    return f16_to_f32(low), f16_to_f32(high)


# -- tf32 ------------------------------------------------------------------------------------------


def f32_to_tf32(x: F32, rounding: str = "rna", satfinite: bool = False) -> F32:
    """Rounds to tf32 (10 mantissa bits), stored as `float32` with 13 zero bits.

    Args:
        x: Values.
        rounding: `rna` (nearest, ties away from zero), `rn` (nearest even) or `rz`. A tensor core applies
            `rz` to an operand whose low bits are not zero.
        satfinite: Whether values beyond the largest finite value are clamped to it.
    """
    bits = as_u32(x)
    if rounding == "rna":
        out = bits + np.uint32(0x1000)
    elif rounding == "rn":
        out = bits + (((bits >> _13) & _1) + np.uint32(0xFFF))
    elif rounding == "rz":
        out = bits
    else:
        raise ValueError(f"{rounding=} is not a tf32 rounding; use 'rna', 'rn' or 'rz'")
    if satfinite:
        out = _finite(out, 0x7F800000)
    return _canonical_nan(out & np.uint32(0xFFFFE000), x, CANONICAL_NAN_F32).view(np.float32)


# -- formats of eight bits and fewer ---------------------------------------------------------------


@dataclass(frozen=True)
class SmallFloat:
    """Float format of at most 8 bits, stored in the low bits of a byte.

    Attributes:
        name: PTX spelling.
        dtype: NumPy type of `ml_dtypes`.
        nan_code: Pattern that NaN converts to; in a format without NaN that of the largest finite value.
    """

    name: str
    dtype: np.dtype[Any]
    nan_code: int

    @cached_property
    def bits(self) -> int:
        """Returns the width of a pattern in bits."""
        return int(ml_dtypes.finfo(self.dtype).bits)

    @cached_property
    def max(self) -> np.float32:
        """Returns the largest finite value."""
        return np.float32(ml_dtypes.finfo(self.dtype).max)

    def decode(self, bits: Bits) -> F32:
        """Widens patterns (one byte each, higher bits ignored) to `float32`, exactly."""
        bits = np.asarray(bits, np.uint8)
        if self.bits < 8:
            bits = bits & np.uint8((1 << self.bits) - 1)
        return bits.view(self.dtype).astype(np.float32)

    def encode(self, x: F32) -> NDArray[np.uint8]:
        """Rounds to nearest even, clamping to the largest finite value, inf included (`cvt.rn.satfinite`)."""
        x = np.asarray(x, np.float32)
        with np.errstate(invalid="ignore"):  # NaN is replaced below
            out = np.clip(x, -self.max, self.max).astype(self.dtype).view(np.uint8)
        return _canonical_nan(out, x, np.uint8(self.nan_code))


SMALL_FLOATS = {
    name: SmallFloat(name, np.dtype(getattr(ml_dtypes, dtype)), nan_code)
    for name, dtype, nan_code in (
        ("e4m3", "float8_e4m3fn", 0x7F),
        ("e5m2", "float8_e5m2", 0x7F),
        ("e2m3", "float6_e2m3fn", 0x1F),
        ("e3m2", "float6_e3m2fn", 0x1F),
        ("e2m1", "float4_e2m1fn", 0x7),
    )
}


def ue8m0_to_f32(bits: Bits) -> F32:
    """Widens powers of two, `2**(bits - 127)`; 0xFF is NaN."""
    return np.asarray(bits, np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def f32_to_ue8m0(x: F32, rounding: str, satfinite: bool = True) -> NDArray[np.uint8]:
    """Returns the power of two of a magnitude: `rz` (not above it) or `rp` (not below it). NaN becomes 0xFF.

    The result is that of `cuda_fp8.h` where there is no instruction: the sign is dropped, and values of at
    most 2**-127 become 2**-127.

    Raises:
        ValueError: `rounding` is neither `rz` nor `rp`.
    """
    if rounding not in ("rz", "rp"):
        raise ValueError(f"{rounding=} is not a ue8m0 rounding; use 'rz' or 'rp'")
    magnitude = as_u32(x) & np.uint32(0x7FFFFFFF)
    code = magnitude >> np.uint32(23)
    if rounding == "rp":
        up = ((magnitude & np.uint32(0x7FFFFF)) != 0) & (magnitude > np.uint32(0x400000))
        code = code + up.astype(np.uint32)
    code = np.minimum(code, np.uint32(0xFE if satfinite else 0xFF)).astype(np.uint8)
    return _canonical_nan(code, np.asarray(x, np.float32), np.uint8(0xFF))


def widen(bits: Bits, kind: str) -> F32:
    """Widens operand patterns of a tensor instruction to `float32`.

    Args:
        bits: element patterns, one per array element.
        kind: `bf16`, `f16`, `tf32` (low 13 bits ignored), `f32`, `u8`, `s8`, or the name of a small format.
    """
    if kind == "bf16":
        return bf16_to_f32(bits)
    if kind == "f16":
        return f16_to_f32(bits)
    if kind == "tf32":
        return (np.asarray(bits, np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "f32":
        return as_f32(bits)
    if kind in INTEGERS:
        return np.asarray(bits).view(INTEGERS[kind]).astype(np.float32)
    return SMALL_FLOATS[kind].decode(bits)


INTEGERS = {"u8": np.uint8, "s8": np.int8}
ELEMENT_BYTES = {
    "bf16": 2,
    "f16": 2,
    "tf32": 4,
    "f32": 4,
    "e4m3": 1,
    "e5m2": 1,
    "e2m3": 1,
    "e3m2": 1,
    "e2m1": 1,
    "u8": 1,
    "s8": 1,
}


# -- saturation and integers -----------------------------------------------------------------------


def saturate(x: F32) -> F32:
    """Clamps a float result to [0, 1]; NaN becomes +0 (`.sat`)."""
    with np.errstate(invalid="ignore"):
        return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0)).astype(np.float32)


def relu(x: F32) -> F32:
    """Replaces negative values by +0; NaN stays NaN (`.relu`)."""
    with np.errstate(invalid="ignore"):
        return np.where(x <= 0, np.float32(0), x).astype(np.float32)


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_int(x: NDArray[np.floating], bits: int, signed: bool, rounding: str) -> Bits:
    """Converts to an integer of `bits` width, as its unsigned pattern; out of range clamps.

    Args:
        x: `float32` or `float64` values.
        bits: 8, 16, 32 or 64.
        signed: whether the destination is `.sN` rather than `.uN`.
        rounding: `rni`, `rzi`, `rmi` or `rpi`.

    Returns:
        Patterns of dtype `uint{bits}`. NaN gives 0 between types of at most 32 bits, and the top bit alone
        where either side has 64 (PTX ISA, `cvt`).
    """
    x = np.asarray(x)
    lo, hi = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    with np.errstate(invalid="ignore"):
        rounded = _ROUND[rounding](x.astype(np.float64))
        nan = np.isnan(rounded)
        # 2**63 and 2**64 are floats, 2**63-1 is not: decide saturation on the float side.
        over, under = rounded >= float(hi), rounded <= float(lo)
        inside = np.where(nan | over | under, 0.0, rounded)
    wide = inside.astype(np.int64 if signed else np.uint64)
    out = wide.astype(f"int{bits}" if signed else f"uint{bits}").view(f"uint{bits}")
    mask = (1 << bits) - 1
    out = np.where(over, np.array(hi & mask, out.dtype), np.where(under, np.array(lo & mask, out.dtype), out))
    of_nan = 1 << (bits - 1) if bits == 64 or x.dtype == np.float64 else 0
    return np.where(nan, np.array(of_nan, out.dtype), out)


def clamp_int(x: NDArray[np.integer], bits: int, signed: bool) -> Bits:
    """Clamps integers to the destination type; returns the unsigned pattern (`cvt.sat`)."""
    lo, hi = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    info = np.iinfo(x.dtype)
    clamped = np.clip(x, max(lo, int(info.min)), min(hi, int(info.max)))
    return clamped.astype(f"int{bits}" if signed else f"uint{bits}").view(f"uint{bits}")


def _canonical_nan(out: Bits, x: F32, nan: np.unsignedinteger) -> Bits:
    is_nan = np.isnan(x)
    return np.where(is_nan, nan, out) if is_nan.any() else out
