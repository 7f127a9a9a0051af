"""Rounding, flushing, saturation and signed zeros of float arithmetic, against rational arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from .exact import BF16, F16, F32, F64, expected, root, same
from .handwritten import per_lane, run

TINY, HUGE = 2.0**-126, float(np.finfo(np.float32).max)
EDGES = np.float32(
    [0, -0.0, 1, -1, 1.5, -2.5, np.inf, -np.inf, np.nan, HUGE, -HUGE, TINY, -TINY, 1e-40, -1e-40, 2.0**-149]
    + [
        1 + 2.0**-23,
        1 - 2.0**-24,
        1 + 2.0**-12,
        2.0**-24,
        -(2.0**-24),
        2.0**-60,
        -(2.0**-60),
        3.0,
        1 / 3,
        1e30,
    ]
    + [-1e-30, 65504, 65520, 2.0**-25, 0.5, -7]
)
rng = np.random.default_rng(11)
A = np.concatenate([EDGES, rng.permutation(EDGES), rng.permutation(EDGES)])
B, C = rng.permutation(A), rng.permutation(A)
MODES = ("rn", "rz", "rm", "rp")
WORDS = hnp.arrays(np.uint32, 32)
FEW = settings(max_examples=15, deadline=None)

OPERATIONS = {
    "add": (lambda a, b: a + b, np.add),
    "sub": (lambda a, b: a - b, np.subtract),
    "mul": (lambda a, b: a * b, np.multiply),
    "div": (lambda a, b: a / b, np.divide),
    "fma": (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
    "sqrt": (root, np.sqrt),
    "rcp": (lambda a: 1 / a, np.reciprocal),
}
ARITY = {"fma": 3, "sqrt": 1, "rcp": 1}


def ps(*values):
    return [np.ascontiguousarray(v) for v in values]


def lanes(body, inputs, dtype, result, kind):
    """`per_lane` of more than a warp's worth."""
    parts = [
        per_lane(body, ps(*(a[n : n + 32] for a in inputs)), dtype, result, kind)
        for n in range(0, len(inputs[0]), 32)
    ]
    return np.concatenate(parts)


def zero_sum(mode, name, values, want):
    """Rounding down, a sum that vanishes is -0."""
    if mode != "rm" or name not in ("add", "sub", "fma"):
        return want
    with np.errstate(all="ignore"):
        left = values[0].astype(np.float64) * values[1] if name == "fma" else values[0]
        right = -values[1] if name == "sub" else values[-1]
        vanishes = (want == 0) & (np.signbit(left) != np.signbit(right))
    return np.where(vanishes & np.isfinite(left) & np.isfinite(right), -0.0, want)


def check(name, mode, inputs, ftz=False):
    count = ARITY.get(name, 2)
    inputs = inputs[:count]
    sources = ", ".join(f"%r{n}" for n in range(count))
    dot = ".ftz" if ftz else ""
    got = lanes(f"{name}.{mode}{dot}.f32 %r9, {sources};", inputs, np.float32, "%r9", "b32")
    flushed = [np.where(np.abs(x) < TINY, np.copysign(0, x), x) for x in inputs] if ftz else inputs
    want = zero_sum(mode, name, flushed, expected(*OPERATIONS[name], F32, mode, *flushed))
    if ftz:
        want = np.where(np.abs(want) < TINY, np.copysign(0, want), want)
    same(got, want, (name, mode, ftz))


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_single_precision_rounds_once(name, mode, ftz):
    check(name, mode, [A, B, C], ftz)


@FEW
@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.sampled_from(MODES),
    st.booleans(),
    st.lists(WORDS, min_size=3, max_size=3),
)
def test_single_precision_rounds_once_anywhere(name, mode, ftz, words):
    check(name, mode, [w.view(np.float32) for w in words], ftz)


def test_a_fused_product_on_a_tie_is_decided_by_what_a_double_loses():
    a = np.float32([1 + 2.0**-12] * 32)
    c = np.float32([2.0**-60, -(2.0**-60), 0, 2.0**-100, -(2.0**-140), 2.0**-149, 1e-30, -1e-30] * 4)
    check("fma", "rn", [a, a, c])
    text = "mov.b64 %d1, {%r0, %r0}; mov.b64 %d2, {%r1, %r1}; fma.rn.f32x2 %d3, %d1, %d1, %d2; "
    text += "mov.b64 {%r8, %r9}, %d3;"
    got = per_lane(text, [a, c], np.float32, "%r9", "b32")
    same(got, expected(*OPERATIONS["fma"], F32, "rn", a, a, c))


HALF = {"f16": (np.float16, F16), "bf16": (ml_dtypes.bfloat16, BF16)}


@FEW
@given(
    st.sampled_from(sorted(HALF)),
    st.sampled_from(["add", "sub", "mul", "fma"]),
    st.lists(hnp.arrays(np.uint16, 32), min_size=3, max_size=3),
)
def test_half_precision_rounds_once(kind, name, patterns):
    dtype, form = HALF[kind]
    count = ARITY.get(name, 2)
    patterns = patterns[:count]
    sources = ", ".join(f"%h{n}" for n in range(count))
    got = per_lane(f"{name}.rn.{kind} %h9, {sources};", patterns, np.uint16, "%h9", "b16")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = [p.view(dtype).astype(np.float64) for p in patterns]
    same(got.view(dtype), expected(*OPERATIONS[name], form, "rn", *values), (name, kind))


@pytest.mark.parametrize("kind", HALF)
def test_a_fused_product_of_halves_on_a_tie(kind):
    """A product of 16 or 22 bits that lies on a tie of the result, and an addend that a single would lose."""
    dtype, form = HALF[kind]
    a, b, c = (np.empty(32, dtype) for _ in range(3))
    found = 0
    for x in range(1 << form.bits - 1, 1 << form.bits):
        for y in range(x, 1 << form.bits):
            product, unit = x * y, 1 << (x * y).bit_length() - form.bits
            if product % unit == unit // 2 and found < 16:
                for sign in (1, -1):
                    a[2 * found + (sign < 0)], b[2 * found + (sign < 0)] = x * 2.0**-5, y * 2.0**-5
                    c[2 * found + (sign < 0)] = sign * 2.0**-20
                found += 1
    assert found == 16
    pattern = [v.view(np.uint16) for v in (a, b, c)]
    got = per_lane(f"fma.rn.{kind} %h9, %h0, %h1, %h2;", pattern, np.uint16, "%h9", "b16")
    same(got.view(dtype), expected(*OPERATIONS["fma"], form, "rn", a, b, c))
    text = "mov.b32 %r0, {%h0, %h1}; mov.b32 %r1, {%h1, %h0}; mov.b32 %r2, {%h2, %h2}; "
    text += f"fma.rn.{kind}x2 %r3, %r0, %r1, %r2;"
    got = per_lane(text, pattern, np.uint32, "%r3", "b32")
    half = expected(*OPERATIONS["fma"], form, "rn", a, b, c).astype(dtype).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(got, half << 16 | half)


@FEW
@given(st.lists(hnp.arrays(np.uint64, 32), min_size=3, max_size=3), st.integers(0, 60))
def test_double_precision_fuses(words, near):
    a, b, c = (w.view(np.float64) for w in words)
    with np.errstate(all="ignore"):
        c = np.where(np.arange(32) % 2 == 0, -(a * b) * (1 + near * 2.0**-52), c)
    got = per_lane("fma.rn.f64 %d9, %d10, %d11, %d12;", [a, b, c], np.float64, "%d9", "b64")
    same(got, expected(*OPERATIONS["fma"], F64, "rn", a, b, c))


# -- flushing, minima, comparisons -----------------------------------------------------------------


def flush(x, tiny=TINY):
    return np.where(np.abs(x) < tiny, np.copysign(0, x), x).astype(x.dtype)


UNARY = {"lg2.approx": np.log2, "rcp.approx": np.reciprocal, "rsqrt.approx": lambda x: 1 / np.sqrt(x),
         "sqrt.approx": np.sqrt, "ex2.approx": np.exp2, "abs": np.abs, "neg": np.negative,
         "sin.approx": np.sin, "cos.approx": np.cos}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_functions_flush_their_operand_and_result(name):
    x = np.float32(
        [1e-40, -1e-40, 2.0**-127, 1.5 * 2.0**126, 1.9 * 2.0**127, -126.5, -150, 3, 0.25, TINY, 2.0**-140] * 3
    )[:32]
    got = per_lane(f"{name}.ftz.f32 %r9, %r0;", [x], np.float32, "%r9", "b32")
    with np.errstate(all="ignore"):
        want = flush(UNARY[name](flush(x).astype(np.float64)).astype(np.float32))
    np.testing.assert_allclose(got, want, rtol=2.0**-22)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(want)[~np.isnan(got)])


def extreme(name, nan, x, y):
    """PTX's `min` and `max`, with -0 below +0."""
    if np.isnan(x) or np.isnan(y):
        if nan or (np.isnan(x) and np.isnan(y)):
            return np.nan
        return y if np.isnan(x) else x
    key = lambda v: (v, -np.signbit(v).astype(int))  # noqa: E731
    return (min if name == "min" else max)(x, y, key=key)


PAIRS = np.array(
    [(x, y) for x in (0.0, -0.0, np.nan, 1.0, -1.0, -3.0) for y in (0.0, -0.0, np.nan, 2.0, -1.0)]
    + [(1e-40, 0.0), (-0.0, 1e-40)],
    np.float32,
)


def test_double_precision_fuses_at_the_edges():
    a = np.array([-0.0, 0.0, 1, -1, 1e308, 1e-200, -1e-300, 1 + 2.0**-52, np.inf, np.nan, 3, -5e-324] * 3)[
        :32
    ]
    b = np.array([1, -1, 0.0, 0.0, 10, -1e-200, 1e-300, 1 - 2.0**-52, 0, 1, 7, 0.5] * 3)[:32]
    c = np.array([-0.0, -0.0, -0.0, 0.0, -1, 0.0, -0.0, -1, 1, 1, -21, 0.0] * 3)[:32]
    got = per_lane("fma.rn.f64 %d9, %d10, %d11, %d12;", [a, b, c], np.float64, "%d9", "b64")
    want = expected(*OPERATIONS["fma"], F64, "rn", a, b, c)
    assert np.signbit(want[[0, 1]]).all() and not np.signbit(want[[3, 10]]).any() and np.isinf(want[4])
    same(got, want)


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("modifiers", ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_order_zeros_and_treat_nan_as_asked(name, modifiers, kind):
    if kind == "f64" and modifiers:
        return
    dtype = {"f32": np.float32, "f64": np.float64} | {k: v for k, (v, _) in HALF.items()}
    a, b = (PAIRS[:, n].astype(dtype[kind]) for n in (0, 1))
    reg = {8: "%d", 4: "%r", 2: "%h"}[a.itemsize]
    first = 10 if reg == "%d" else 0
    width = f"b{8 * a.itemsize}"
    raw = [v.view(f"u{a.itemsize}") for v in (a, b)]
    got = per_lane(
        f"{name}{modifiers}.{kind} {reg}9, {reg}{first}, {reg}{first + 1};",
        raw,
        raw[0].dtype,
        f"{reg}9",
        width,
    )
    want = []
    for x, y in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
        absolute = "abs" in modifiers
        out = extreme(name, "NaN" in modifiers, abs(x) if absolute else x, abs(y) if absolute else y)
        if absolute and not np.isnan(out):
            out = np.copysign(out, -1 if np.signbit(x) != np.signbit(y) else 1)
        want.append(out)
    same(got.view(dtype[kind]), np.array(want), (name, modifiers, kind))


def test_packed_singles_flush_operands_and_results():
    x, y = np.float32([1e-40, 2.0**-100, -1e-40, 2] * 8), np.float32([1e30, 2.0**-30, 1e30, 3] * 8)
    text = "mov.b64 %d1, {%r0, %r1}; mov.b64 %d2, {%r1, %r0}; mov.b64 %d4, 0; "
    for name, ftz, want in (
        ("mul", "", x * y), ("mul", ".ftz", flush(flush(x) * y)), ("fma", ".ftz", flush(flush(x) * y)),
    ):  # fmt: skip
        third = ", %d4" if name == "fma" else ""
        for half in ("%r8", "%r9"):
            body = f"{text}{name}.rn{ftz}.f32x2 %d3, %d1, %d2{third}; mov.b64 {{%r8, %r9}}, %d3;"
            got = per_lane(body, [x, y], np.float32, half, "b32")
            np.testing.assert_array_equal(got, want, err_msg=f"{name}{ftz}")


def test_packed_extremes_of_magnitudes():
    x = np.float32(rng.standard_normal((2, 64))).astype(ml_dtypes.bfloat16)
    a, b = (v.view(np.uint32) for v in x)
    got = per_lane("max.xorsign.abs.bf16x2 %r9, %r0, %r1;", [a, b], np.uint32, "%r9", "b32").view(
        ml_dtypes.bfloat16
    )
    want = np.maximum(np.abs(x[0]), np.abs(x[1])).astype(np.float64) * np.where(
        np.signbit(x[0]) != np.signbit(x[1]), -1, 1
    )
    same(got, want)


def test_extremes_of_uniform_zeros():
    """One value for all lanes takes the scalar path."""
    for name, want in (
        ("min.f32", 0x80000000),
        ("max.f32", 0),
        ("min.NaN.f32", 0x80000000),
        ("max.NaN.f32", 0),
    ):
        for a, b in ((0, 0x80000000), (0x80000000, 0)):
            out = np.full(1, 7, np.uint32)
            run(f"mov.b32 %r1, {a}; mov.b32 %r2, {b}; {name} %r3, %r1, %r2; st.global.b32 [%d0], %r3;", [out])
            assert out[0] == want, name


def test_comparisons_flush_where_they_say():
    x = np.float32([1e-40, -1e-40, 0, 1] * 8)
    for name, ftz, want in (
        ("gt", "", x > 0),
        ("gt", ".ftz", x == 1),
        ("eq", ".ftz", np.abs(x) < 1),
        ("lt", "", x < 0),
        ("lt", ".ftz", x < -1),
    ):
        got = per_lane(
            f"mov.b32 %r1, 0; setp.{name}{ftz}.f32 %p1, %r0, %r1; selp.b32 %r9, 1, 0, %p1;",
            [x],
            np.uint32,
            "%r9",
            "b32",
        )
        np.testing.assert_array_equal(got, want, err_msg=name + ftz)
        got = per_lane(
            f"mov.b32 %r1, 0; set.{name}{ftz}.u32.f32 %r9, %r0, %r1;", [x], np.uint32, "%r9", "b32"
        )
        np.testing.assert_array_equal(got, np.where(want, 0xFFFFFFFF, 0))
    got = per_lane("slct.f32.f32 %r9, 7.0, 0f40000000, %r0;", [x], np.float32, "%r9", "b32")
    np.testing.assert_array_equal(got, np.where(x >= 0, 7, 2))
    got = per_lane("slct.ftz.f32.f32 %r9, 7.0, 0f40000000, %r0;", [x], np.float32, "%r9", "b32")
    np.testing.assert_array_equal(got, np.full(32, 7))


@pytest.mark.parametrize(
    ("target", "kind", "true"),
    [("f32", "b32", 0x3F800000), ("u32", "b32", 0xFFFFFFFF), ("f16", "b16", 0x3C00), ("bf16", "b16", 0x3F80)],
)
def test_set_writes_the_one_of_its_type(target, kind, true):
    h = np.float16([1, 2, np.nan, -0.0] * 8)
    reg, dtype = ("%r9", np.uint32) if kind == "b32" else ("%h9", np.uint16)
    got = per_lane(
        f"set.ge.{target}.f16 {reg}, %h0, %h1;",
        ps(h.view(np.uint16), np.roll(h, 1).view(np.uint16)),
        dtype,
        reg,
        kind,
    )
    np.testing.assert_array_equal(got, np.where(h >= np.roll(h, 1), true, 0))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_saturate_and_flush(kind):
    dtype, _ = HALF[kind]
    x = np.array([2.5, -1, 0.25, np.nan, 2.0**-15, -(2.0**-15), 2.0**-20, 2.0**-10] * 4).astype(dtype)
    y = np.array([1, 1, 1, 1, 1, 1, 2.0**-2, 2.0**-6] * 4).astype(dtype)
    raw = ps(x.view(np.uint16), y.view(np.uint16))
    if kind == "f16":
        product = (x * y).astype(np.float64)
        got = per_lane("mul.sat.f16 %h9, %h0, %h1;", raw, np.uint16, "%h9", "b16").view(dtype)
        same(got, np.where(np.isnan(product), 0, np.clip(product, 0, 1)))
        got = per_lane("mul.ftz.f16 %h9, %h0, %h1;", raw, np.uint16, "%h9", "b16").view(dtype)
        small = 2.0**-14
        same(got, flush((flush(x, small) * flush(y, small)), small).astype(np.float64))
    got = per_lane(f"fma.rn.relu.{kind} %h9, %h0, %h1, %h1;", raw, np.uint16, "%h9", "b16").view(dtype)
    want = (
        (x.astype(np.float64) * y.astype(np.float64) + y.astype(np.float64)).astype(np.float32).astype(dtype)
    )
    same(got, np.where(want.astype(np.float64) < 0, 0, want.astype(np.float64)))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_halves_of_f32x2_are_rounded_in_every_direction(name, ftz, mode):
    third = {"fma": ", %d4"}.get(name, "")
    text = "mov.b64 %d5, {%r0, %r1}; mov.b64 %d6, {%r1, %r2}; mov.b64 %d4, {%r2, %r0};\n"
    text += f"{name}.{mode}{ftz}.f32x2 %d3, %d5, %d6{third}; mov.b64 {{%r8, %r9}}, %d3;"
    inputs = (A, B, C)
    for result, operands in (("%r8", (0, 1, 2)), ("%r9", (1, 2, 0))):
        values = ", ".join(f"%f{n}" for n in operands[: 3 if third else 2])
        moves = "".join(f"mov.b32 %f{n}, %r{n};" for n in range(3))
        one = f"{moves} {name}.{mode}{ftz}.f32 %f9, {values}; mov.b32 %r8, %f9;"
        found, wanted = (
            lanes(text, inputs, np.uint32, result, "b32"),
            lanes(one, inputs, np.uint32, "%r8", "b32"),
        )
        np.testing.assert_array_equal(found, wanted)
