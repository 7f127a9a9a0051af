"""Conversions against rational arithmetic: rounding once, clamping, NaN, flushing."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from .exact import BF16, F16, F32, F64, TF32, expected, rounded, same
from .handwritten import run
from .test_float_rules import FEW, HALF, HUGE, MODES, WORDS, A, flush, lanes


def convert(text, inputs, dtype):
    size = np.dtype(dtype).itemsize
    reg = {2: "%h9", 4: "%r9", 8: "%d9"}[size]
    return lanes(text.format(reg), inputs, f"u{size}", reg, f"b{8 * size}").view(dtype)


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("ends", ["", ".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
def test_narrowing_rounds_clamps_and_keeps_nan(kind, ends, mode):
    form = {"f16": F16, "bf16": BF16, "tf32": TF32}[kind]
    top = np.float32(
        [
            float(form.largest),
            np.nextafter(np.float32(form.largest), np.float32(np.inf)),
            65519,
            65520,
            65536,
            -65520,
            -HUGE,
            np.inf,
        ]
        * 4
    )
    x = np.concatenate([A, top, -top])
    want = expected(lambda a: a, lambda a: a, form, mode, x)
    if "relu" in ends:
        want = np.where(want < 0, 0, want) + 0.0
    if "satfinite" in ends:
        want = np.clip(want, -float(form.largest), float(form.largest))
    if kind == "tf32":
        got = convert(f"cvt.{mode}{ends}.tf32.f32 {{}}, %r0;", [x], np.float32)
        same(got, want) if "relu" not in ends else np.testing.assert_array_equal(got, want)
        return
    dtype = HALF[kind][0]
    got = convert(f"cvt.{mode}{ends}.{kind}.f32 {{}}, %r0;", [x], dtype)
    np.testing.assert_array_equal(got.astype(np.float64), want)
    assert (got.view(np.uint16)[np.isnan(x)] == 0x7FFF).all()
    both = convert(f"cvt.{mode}{ends}.{kind}x2.f32 {{}}, %r0, %r1;", [x, x[::-1]], np.uint32)
    np.testing.assert_array_equal(both & 0xFFFF, got.view(np.uint16)[::-1])
    np.testing.assert_array_equal(both >> 16, got.view(np.uint16))


@pytest.mark.parametrize("ends", ["", ".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_random_bits_carry_into_what_is_kept(kind, ends):
    """Away from zero where the bits that are cut off, at most 13 or 16, and the random ones overflow."""
    form, taken = {"f16": (F16, 13), "bf16": (BF16, 16)}[kind]
    rng = np.random.default_rng(3)
    beyond = np.nextafter(np.float32(form.largest), np.float32(np.inf))
    x = np.concatenate(
        [A, np.float32([beyond, -beyond, 70000, 1 + 2**-9, 2.0**-15 * 1.7]), rng.normal(size=27)]
    )
    x = np.resize(x, 128).astype(np.float32)
    bits = rng.integers(0, 1 << 32, 128, np.uint32)
    bits[::5] |= np.uint32(0xFFFF0000)  # all ones carry whatever is cut off
    bits[1::5] &= np.uint32(0xFFFF)
    got = convert(f"cvt.rs{ends}.{kind}x2.f32 {{}}, %r0, %r1, %r2;", [x, x[::-1], bits], np.uint32)
    for half, values, shift in ((got >> 16, x, 16), (got & 0xFFFF, x[::-1], 0)):
        random = bits >> np.uint32(shift) & np.uint32((1 << taken) - 1)
        want = np.array(
            [_carried(float(v), int(r), form, taken) for v, r in zip(values, random, strict=True)]
        )
        if "relu" in ends:
            want = np.where(want < 0, 0, want) + 0.0
        if "satfinite" in ends:
            want = np.clip(want, -float(form.largest), float(form.largest))
        same(half.astype(np.uint16).view(HALF[kind][0]).astype(np.float64), want)
        assert (half[np.isnan(values)] == 0x7FFF).all()


def _carried(x: float, random: int, to, taken: int) -> float:
    if not np.isfinite(x) or x == 0:
        return x
    down = max(to.lowest, int(np.frexp(abs(x))[1]) - to.bits)
    whole, rest = divmod(Fraction(abs(x)) / Fraction(2) ** down, 1)
    out = (whole + (int(rest * (1 << taken)) + random >> taken)) * Fraction(2) ** down
    return float(np.copysign(np.inf if out > to.largest else float(out), x))


@FEW
@given(WORDS, st.sampled_from(["rna", "rn", "rz"]))
def test_tf32_rounds_as_asked(words, mode):
    x = words.view(np.float32)
    same(
        convert(f"cvt.{mode}.tf32.f32 {{}}, %r0;", [x], np.float32),
        expected(lambda a: a, lambda a: a, TF32, mode, x),
    )


NUMBERS = {"s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}
TIES = [0, 1, 2**24 + 2**16, 2**24 + 2**16 + 1, 2**31 - 1, 2**25 + 1, 2**25 + 3, 2**16 - 1, 65519, 70000]
WIDE = [
    *TIES,
    2**62 + 2**38,
    2**62 + 2**38 + 1,
    2**62 + 2**54 + 1,
    2**63 - 1,
    2**53 + 1,
    2**24 * (2**38 + 1) + 1,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("source", NUMBERS)
def test_integers_convert_with_one_rounding(source, target, mode):
    if target in HALF and mode in ("rm", "rp") or (target, source[1:]) == ("f64", "64") and mode != "rn":
        return
    info = np.iinfo(NUMBERS[source])
    values = [v for v in WIDE if v <= info.max]
    values += [-v for v in values if info.min <= -v] + [info.min, info.max]
    values = np.array((values * 32)[:64], NUMBERS[source])
    dtype, form = {"f32": (np.float32, F32), "f64": (np.float64, F64)}.get(target) or HALF[target]
    raw, reg = (values.view(np.uint32), "%r0") if values.itemsize == 4 else (values.view(np.uint64), "%d10")
    got = convert(f"cvt.{mode}.{target}.{source} {{}}, {reg};", [raw], dtype)
    want = [rounded(Fraction(int(v)), form, mode) if v else 0.0 for v in values.tolist()]
    same(got, np.array(want), (source, target, mode))
    for v, w in list(zip(values.tolist(), want, strict=True))[:12]:  # the same for all lanes
        out = np.zeros(1, np.uint64)
        width = 8 * np.dtype(dtype).itemsize
        result = {16: "%h9", 32: "%r9", 64: "%d9"}[width]
        register = "%r0" if values.itemsize == 4 else "%d10"
        text = f"mov.b{source[1:]} {register}, {v}; cvt.{mode}.{target}.{source} {result}, {register};"
        run(f"{text} st.global.b{width} [%d0], {result};", [out])
        assert float(out.view(dtype)[0]) == w, (v, source, target, mode)


@FEW
@given(
    hnp.arrays(np.uint64, 32),
    st.sampled_from([("f32", m) for m in MODES] + [(k, m) for k in HALF for m in ("rn", "rz")]),
)
def test_doubles_narrow_with_one_rounding(words, form):
    target, mode = form
    x = words.view(np.float64).copy()
    x[::2] = words[::2].astype(np.float64) * 2.0**-63 * 2.0 ** (np.arange(16) * 16 - 128)  # inside the range
    x[1] = 1 + 2.0**-9 + 2.0**-40  # above a tie of bf16 by less than a single keeps
    x[3] = 1 + 2.0**-11 + 2.0**-40
    dtype, f = (np.float32, F32) if target == "f32" else HALF[target]
    same(
        convert(f"cvt.{mode}.{target}.f64 {{}}, %d10;", [x], dtype),
        expected(lambda a: a, lambda a: a, f, mode, x),
    )


def test_conversions_flush_singles():
    x = np.float32([1e-40, -1e-40, 0.25, 2.5] * 8)
    for name, dtype, want in (
        ("rpi.ftz.s32", np.int32, [0, 0, 1, 3]),
        ("rpi.s32", np.int32, [1, 0, 1, 3]),
        ("rmi.s32", np.int32, [0, -1, 0, 2]),
        ("rmi.ftz.s32", np.int32, [0, 0, 0, 2]),
    ):
        np.testing.assert_array_equal(
            convert(f"cvt.{name}.f32 {{}}, %r0;", [x], dtype), want * 8, err_msg=name
        )
    same(convert("cvt.ftz.f64.f32 {}, %r0;", [x], np.float64), np.array([0, -0.0, 0.25, 2.5] * 8))
    same(convert("cvt.rpi.ftz.f32.f32 {}, %r0;", [x], np.float32), np.array([0, -0.0, 1, 3] * 8))
    d = np.array([1e-40, -1e-40, 2, 2.0**-126] * 8)
    same(convert("cvt.rn.ftz.f32.f64 {}, %d10;", [d], np.float32), np.array([0, -0.0, 2, 2.0**-126] * 8))
    h = np.float16([2.0**-24, 1, -0.5, 2.0**-20] * 8)  # subnormal as f16 only
    same(convert("cvt.ftz.f32.f16 {}, %h0;", [h.view(np.uint16)], np.float32), h.astype(np.float64))
    b = np.float32([1e-40, 1, -1e-39, 2] * 8).astype(ml_dtypes.bfloat16)
    same(
        convert("cvt.ftz.f32.bf16 {}, %h0;", [b.view(np.uint16)], np.float32),
        flush(b.astype(np.float32)).astype(np.float64),
    )
