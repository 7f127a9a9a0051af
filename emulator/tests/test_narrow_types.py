"""Conversions of formats of 8 bits and fewer, and integer dot products, against ml_dtypes and NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from cute_emulator.units import mma, tcgen05, wgmma

from .handwritten import aligned, per_lane, run
from .test_matrix_units import a_place, c_place, fragment, instruction, place_operand

rng = np.random.default_rng(11)
EDGES = [0, -0.0, 1, -1, 0.25, 0.75, 5, -6, 7, 449, -1e9, np.inf, -np.inf, 2.0**-126, 3e38, 1e-40]
X = np.float32([*EDGES, *(rng.standard_normal(16) * 2.0 ** rng.integers(-8, 9, 16))])
Y = rng.permutation(X)
FORMATS = {
    "e4m3x2": ml_dtypes.float8_e4m3fn,
    "e5m2x2": ml_dtypes.float8_e5m2,
    "e2m3x2": ml_dtypes.float6_e2m3fn,
    "e3m2x2": ml_dtypes.float6_e3m2fn,
    "e2m1x2": ml_dtypes.float4_e2m1fn,
}


def nearest(x, dtype):
    """Clamped to the largest finite value, then rounded by ml_dtypes: bit patterns."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.float32([min(max(v, -largest), largest) for v in x]).astype(dtype).view(np.uint8)


def packed(hi, lo, name):
    if name == "e2m1x2":
        return hi.astype(np.uint32) << 4 | lo
    return hi.astype(np.uint32) << 8 | lo


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", FORMATS)
def test_pairs_of_floats(name, relu):
    x, y = (np.maximum(v, 0) + np.float32(0) if relu else v for v in (X, Y))
    want = packed(nearest(x, FORMATS[name]), nearest(y, FORMATS[name]), name)
    if name == "e2m1x2":  # the destination is a byte
        text = f".reg .b8 small; cvt.rn.satfinite{relu}.{name}.f32 small, %r0, %r1; cvt.u32.u8 %r2, small;"
    else:
        text = f"cvt.rn.satfinite{relu}.{name}.f32 %h9, %r0, %r1; cvt.u32.u16 %r2, %h9;"
    got = per_lane(text, [X, Y], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_pairs_to_halves(name):
    bits = 4 if name == "e2m1x2" else 8
    codes = rng.permutation(1 << {"e2m1x2": 4, "e2m3x2": 6, "e3m2x2": 6}.get(name, 8))
    hi, lo = np.resize(codes, 32).astype(np.uint8), np.resize(codes[::-1], 32).astype(np.uint8)
    words = hi.astype(np.uint32) << bits | lo
    source = "mov.b16 {small, other}, %h9; " if name == "e2m1x2" else ""
    operand = "small" if source else "%h9"
    text = f".reg .b8 small, other; cvt.u16.u32 %h9, %r0; {source}cvt.rn.f16x2.{name} %r2, {operand};"
    got = per_lane(text, [words], np.uint32, "%r2", "b32").view(np.float16).reshape(32, 2)
    want = np.stack([lo.view(FORMATS[name]), hi.view(FORMATS[name])], 1).astype(np.float32)
    np.testing.assert_array_equal(got.astype(np.float32), want)


@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_scale_exponents(rounding):
    x = np.abs(np.where(np.isinf(X) | (X == 0), np.float32(3), X))
    x = np.where(x < 2.0**-126, np.float32(0.3), x)
    exponent = (np.floor if rounding == "rz" else np.ceil)(np.log2(x.astype(np.float64)))
    text = f"cvt.{rounding}.satfinite.ue8m0x2.f32 %h9, %r0, %r1; cvt.rn.bf16x2.ue8m0x2 %r2, %h9;"
    got = per_lane(text, [x, x[::-1].copy()], np.uint32, "%r2", "b32")
    low, high = ((w.astype(np.uint32) << 16).view(np.float32) for w in (got & 0xFFFF, got >> 16))
    exponent = np.minimum(exponent, 127)
    np.testing.assert_array_equal(high, np.exp2(exponent))
    np.testing.assert_array_equal(low, np.exp2(exponent[::-1]))


WORDS = rng.integers(0, 1 << 32, (3, 32), np.uint32)


@pytest.mark.parametrize("a_type, b_type", [("s32", "s32"), ("u32", "s32"), ("s32", "u32"), ("u32", "u32")])
def test_dot_products_of_bytes(a_type, b_type):
    a, b, c = WORDS
    size = {"s32": "i", "u32": "u"}
    got = per_lane(f"dp4a.{a_type}.{b_type} %r3, %r0, %r1, %r2;", [a, b, c], np.uint32, "%r3", "b32")
    x, y = (w.view(f"{size[t]}1").reshape(32, 4).astype(object) for w, t in ((a, a_type), (b, b_type)))
    np.testing.assert_array_equal(got, ((x * y).sum(1) + c.astype(object)) % 2**32)
    for half in ("lo", "hi"):
        text = f"dp2a.{half}.{a_type}.{b_type} %r3, %r0, %r1, %r2;"
        got = per_lane(text, [a, b, c], np.uint32, "%r3", "b32")
        wide = a.view(f"{size[a_type]}2").reshape(32, 2).astype(object)
        part = y[:, :2] if half == "lo" else y[:, 2:]
        np.testing.assert_array_equal(got, ((wide * part).sum(1) + c.astype(object)) % 2**32)


def test_extremes_clamped_at_zero():
    a, b, _ = WORDS.view(np.int32)
    for name, f in (("min", np.minimum), ("max", np.maximum)):
        got = per_lane(f"{name}.relu.s32 %r2, %r0, %r1;", [a, b], np.int32, "%r2", "b32")
        np.testing.assert_array_equal(got, np.maximum(f(a, b), 0))


INTEGER_MMA = """
mov.u32 %r20, %tid.x; mul.lo.u32 %r21, %r20, 16; cvt.u64.u32 %d4, %r21;
add.s64 %d5, %d1, %d4; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d5];
add.s64 %d5, %d2, %d4; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d5];
mov.b32 %r8, 7;
mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.u8.s32
    {%r10, %r11, %r12, %r13}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r8, %r8, %r8, %r8};
add.s64 %d5, %d0, %d4; st.global.v4.b32 [%d5], {%r10, %r11, %r12, %r13};
"""


def test_an_integer_mma_instruction():
    registers = [aligned(128) for _ in range(3)]
    for r in registers[1:]:
        r[:] = rng.integers(0, 1 << 32, 128, np.uint32)
    out, a, b = registers
    run(INTEGER_MMA, registers)
    left, right = np.zeros((16, 32), np.int64), np.zeros((8, 32), np.int64)
    for lane in range(32):
        for i in range(4):
            at = 4 * (lane % 4) + 16 * (i // 2)
            left[lane // 4 + 8 * (i % 2), at : at + 4] = a[4 * lane + i : 4 * lane + i + 1].view(np.int8)
        for i in range(2):
            at = 4 * (lane % 4) + 16 * i
            right[lane // 4, at : at + 4] = b[4 * lane + i : 4 * lane + i + 1].view(np.uint8)
    want = left @ right.T + 7
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            assert out.view(np.int32)[4 * lane + i] == want[row, column]


MATRICES_OF_BYTES = """
mov.u32 %r0, %tid.x; mov.u32 %r1, there; mad.lo.u32 %r2, %r0, 16, %r1;
mul.lo.u32 %r3, %r0, 16; cvt.u64.u32 %d4, %r3;
add.s64 %d5, %d1, %d4; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d5];
st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};
bar.warp.sync -1;
ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r10, %r11, %r12, %r13}, [%r2];
bar.warp.sync -1;
stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r2], {%r10, %r11, %r12, %r13};
bar.warp.sync -1;
ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];
add.s64 %d5, %d0, %d4; st.global.v4.b32 [%d5], {%r4, %r5, %r6, %r7};
"""


def test_matrices_of_bytes_are_transposed():
    out, there = aligned(512, np.uint8), aligned(512, np.uint8)
    there[:] = rng.integers(0, 256, 512)
    run(MATRICES_OF_BYTES, [out, there], smem=".shared .align 16 .b8 there[512];")
    rows = there.reshape(2, 16, 16)
    want = np.zeros((4, 8, 16), np.uint8)
    for matrix, half, lane, v in itertools.product(range(2), range(2), range(32), range(4)):
        byte = rows[matrix, 4 * (lane % 4) + v, lane // 4 + 8 * half]  # of register 2 * matrix + half
        want[2 * matrix + half, 2 * (lane % 4) + v % 2, lane // 4 + 8 * (v // 2)] = byte
    np.testing.assert_array_equal(out, want.reshape(-1))


def test_vector_registers():
    a, b, _ = WORDS
    text = """
    { .reg .v2 .b32 pair; mov.b32 pair.x, %r0; mov.b32 pair.y, %r1;
    .reg .b32 %slot; mov.u32 %slot, space; mad.lo.u32 %slot, %r63, 8, %slot;
    st.shared.v2.b32 [%slot], pair; ld.shared.v2.b32 {%r3, %r4}, [%slot]; sub.s32 %r2, %r4, %r3; }
    """
    got = per_lane(".shared .align 8 .b8 space[256];" + text, [a, b], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, b - a)


EXTREMES = np.array([-(1 << 31), (1 << 31) - 1, 0, 12345], np.int64)


@pytest.mark.parametrize("a_type, b_type", [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integer_products_wrap_or_saturate(a_type, b_type, saturate):
    rng = np.random.default_rng(0)
    signed = {"s8": np.int8, "u8": np.uint8}
    a, b = (rng.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (64, 24))
    c = rng.choice(EXTREMES, (64, 24))
    want = c + a.view(signed[a_type]).astype(np.int64) @ b.view(signed[b_type]).astype(np.int64).T
    want = np.clip(want, EXTREMES[0], EXTREMES[1]) if saturate else want
    want = want.astype(np.uint32)
    fc = fragment(c[:16, :8].astype(np.uint32), 4, c_place)
    fa = fragment(a[:16], 4, a_place(4))
    fb = fragment(b[:8], 2, lambda i, t, e: (t // 4, 4 * (t % 4) + e + 16 * i))
    got = mma.c_matrix(mma.mma_sync(fa, fb, fc, a_type, b_type, "s32", saturate), "s32")
    np.testing.assert_array_equal(got.view(np.uint32), want[:16, :8])

    operation = wgmma.Wgmma(24, a_type, b_type, "s32", saturate=saturate)
    smem = np.full(1 << 16, 0xFF, np.uint8)
    da, db = place_operand(smem, 0, a, False, 1), place_operand(smem, 32768, b, False, 1)
    for warp in range(4):
        rows = slice(16 * warp, 16 * warp + 16)
        mine, its = operation.operand_a(smem, da)[rows], operation.operand_b(smem, db)
        before = fragment(c[rows].astype(np.uint32), 12, c_place)
        after = mma.c_matrix(operation.multiply(mine, its, before), "s32")
        np.testing.assert_array_equal(after.view(np.uint32), want[rows])


def test_many_integer_products_in_a_row_are_exact():
    """Beyond 258 products of the largest bytes a single no longer holds the sum."""
    rng = np.random.default_rng(3)
    smem = np.zeros(1 << 17, np.uint8)
    shape = tcgen05.decode_instruction(instruction(128, 16, 0, 0, d=2), "i8", 1)
    steps, want = [], np.zeros((128, 16), np.int64)
    for n in range(24):
        a, b = (rng.integers(250, 256, (rows, 32), np.uint8) for rows in (128, 16))
        at = n // 4 * 20480 + n % 4 * 32
        tiles = (place_operand(smem, at, a, False, 1), place_operand(smem, at + 16384, b, False, 1))
        want += a.astype(np.int64) @ b.T.astype(np.int64)
        steps.append(tcgen05.Mma(shape, 0, *tiles, accumulate=n > 0))
    cells = np.zeros((128, 512), np.uint32)
    assert all(tcgen05.continues(steps[0], step) for step in steps[1:]) and want.min() > 1 << 24
    for part in (steps[:9], steps[9:]):  # 288 products, 480
        tcgen05.join(tuple(part)).run([smem], [cells])
    np.testing.assert_array_equal(cells[:, :16].view(np.int32), want)


def test_descriptors_of_integers_that_there_are_not():
    with pytest.raises(ValueError, match="integers are not negated"):
        tcgen05.decode_instruction(instruction(128, 16, 0, 0, d=2, negate_a=1), "i8", 1)
    with pytest.raises(ValueError, match="n=40"):
        wgmma.Wgmma(40, "s8", "u8", "s32")
    assert wgmma.Wgmma(24, "s8", "u8", "s32").k == 32 and wgmma.Wgmma(40, "e4m3", "e4m3").k == 32
