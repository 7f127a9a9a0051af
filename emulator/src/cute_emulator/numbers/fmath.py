"""Floating-point functions of PTX 9.7.3 to 9.7.5 on `float32`/`float64` scalars and arrays.

The `.approx` functions are computed in double precision and rounded once: hardware differs in the last
bits, within the ISA's stated error. NaN payloads follow NumPy, except where a conversion makes the
canonical NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_emulator.numbers import formats
from cute_emulator.numbers.lanes import DTYPE, MASK, SIGNED, F, Value, high32, low32
from cute_emulator.numbers.rounding import (
    add_directed,
    directed,
    fma32,
    fma64,
    fma_directed,
    fma_to_odd,
    int_to_odd,
    stochastic,
    to_odd32,
    unwrapped,
)

Number = Any  # np.float32 / np.float64, scalar or array
f32, f64 = np.float32, np.float64
_HIGH = 0xFFFF0000


def ftz(x: Number) -> Number:
    """Flushes subnormal singles to zero of the same sign."""
    return flush(x, "f32")


_NORMAL = {"f32": f32(2.0**-126), "f16": f32(2.0**-14), "bf16": f32(2.0**-126)}


def flush(x: Number, kind: str) -> Number:
    """Flushes subnormal values of a format, stored as singles, to zero of the same sign."""
    small = np.abs(x) < _NORMAL[kind]
    if not np.count_nonzero(small):
        return x
    out: Any = np.where(small, np.copysign(f32(0), x), x)
    return unwrapped(out.astype(f32, copy=False))


def sat(x: Number) -> Number:
    """Clamps to [0, 1]; NaN becomes 0."""
    out = formats.saturate(np.asarray(x, f32))
    return unwrapped(out)


def fmin(a: Number, b: Number) -> Number:
    """Returns the minimum (`min`): a NaN operand is ignored, and -0 < +0."""
    return _signed_zero(np.fmin(a, b), a, b, np.logical_or)


def fmax(a: Number, b: Number) -> Number:
    """Returns the maximum (`max`): a NaN operand is ignored, and +0 > -0."""
    return _signed_zero(np.fmax(a, b), a, b, np.logical_and)


def fmin_nan(a: Number, b: Number) -> Number:
    """Returns the minimum (`min.NaN`): NaN if an operand is NaN, and -0 < +0."""
    return _signed_zero(np.minimum(a, b), a, b, np.logical_or)


def fmax_nan(a: Number, b: Number) -> Number:
    """Returns the maximum (`max.NaN`): NaN if an operand is NaN, and +0 > -0."""
    return _signed_zero(np.maximum(a, b), a, b, np.logical_and)


def _signed_zero(out: Any, a: Number, b: Number, negative: Any) -> Number:
    """Sets the sign of zeros from the signs of both operands: NumPy may return either zero."""
    zeros = out == 0
    if not np.count_nonzero(zeros) or not np.count_nonzero(zeros := zeros & (a == b)):
        return out
    zero = np.where(negative(np.signbit(a), np.signbit(b)), out.dtype.type(-0.0), out.dtype.type(0))
    fixed: Any = np.where(zeros, zero, out)
    return unwrapped(fixed.astype(out.dtype, copy=False))


def xorsign(out: Number, a: Number, b: Number) -> Number:
    """Applies `.xorsign` of `min` and `max`: the result's sign is the product of the operands' signs."""
    return unwrapped(np.asarray(np.copysign(out, np.where(np.signbit(a) != np.signbit(b), f32(-1), f32(1)))))


def _approx(f: Callable[[Any], Any]) -> Callable[[Number], Number]:
    return lambda x: f(x.astype(f64)).astype(f32)


ex2, lg2 = _approx(np.exp2), _approx(np.log2)
sin, cos, tanh = _approx(np.sin), _approx(np.cos), _approx(np.tanh)
rcp = _approx(np.reciprocal)
rsqrt = _approx(lambda x: 1.0 / np.sqrt(x))


def rcp64(x: Number) -> Number:
    """Returns the reciprocal (`rcp.rn.f64`)."""
    return f64(1.0) / x


def rsqrt64(x: Number) -> Number:
    """Returns the reciprocal square root (`rsqrt.approx.f64`)."""
    return f64(1.0) / np.sqrt(x)


def float_to_int(x: Number, bits: int, sign: bool, rounding: str) -> Value:
    """Converts a float to an integer, saturating (`cvt`)."""
    out = formats.float_to_int(x, bits, sign, rounding)
    return int(out) if out.ndim == 0 else out


def int_to_float(value: Value, width: int, sign: bool, double: bool) -> Number:
    """Converts an integer to a float (`cvt.rn`)."""
    target = f64 if double else f32
    if value.__class__ is int:
        number = value - (1 << width) if sign and value >> (width - 1) else value
        # The int is converted to single directly: one rounding, as in the instruction.
        return np.array(number, np.int64 if number < 0 else np.uint64).astype(target)[()]
    narrow = value.astype(DTYPE[width], copy=False)
    return (narrow.view(SIGNED[width]) if sign else narrow).astype(target)


def to_bits16(out: Any) -> Value:
    """Returns a 16-bit result as a register value."""
    return int(out) if np.ndim(out) == 0 else out


def unpack_half(value: Value, kind: str) -> Number:
    """Converts f16 or bf16 patterns to `float32`."""
    out = formats.widen(np.asarray(value, np.uint16), kind)
    return unwrapped(out)


def pack_half(x: Number, kind: str, rounding: str = "rn", satfinite: bool = False) -> Value:
    """Converts `float32` to f16 or bf16 patterns."""
    if kind == "bf16":
        return to_bits16(formats.f32_to_bf16(x, rounding, satfinite))
    return to_bits16(formats.f32_to_f16(x, rounding, satfinite))


def unpack2(word: Value, kind: str) -> tuple[Number, Number]:
    """Returns the (low, high) halves of an f16x2 or bf16x2 register as `float32`."""
    word = np.asarray(word, np.uint32)
    lo, hi = formats.bf16x2_to_f32(word) if kind.startswith("bf16") else formats.f16x2_to_f32(word)
    return (lo, hi) if word.ndim else (lo[()], hi[()])


def bf16_low(word: Value) -> Number:
    """Returns the bf16 in the low half of a 32-bit register as `float32`."""
    return F(word << 16 & MASK[32]) if word.__class__ is int else (word << 16).view(f32)


def bf16_high(word: Value) -> Number:
    """Returns the bf16 in the high half of a 32-bit register as `float32`."""
    return F(word & _HIGH) if word.__class__ is int else (word & _HIGH).view(f32)


def bf16_run(words: tuple[Value, ...], lows: int) -> list[Number]:
    """Returns `bf16_low` of the first `lows` words and `bf16_high` of the others, as one operation."""
    if int in map(type, words):
        return [*map(bf16_low, words[:lows]), *map(bf16_high, words[lows:])]
    block = np.concatenate(words).reshape(len(words), -1)
    block[:lows] <<= 16
    block[lows:] &= _HIGH
    return list(block.view(f32))


def pack2(
    hi: Number, lo: Number, kind: str, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> Value:
    """Packs two singles or bit patterns into a register (`cvt.{rn,rz}.{bf16x2,f16x2}.f32`)."""
    hi, lo = _number(hi), _number(lo)
    if relu:
        hi, lo = formats.relu(hi), formats.relu(lo)
    if kind == "bf16x2" and rounding == "rn" and not satfinite:
        out: Any = formats.f32_to_bf16x2(hi, lo)
    else:
        convert = formats.f32_to_bf16 if kind == "bf16x2" else formats.f32_to_f16
        out = formats.pack16(convert(lo, rounding, satfinite), convert(hi, rounding, satfinite))
    return int(out) if np.ndim(out) == 0 else out if out.shape else int(out)


def pack2_random(
    hi: Number, lo: Number, random: Value, kind: str, relu: bool = False, satfinite: bool = False
) -> Value:
    """Packs two singles with stochastic rounding (`cvt.rs.{bf16x2,f16x2}.f32`).

    The upper half of the random bits rounds `hi`, the lower half `lo`. For f16 the low 13 bits of a half
    count.
    """
    bits = np.asarray(random, np.uint32) & np.uint32(0xFFFFFFFF if kind == "bf16x2" else 0x1FFF1FFF)
    low, high = formats.unpack16(bits)
    with np.errstate(over="ignore"):
        hi, lo = stochastic(hi, high, kind[:-2]), stochastic(lo, low, kind[:-2])
    return pack2(hi, lo, kind, "rn", relu, satfinite)


def pack2_run(his: tuple[Any, ...], los: tuple[Any, ...]) -> list[Value]:
    """Executes several `cvt.rn.bf16x2.f32` as one operation; values as for `pack2`."""
    values = (*his, *los)
    if len(his) == 1 or set(map(type, values)) != {np.ndarray}:
        return [pack2(hi, lo, "bf16x2") for hi, lo in zip(his, los, strict=True)]
    if len({v.dtype for v in values}) > 1:
        values = tuple(_number(v) for v in values)
    high, low = formats.f32_to_bf16(np.concatenate(values).view(np.float32)).reshape(2, len(his), -1)
    return list(formats.pack16(low, high))


def pack2_words(words: tuple[Value, ...]) -> list[Value]:
    """Applies `pack2_run` to the halves of 64-bit values."""
    if int in map(type, words):
        his, los = tuple(map(high32, words)), tuple(map(low32, words))
        return pack2_run(his, los)
    block = np.concatenate(words).view(np.float32)
    return list(formats.f32_to_bf16(block).view(np.uint32).reshape(len(words), -1))


def _number(value: Any) -> Number:
    """Returns values or bit patterns as `float32`."""
    if value.__class__ is int:
        return np.uint32(value).view(np.float32)
    return value.view(np.float32) if value.dtype == np.uint32 else value


def pack_small(hi: Number, lo: Number, kind: str, modifiers: tuple[str, ...]) -> Value:
    """Packs two singles (`cvt.rn.satfinite.{e4m3x2,..,e2m1x2}`, `cvt.rp.ue8m0x2`).

    The result has `hi` in the upper byte, or in the upper four bits of a byte.
    """
    if "relu" in modifiers:
        hi, lo = formats.relu(hi), formats.relu(lo)
    name = kind[:-2]
    if name == "ue8m0":
        rounding, satfinite = "rp" if "rp" in modifiers else "rz", "satfinite" in modifiers
        high, low = (formats.f32_to_ue8m0(x, rounding, satfinite) for x in (hi, lo))
    else:
        high, low = map(formats.SMALL_FLOATS[name].encode, (hi, lo))
    if name == "e2m1":
        out: Any = high << np.uint8(4) | low
    else:
        out = high.astype(np.uint16) << np.uint16(8) | low.astype(np.uint16)
    return int(out) if np.ndim(out) == 0 else out


def unpack_small(word: Value, kind: str, modifiers: tuple[str, ...]) -> Value:
    """Converts packed patterns to halves (`cvt.rn.{f16x2,bf16x2}.{e4m3x2,..,e2m1x2,ue8m0x2}`)."""
    name, word = kind[:-2], np.asarray(word, np.uint16)
    decode = formats.ue8m0_to_f32 if name == "ue8m0" else formats.SMALL_FLOATS[name].decode
    hi, lo = (
        decode((word >> np.uint16(4 if name == "e2m1" else 8)).astype(np.uint8)),
        decode(word.astype(np.uint8)),
    )
    if "relu" in modifiers:
        hi, lo = formats.relu(hi), formats.relu(lo)
    out = formats.f32_to_bf16x2(hi, lo) if "bf16x2" in modifiers else formats.f32_to_f16x2(hi, lo)
    return int(out) if np.ndim(out) == 0 else out


def tf32(x: Number, rounding: str, relu: bool = False, satfinite: bool = False) -> Number:
    """Rounds singles to tf32 (`cvt.{rna,rn,rz}.tf32.f32`)."""
    x = np.asarray(x, f32)
    return unwrapped(formats.f32_to_tf32(formats.relu(x) if relu else x, rounding, satfinite))


def round_integral(x: Number, mode: str) -> Number:
    """Rounds floats to integral values of the same type (`cvt.r?i`)."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def clamp_int(value: Value, source: int, source_sign: bool, target: int, sign: bool) -> Value:
    """Converts between integers, saturating (`cvt.sat`)."""
    lo, hi = (-(1 << (target - 1)), (1 << (target - 1)) - 1) if sign else (0, MASK[target])
    if value.__class__ is int:
        number = value - (1 << source) if source_sign and value >> (source - 1) else value
        return min(max(number, lo), hi) & MASK[target]
    narrow = value.astype(DTYPE[source], copy=False)
    return formats.clamp_int(narrow.view(SIGNED[source]) if source_sign else narrow, target, sign)


FUNCTIONS: dict[str, Any] = {
    f.__name__: f
    for f in (
        add_directed, directed, fma32, fma64, fma_directed, fma_to_odd, int_to_odd, to_odd32,
        flush, ftz, sat, xorsign, fmin, fmax, fmin_nan, fmax_nan, rcp64, rsqrt64, float_to_int, int_to_float,
        bf16_low, bf16_high, bf16_run, unpack_half, pack_half, unpack2, pack2, pack2_random, pack2_run,
        pack2_words, pack_small, unpack_small, tf32, round_integral, clamp_int,
    )
} | {
    "ex2": ex2, "lg2": lg2, "fsin": sin, "fcos": cos, "ftanh": tanh, "rcp": rcp, "rsqrt": rsqrt,
    "copysign": np.copysign, "isnan": np.isnan, "np": np, "f32": f32, "f64": f64,
}  # fmt: skip
