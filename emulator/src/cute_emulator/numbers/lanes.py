"""Arithmetic on register values, called by the translated code.

A register value of a warp is a Python `int` if all lanes hold the same value. Otherwise it is a 32-lane array
of the register's unsigned dtype. Predicates are `bool` or boolean arrays. Control code is mostly uniform, and
an `int` addition costs a twentieth of an array's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

LANES, LANE_BITS = 32, 5
FULL = 0xFFFFFFFF
DTYPE: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
MASK = {8: 0xFF, 16: 0xFFFF, 32: 0xFFFFFFFF, 64: 0xFFFFFFFFFFFFFFFF}
LANE_IDS = np.arange(LANES, dtype=np.uint32)
_BIT = 1 << np.arange(LANES, dtype=np.uint64)

Value = Any  # int or ndarray; a tuple (low, high) for .b128
ndarray = np.ndarray
where: Any = np.where  # its overloads do not accept register values, which are arrays or scalars


# -- lanes and masks -----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def lane_array(mask: int) -> np.ndarray:
    """Returns the lanes of a 32-bit mask as booleans."""
    out = (np.uint64(mask) & _BIT) != 0
    out.setflags(write=False)
    return out


def bits(p: Value) -> int:
    """Returns the 32-bit mask of a predicate."""
    if p.__class__ is bool:
        return FULL if p else 0
    return _mask_of(p.tobytes())


@lru_cache(maxsize=4096)
def _mask_of(lanes: bytes) -> int:
    assert len(lanes) == LANES, "predicates are boolean arrays"
    return int.from_bytes(np.packbits(np.frombuffer(lanes, np.bool_), bitorder="little").tobytes(), "little")


@lru_cache(maxsize=4096)
def lane_list(mask: int) -> tuple[int, ...]:
    """Lists the lanes in a mask."""
    return tuple(i for i in range(LANES) if mask >> i & 1)


@lru_cache(maxsize=4096)
def lane_index(mask: int) -> Any:
    """Returns the fastest index of a mask's lanes into an array: a slice or an array of numbers."""
    numbers = np.flatnonzero(lane_array(mask))
    first, end = int(numbers[0]), int(numbers[-1]) + 1
    return slice(first, end) if end - first == len(numbers) else numbers


def first_lane(mask: int) -> int:
    """Returns the lowest lane in a mask."""
    return (mask & -mask).bit_length() - 1


def one(value: Value, mask: int) -> int:
    """Returns the value in the lowest active lane as an int."""
    return int(value[(mask & -mask).bit_length() - 1]) if value.__class__ is ndarray else value


def uniform(value: np.ndarray) -> Value:
    """Returns an int if all lanes hold the same value, else the array.

    Such values arise from shifts of a thread's number, and from code that computes with them.
    """
    data, size = value.tobytes(), value.itemsize
    first = data[:size]
    return int.from_bytes(first, "little") if data == first * LANES else value


def as_array(value: Value, width: int) -> np.ndarray:
    """Returns the value as a 32-lane array; a uniform value is copied into a new array."""
    return np.full(LANES, value & MASK[width], DTYPE[width]) if value.__class__ is int else value


def merge(mask: int, new: Value, old: Value) -> Value:
    """Returns `new` in the lanes of `mask`, `old` elsewhere."""
    if mask == FULL or new is old:
        return new
    if new.__class__ is tuple:
        old = old if old.__class__ is tuple else (0, 0)
        return tuple(merge(mask, n, o) for n, o in zip(new, old, strict=True))
    if new.__class__ is ndarray:
        return where(lane_array(mask), new, _like(old, new))
    if old.__class__ is ndarray:
        return where(lane_array(mask), _like(new, old), old)
    if new.__class__ is bool:
        return new if new == old else where(lane_array(mask), new, bool(old))
    if new == old:
        return new
    return where(lane_array(mask), _scalar(new), _scalar(old)).astype(np.uint64)


def merge_as(width: int, mask: int, new: Value, old: Value) -> Value:
    """Merges as `merge` does, for a register of `width` bits (0: a predicate)."""
    out = merge(mask, new, old)
    if width and out.__class__ is ndarray and out.dtype != DTYPE[width]:
        out = out.astype(DTYPE[width])
    elif not width and out.__class__ is ndarray and out.dtype != np.bool_:
        out = out.astype(np.bool_)
    return out


def _like(value: Value, other: np.ndarray) -> Value:
    return _scalar(value) if value.__class__ is int else value


def _scalar(value: int) -> np.uint64:
    return np.uint64(value)


def sel(width: int, p: Value, a: Value, b: Value) -> Value:
    """Returns `p ? a : b` for values of `width` bits (0: predicates)."""
    if p.__class__ is bool:
        return a if p else b
    if a.__class__ is ndarray or b.__class__ is ndarray:
        return where(p, a, b) if width == 0 else where(p, a, b).astype(DTYPE[width], copy=False)
    if width == 0:
        return p if a and not b else where(p, a, b)
    dtype = DTYPE[width]
    return where(p, dtype(a), dtype(b))


def truth(p: Value) -> Value:
    """Returns the result of a comparison as `bool` or as a boolean array."""
    return p if p.__class__ is bool or p.__class__ is ndarray else bool(p)


# -- float views ---------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _f32_of(value: int) -> np.float32:
    return np.uint32(value).view(np.float32)


@lru_cache(maxsize=65536)
def _f64_of(value: int) -> np.float64:
    return np.uint64(value).view(np.float64)


def F(value: Value) -> Any:
    """Views bits as `float32`."""
    return value.view(np.float32) if value.__class__ is ndarray else _f32_of(value)


def I(value: Any) -> Value:  # noqa: E743
    """Views `float32` as bits."""
    return value.view(np.uint32) if value.__class__ is ndarray else int(value.view(np.uint32))


def D(value: Value) -> Any:
    """Views bits as `float64`."""
    return value.view(np.float64) if value.__class__ is ndarray else _f64_of(value)


def J(value: Any) -> Value:
    """Views `float64` as bits."""
    return value.view(np.uint64) if value.__class__ is ndarray else int(np.float64(value).view(np.uint64))


# -- integers ------------------------------------------------------------------------------------


def signed(value: Value, width: int) -> Value:
    """Converts an unsigned pattern to a signed number: an int, or an array of the signed dtype."""
    if value.__class__ is ndarray:
        return value.view(SIGNED[width])
    return value - (1 << width) if value >> (width - 1) else value


def pattern(value: Value, width: int) -> Value:
    """Converts a signed number to its unsigned pattern of `width` bits."""
    if value.__class__ is ndarray:
        return value.astype(SIGNED[width], copy=False).view(DTYPE[width])
    return value & MASK[width]


def resize(value: Value, source: int, target: int, sign: bool = False) -> Value:
    """Extends by zeros or by the sign, or truncates.

    Implements `cvt` between integers, and changes of register width.
    """
    if value.__class__ is int:
        value &= MASK[source]
        return (signed(value, source) if sign else value) & MASK[target]
    if source < 8 * value.dtype.itemsize:
        value = value.astype(DTYPE[source])
    if sign and target > source:
        return value.view(SIGNED[source]).astype(SIGNED[target]).view(DTYPE[target])
    return value.astype(DTYPE[target], copy=False)


def pair64(lo: Value, hi: Value) -> Value:
    """Joins two 32-bit values (`mov.b64 d, {lo, hi}`)."""
    if lo.__class__ is int and hi.__class__ is int:
        return lo | hi << 32
    out = np.empty((LANES, 2), np.uint32)
    out[:, 0] = lo
    out[:, 1] = hi
    return out.view(np.uint64).reshape(LANES)


def pair64_run(los: tuple[Value, ...], his: tuple[Value, ...]) -> list[Value]:
    """Executes several `pair64` as one operation."""
    kinds = set(map(type, los + his))
    if int in kinds:
        if len(kinds) == 1:
            return [lo | hi << 32 for lo, hi in zip(los, his, strict=True)]
        return [pair64(lo, hi) for lo, hi in zip(los, his, strict=True)]
    halves = np.concatenate(los + his).reshape(2, -1)
    return list(halves.T.copy().view(np.uint64).reshape(-1, LANES))


def pair64_rows(registers: Value, numbers: tuple[int, ...]) -> list[Value]:
    """Returns `pair64` of registers 2n and 2n + 1 for each n of `numbers`.

    Args:
        registers: Registers that one instruction has written.
        numbers: Pairs to return.
    """
    if registers.__class__ is not ndarray:
        return [pair64(registers[2 * n], registers[2 * n + 1]) for n in numbers]
    out = np.empty((len(registers) // 2, LANES, 2), np.uint32)
    out[..., 0] = registers[0 : 2 * len(out) : 2]
    out[..., 1] = registers[1::2]
    words = out.view(np.uint64).reshape(len(out), LANES)
    return [words[n] for n in numbers]


def low32(value: Value) -> Value:
    """Returns the low half of a 64-bit value."""
    return value & FULL if value.__class__ is int else value.astype(np.uint32)


def high32(value: Value) -> Value:
    """Returns the high half of a 64-bit value."""
    return value >> 32 if value.__class__ is int else (value >> 32).astype(np.uint32)


def join(parts: tuple[Value, ...], part_width: int, width: int) -> Value:
    """Joins a vector of narrow values into one register (`mov`)."""
    if width == 64 and part_width == 32:
        return pair64(*parts)
    if all(p.__class__ is int for p in parts):
        return sum((p & MASK[part_width]) << (i * part_width) for i, p in enumerate(parts))
    dtype = DTYPE[width]
    out = np.zeros(LANES, dtype)
    for i, p in enumerate(parts):
        wide = p & MASK[part_width] if p.__class__ is int else p.astype(DTYPE[part_width]).astype(dtype)
        out |= wide << (i * part_width) if wide.__class__ is int else wide << dtype(i * part_width)
    return out


def split(value: Value, part_width: int, count: int) -> tuple[Value, ...]:
    """Splits one register into a vector of narrow values (`mov`)."""
    if value.__class__ is int:
        return tuple(value >> (i * part_width) & MASK[part_width] for i in range(count))
    return tuple((value >> (i * part_width)).astype(DTYPE[part_width]) for i in range(count))


def mul_wide(a: Value, b: Value, width: int, sign: bool) -> Value:
    """Returns the full product of two `width`-bit values."""
    a, b = _widened(a, width, sign), _widened(b, width, sign)
    product = a * b
    return product & MASK[2 * width] if product.__class__ is int else product.view(DTYPE[2 * width])


def _widened(value: Value, width: int, sign: bool) -> Value:
    """Returns a factor as an int, or as an array of twice the width with the signedness of `sign`."""
    if value.__class__ is int:
        value &= MASK[width]
        return signed(value, width) if sign else value
    if width < 8 * value.dtype.itemsize:
        value = value.astype(DTYPE[width])
    return value.view(SIGNED[width]).astype(SIGNED[2 * width]) if sign else value.astype(DTYPE[2 * width])


def mul_hi(a: Value, b: Value, width: int, sign: bool) -> Value:
    """Returns the upper half of the product."""
    if a.__class__ is int and b.__class__ is int:
        x, y = (signed(a, width), signed(b, width)) if sign else (a, b)
        return (x * y) >> width & MASK[width]
    if width == 64:
        return _each(lambda x, y: mul_hi(x, y, 64, sign), 64, a, b)
    return (mul_wide(a, b, width, sign) >> width).astype(DTYPE[width])


def shl(a: Value, n: Value, width: int) -> Value:
    """Shifts left (`shl`); amounts of at least `width` give 0."""
    if n.__class__ is int:
        return (a << n) & MASK[width] if n < width else (0 if a.__class__ is int else np.zeros_like(a))
    dtype = DTYPE[width]
    a = as_array(a, width)
    return where(n < width, a << np.minimum(n, width - 1).astype(dtype), dtype(0))


def shr(a: Value, n: Value, width: int, sign: bool) -> Value:
    """Shifts right (`shr`); amounts of at least `width` give 0, or the sign."""
    if n.__class__ is int:
        n = min(n, width)
        if a.__class__ is int:
            return (signed(a, width) >> n) & MASK[width] if sign else a >> n
        if n == width:
            n, zero = width - 1, not sign
            a = np.zeros_like(a) if zero else a
        return (a.view(SIGNED[width]) >> n).view(DTYPE[width]) if sign else a >> n
    a = as_array(a, width)
    amount = np.minimum(n, width - 1)
    if sign:
        return (a.view(SIGNED[width]) >> amount.astype(SIGNED[width])).view(DTYPE[width])
    return where(n < width, a >> amount.astype(DTYPE[width]), DTYPE[width](0))


def divide(a: Value, b: Value, width: int, sign: bool, remainder: bool) -> Value:
    """Divides, truncating (`div`, `rem`); a zero divisor gives all ones (div) or the dividend (rem)."""
    if a.__class__ is int and b.__class__ is int:
        if b == 0:
            return a if remainder else MASK[width]
        m, n = (signed(a, width), signed(b, width)) if sign else (a, b)
        q = abs(m) // abs(n)
        q = -q if (m < 0) != (n < 0) else q
        return (m - q * n if remainder else q) & MASK[width]
    if width == 64 and sign:
        return _each(lambda x, y: divide(x, y, 64, True, remainder), 64, a, b)
    x: Any = as_array(a, width)
    y: Any = as_array(b, width)
    if sign:
        x, y = signed(x, width), signed(y, width)
    zero = y == 0
    wide: Any = np.int64 if sign else np.uint64
    x, y = x.astype(wide), where(zero, 1, y).astype(wide)
    if sign:
        q = np.abs(x) // np.abs(y)
        q = where((x < 0) != (y < 0), -q, q)
    else:
        q = x // y
    if_zero: Any = -1 if sign else np.uint64(MASK[width])
    r = where(zero, x, x - q * y) if remainder else where(zero, if_zero, q)
    return pattern(r, width) if sign else r.astype(DTYPE[width])


def extreme(a: Value, b: Value, width: int, sign: bool, largest: bool) -> Value:
    """Returns the minimum or maximum of integers (`min`, `max`)."""
    if a.__class__ is int and b.__class__ is int:
        x, y = (signed(a, width), signed(b, width)) if sign else (a, b)
        return a if (x >= y) == largest else b
    a, b = as_array(a, width), as_array(b, width)
    f = np.maximum if largest else np.minimum
    return f(a.view(SIGNED[width]), b.view(SIGNED[width])).view(DTYPE[width]) if sign else f(a, b)


def pairwise(name: str, a: Value, b: Value, sign: bool) -> Value:
    """Applies `add`, `min` or `max` to 16-bit integers, two in each value."""
    halves = []
    for x, y in zip(split(a, 16, 2), split(b, 16, 2), strict=True):
        halves.append(x + y if name == "add" else extreme(x, y, 16, sign, name == "max"))
    return join(tuple(halves), 16, 32)


def absolute(a: Value, width: int) -> Value:
    """Returns the absolute value of a signed integer (`abs`)."""
    return pattern(abs(signed(a, width)), width)


def _each(f: Callable[..., int], width: int, *values: Value) -> Value:
    """Applies a function of ints lane by lane."""
    if all(v.__class__ is int for v in values):
        return f(*values)
    lists = [[v] * LANES if v.__class__ is int else v.tolist() for v in values]
    return np.array([f(*xs) for xs in zip(*lists, strict=True)], DTYPE[width])
