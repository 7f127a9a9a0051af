"""Number formats against exact rational arithmetic and against torch."""

import itertools
import math
from bisect import bisect_left, bisect_right
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cute_emulator.numbers import formats

PATTERNS = hnp.arrays(np.uint32, hnp.array_shapes(min_dims=0, max_dims=3, max_side=8))
SPECIALS = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF, 0xFF7FFFFF, 1]
    + [
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x3F800000,
        0x477FE000,
        0x477FF000,
        0x477FEFFF,
        0x33000000,
        0x33000001,
    ],
    np.uint32,
)


def all_tops(low_bits):
    """Every float whose low mantissa bits are one of the rounding-critical ones."""
    top = np.arange(1 << (32 - low_bits), dtype=np.uint32)[::7] << np.uint32(low_bits)
    half = 1 << (low_bits - 1)
    return np.concatenate(
        [(top | np.uint32(low)).view(np.float32) for low in (0, 1, half - 1, half, half + 1)]
    )


def test_bf16_nearest_equals_torch_everywhere():
    x = all_tops(16)
    want = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    want = np.where(np.isnan(x), np.uint16(0x7FFF), want)  # torch keeps another NaN payload
    np.testing.assert_array_equal(formats.f32_to_bf16(x), want)


@given(PATTERNS, PATTERNS)
def test_packed_bf16_is_two_single_conversions(hi, lo):
    hi, lo = np.broadcast_to(hi.reshape(-1)[:1], (32,)).copy(), np.resize(lo, 32) if lo.size else np.zeros(32)
    hi, lo = formats.as_f32(np.resize(hi, 32)), formats.as_f32(lo.astype(np.uint32))
    word = formats.f32_to_bf16x2(hi, lo)
    np.testing.assert_array_equal(word, formats.pack16(formats.f32_to_bf16(lo), formats.f32_to_bf16(hi)))
    for got, bits in zip(formats.bf16x2_to_f32(word), formats.unpack16(word), strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


HALVES = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
"""Every half that is not negative, in ascending order."""


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=60)
def test_truncating_conversions_are_exact(x):
    got = formats.f16_to_f32(formats.f32_to_f16(np.float32([x]), "rz"))[0]
    largest = HALVES[np.searchsorted(HALVES, abs(x), "right") - 1]  # compared exactly, in float64
    assert (float(got), math.copysign(1, got)) == (math.copysign(largest, x), math.copysign(1, x))
    bits = int(np.float32(x).view(np.uint32))
    assert int(formats.f32_to_bf16(np.float32([x]), "rz")[0]) == bits >> 16
    assert int(formats.f32_to_tf32(np.float32([x]), "rz").view(np.uint32)[0]) == bits & ~0x1FFF


@given(st.floats(width=32, allow_nan=False, min_value=-(2.0**126), max_value=2.0**126))
def test_tf32_nearest_by_exact_distance(x):
    exact = Fraction(x)
    for rounding in ("rna", "rn"):
        got = formats.f32_to_tf32(np.float32([x]), rounding)[0]
        low = np.uint32(np.float32(abs(x)).view(np.uint32) & np.uint32(0xFFFFE000))
        below, above = (Fraction(float(formats.as_f32(low + np.uint32(d)))) for d in (0, 0x2000))
        down, up = abs(exact) - below, above - abs(exact)
        tie_up = rounding == "rna" or (int(low) >> 13) & 1
        want = above if up < down or (up == down and tie_up) else below
        assert abs(Fraction(float(got))) == want and (x == 0 or got == 0 or (got < 0) == (x < 0))


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_small_floats_equal_torch(name, dtype):
    fmt = formats.SMALL_FLOATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(fmt.decode(codes.numpy()), codes.view(dtype).float().numpy())
    x = np.concatenate([all_tops(20), all_tops(21), all_tops(16)[::5], SPECIALS.view(np.float32)])
    limit = float(torch.finfo(dtype).max)
    want = torch.from_numpy(x.clip(-limit, limit)).to(dtype).view(torch.uint8).numpy()
    got = fmt.encode(x)
    np.testing.assert_array_equal(got[~np.isnan(x)], want[~np.isnan(x)])
    assert (got[np.isnan(x)] == 0x7F).all()


@pytest.mark.parametrize(
    "name, exponent_bits, mantissa_bits, bias", [("e2m3", 2, 3, 1), ("e3m2", 3, 2, 3), ("e2m1", 2, 1, 1)]
)
def test_formats_without_nan_by_exact_distance(name, exponent_bits, mantissa_bits, bias):
    fmt, width = formats.SMALL_FLOATS[name], 1 + exponent_bits + mantissa_bits

    def value(code):
        exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        hidden = Fraction(exponent > 0) + Fraction(mantissa, 1 << mantissa_bits)
        return hidden * Fraction(2) ** (max(exponent, 1) - bias) * (-1 if code >> width - 1 else 1)

    values = [value(code) for code in range(1 << width)]
    codes = np.arange(256, dtype=np.uint8)  # what lies above the pattern is ignored
    np.testing.assert_array_equal(
        fmt.decode(codes), np.float32([float(values[c % (1 << width)]) for c in codes])
    )
    positive = values[: 1 << width - 1]
    x = [float(v) for v in positive] + [float((a + b) / 2) for a, b in itertools.pairwise(positive)]
    x = np.float32(
        [
            *x,
            *np.nextafter(np.float32(x), np.float32(9)),
            *np.nextafter(np.float32(x), np.float32(-9)),
            1e9,
            np.inf,
        ]
    )
    for number, got in zip(x, fmt.encode(x), strict=True):
        near = min(Fraction(float(number)), positive[-1]) if np.isfinite(number) else positive[-1]
        best = min(range(len(positive)), key=lambda c: (abs(positive[c] - near), c & 1))
        assert int(got) & ~(1 << width - 1) == best, (name, number)
        assert int(fmt.encode(-np.float32([number]))[0]) & ~(1 << width - 1) == best
    assert fmt.encode(np.float32([np.nan]))[0] == len(positive) - 1


SCALES = [Fraction(2) ** e for e in range(-127, 128)]


@given(PATTERNS)
def test_scale_exponents_by_exact_comparison(bits):
    x = np.concatenate(
        [bits.reshape(-1), SPECIALS, np.uint32([0x00400000, 0x00400001, 0x7F000000, 0x7F000001])]
    )
    x = x.view(np.float32)
    for rounding, number, code in [
        (r, n, c) for r in ("rz", "rp") for n, c in zip(x, formats.f32_to_ue8m0(x, r), strict=True)
    ]:
        if np.isnan(number):
            assert code == 0xFF and np.isnan(formats.ue8m0_to_f32(code))
            continue
        magnitude = min(abs(Fraction(float(number))), SCALES[-1]) if np.isfinite(number) else SCALES[-1]
        fitting = bisect_right(SCALES, magnitude) - 1 if rounding == "rz" else bisect_left(SCALES, magnitude)
        want = SCALES[max(fitting, 0)]
        assert Fraction(float(formats.ue8m0_to_f32(code))) == want, (rounding, number)


def test_half_specials_and_saturation():
    x = SPECIALS.view(np.float32)
    got = formats.f32_to_f16(x)
    want = torch.from_numpy(x).to(torch.float16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(got, np.where(np.isnan(x), np.uint16(0x7FFF), want))
    saturated = formats.f16_to_f32(formats.f32_to_f16(x, satfinite=True))
    assert np.nanmax(np.abs(saturated)) == 65504
    np.testing.assert_array_equal(
        formats.saturate(np.float32([-1, 0.5, 2, np.nan, -np.inf])), [0, 0.5, 1, 0, 0]
    )
    np.testing.assert_array_equal(formats.relu(np.float32([-1, 0.5, np.nan])), np.float32([0, 0.5, np.nan]))


@given(
    st.floats(width=32) | st.sampled_from([2.0**31, -(2.0**31), 2.0**63, 2.0**64, -0.5, 0.5, 1.5, 2.5]),
    st.sampled_from([8, 16, 32, 64]),
    st.booleans(),
    st.sampled_from(["rni", "rzi", "rmi", "rpi"]),
)
def test_float_to_int(x, bits, signed, rounding):
    got = int(formats.float_to_int(np.float32([x]), bits, signed, rounding)[0])
    lo, hi = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if math.isnan(x):
        want = 2 ** (bits - 1) if bits == 64 else 0
    elif math.isinf(x):
        want = hi if x > 0 else lo
    else:
        step = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding]
        want = min(max(step(Fraction(float(np.float32(x)))), lo), hi)
    assert got == want % 2**bits


@given(
    hnp.arrays(st.sampled_from([np.int32, np.uint32, np.int64, np.uint64]), 5),
    st.sampled_from([8, 16, 32]),
    st.booleans(),
)
def test_integer_saturation(x, bits, signed):
    lo, hi = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    want = [min(max(int(v), lo), hi) % 2**bits for v in x]
    assert formats.clamp_int(x, bits, signed).tolist() == want
