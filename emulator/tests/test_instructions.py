"""Scalar instructions on hand-written PTX against NumPy, lane by lane."""

import re

import numpy as np
import pytest

from .handwritten import aligned, per_lane, run

rng = np.random.default_rng(7)
EDGES = np.array([0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x12345678], np.uint32)
U = np.concatenate([EDGES, rng.integers(0, 1 << 32, 22, np.uint32)])
V = np.concatenate([EDGES[::-1], rng.integers(0, 1 << 32, 22, np.uint32)])
U64 = np.concatenate(
    [EDGES.astype(np.uint64) << np.uint64(16), rng.integers(0, 1 << 63, 22, np.uint64) * 2 + 1]
)
V64 = rng.permutation(U64)
X = np.concatenate(
    [
        np.array([0, -0.0, 1, -1.5, np.inf, -np.inf, np.nan, 3e38, 1e-40, 65520, 2.5, 3.5], np.float32),
        (rng.standard_normal(20) * 10.0 ** rng.integers(-6, 7, 20)).astype(np.float32),
    ]
)
Y = rng.permutation(X)


def i64(a):
    return a.astype(np.int64)


def s32(a):
    return a.view(np.int32).astype(np.int64)


INTEGER = {
    "add.s32": lambda a, b: i64(a) + i64(b),
    "sub.u32": lambda a, b: i64(a) - i64(b),
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32),
    "mul.hi.s32": lambda a, b: (s32(a) * s32(b)) >> 32,
    "min.s32": lambda a, b: np.minimum(s32(a), s32(b)),
    "max.u32": np.maximum,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": lambda a, b: np.array(
        [x << y & 0xFFFFFFFF if y < 32 else 0 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    ),
    "shr.u32": lambda a, b: np.array(
        [x >> y if y < 32 else 0 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    ),
    "shr.s32": lambda a, b: s32(a) >> np.minimum(b, 31).astype(np.int64),
    "div.u32": lambda a, b: np.where(b == 0, 0xFFFFFFFF, i64(a) // np.maximum(i64(b), 1)),
    "rem.u32": lambda a, b: np.where(b == 0, i64(a), i64(a) % np.maximum(i64(b), 1)),
    "div.s32": lambda a, b: np.array(
        [int(x / y) if y else -1 for x, y in zip(s32(a).tolist(), s32(b).tolist(), strict=True)]
    ),
    "rem.s32": lambda a, b: np.array(
        [x - int(x / y) * y if y else x for x, y in zip(s32(a).tolist(), s32(b).tolist(), strict=True)]
    ),
}


@pytest.mark.parametrize("opcode", INTEGER)
def test_integer_arithmetic(opcode):
    a, b = (U, V) if not opcode.startswith("sh") else (U, V % 40)
    got = per_lane(f"{opcode} %r2, %r0, %r1;", [a, b], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(
        got, (i64(np.asarray(INTEGER[opcode](a, b))) & 0xFFFFFFFF).astype(np.uint32)
    )


@pytest.mark.parametrize("opcode", INTEGER)
def test_uniform_operands_take_the_other_path_and_agree(opcode):
    """Where every lane holds the same value the emulator computes with Python ints."""
    for a, b in ((0x80000001, 3), (7, 0xFFFFFFFE), (0xFFFFFFFF, 33)):
        out = np.zeros(1, np.uint32)
        b = b % 40 if opcode.startswith("sh") else b
        run(f"mov.b32 %r0, {a}; mov.b32 %r1, {b}; {opcode} %r2, %r0, %r1; st.global.b32 [%d0], %r2;", [out])
        want = INTEGER[opcode](np.array([a], np.uint32), np.array([b], np.uint32))
        assert out[0] == int(np.asarray(want).astype(np.int64)[0]) & 0xFFFFFFFF, (opcode, a, b)


def test_wide_multiplication_and_mad():
    got = per_lane("mul.wide.s32 %d9, %r0, %r1;", [U, V], np.int64, "%d9", "b64")
    np.testing.assert_array_equal(got, s32(U) * s32(V))
    got = per_lane("mad.wide.u32 %d9, %r0, %r1, %d12;", [U, V, U64], np.uint64, "%d9", "b64")
    np.testing.assert_array_equal(got, U.astype(np.uint64) * V.astype(np.uint64) + U64)
    got = per_lane("mad.lo.s32 %r3, %r0, %r1, %r2;", [U, V, U], np.uint32, "%r3", "b32")
    np.testing.assert_array_equal(got, U * V + U)
    got = per_lane("mul.hi.u64 %d9, %d10, %d11;", [U64, V64], np.uint64, "%d9", "b64")
    assert got.tolist() == [a * b >> 64 for a, b in zip(U64.tolist(), V64.tolist(), strict=True)]


BITS = {
    "popc.b32 %r2, %r0;": lambda a: a.bit_count(),
    "clz.b32 %r2, %r0;": lambda a: 32 - a.bit_length(),
    "brev.b32 %r2, %r0;": lambda a: int(f"{a:032b}"[::-1], 2),
    "bfe.u32 %r2, %r0, 5, 9;": lambda a: a >> 5 & 0x1FF,
    "bfe.s32 %r2, %r0, 28, 9;": lambda a: ((a >> 28) - (16 if a >> 31 else 0)) & 0xFFFFFFFF,
    "bfi.b32 %r2, %r0, 85, 4, 8;": lambda a: 85 & ~0xFF0 | (a & 0xFF) << 4,
    "bfind.u32 %r2, %r0;": lambda a: (a.bit_length() - 1) & 0xFFFFFFFF,
    "not.b32 %r2, %r0;": lambda a: ~a & 0xFFFFFFFF,
    "neg.s32 %r2, %r0;": lambda a: -a & 0xFFFFFFFF,
    "abs.s32 %r2, %r0;": lambda a: abs(a - (1 << 32 if a >> 31 else 0)) & 0xFFFFFFFF,
    "prmt.b32 %r2, %r0, 287454020, 0x8254;": lambda a: (
        0x44 | 0x33 << 8 | (a >> 16 & 0xFF) << 16 | (0xFF if a & 0x80 else 0) << 24
    ),
    "lop3.b32 %r2, %r0, 252645135, 0xFF, 0xE8;": lambda a: (
        (a & 0x0F0F0F0F) | (a & 0xFF) | (0x0F0F0F0F & 0xFF)
    ),
    "shf.l.wrap.b32 %r2, %r0, 3, 36;": lambda a: ((3 << 32 | a) << 4) >> 32 & 0xFFFFFFFF,
    "shf.r.clamp.b32 %r2, %r0, 3, 40;": lambda a: 3,
}


@pytest.mark.parametrize("text", BITS)
def test_bit_instructions(text):
    got = per_lane(text, [U], np.uint32, "%r2", "b32")
    assert got.tolist() == [BITS[text](a) for a in U.tolist()]


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


@pytest.mark.parametrize("name", COMPARE)
@pytest.mark.parametrize("kind", ["u32", "s32", "f32"])
def test_setp(name, kind):
    text = f"setp.{name}.{kind} %p0, %r0, %r1; selp.b32 %r2, 5, 9, %p0;"
    a, b = (X, Y) if kind == "f32" else (U, V)
    got = per_lane(text, [a, b], np.uint32, "%r2", "b32")
    x, y = (a, b) if kind != "s32" else (s32(a), s32(b))
    want = COMPARE[name](x, y)
    if kind == "f32" and name == "ne":
        want &= ~np.isnan(x) & ~np.isnan(y)
    np.testing.assert_array_equal(got, np.where(want, 5, 9))


def test_setp_unordered_and_combined():
    got = per_lane("setp.ltu.f32 %p0, %r0, %r1; selp.b32 %r2, 1, 0, %p0;", [X, Y], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, (X < Y) | np.isnan(X) | np.isnan(Y))
    text = "setp.gt.u32 %p1, %r0, 100; setp.lt.and.u32 %p0|%p2, %r0, %r1, %p1; selp.b32 %r2, 2, 0, %p0; "
    text += "@%p2 or.b32 %r2, %r2, 1;"
    got = per_lane(text, [U, V], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, 2 * ((U < V) & (U > 100)) + ((U >= V) & (U > 100)))


FLOAT = {
    "add.f32": lambda a, b: a + b,
    "sub.rn.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "div.rn.f32": lambda a, b: a / b,
    "min.f32": np.fmin,
    "max.f32": np.fmax,
    "max.NaN.f32": np.maximum,
}


@pytest.mark.parametrize("opcode", FLOAT)
def test_single_precision(opcode):
    got = per_lane(f"{opcode} %r2, %r0, %r1;", [X, Y], np.float32, "%r2", "b32")
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, FLOAT[opcode](X, Y))


def test_fma_rounds_once_and_in_the_asked_direction():
    a = np.float32(1 + 2.0**-12) + np.arange(32, dtype=np.float32) * np.float32(2.0**-20)
    exact = [float(x) * float(x) - 1.0 for x in a]
    got = per_lane("mov.f32 %r3, 0fBF800000; fma.rn.f32 %r2, %r0, %r0, %r3;", [a], np.float32, "%r2", "b32")
    np.testing.assert_array_equal(got, np.array(exact, np.float32))
    assert (got != a * a - np.float32(1)).any()
    down = per_lane("mov.f32 %r3, 0f3F800000; add.rm.f32 %r2, %r0, %r3;", [X], np.float32, "%r2", "b32")
    up = per_lane("mov.f32 %r3, 0f3F800000; add.rp.f32 %r2, %r0, %r3;", [X], np.float32, "%r2", "b32")
    finite = np.isfinite(X)
    true = X[finite].astype(np.float64) + 1
    assert (down[finite] <= true).all() and (up[finite] >= true).all()
    assert (np.nextafter(down[finite], np.float32(np.inf)) >= up[finite]).all()


def test_packed_f32x2_and_mixed_precision():
    text = "mov.b64 %d9, {%r0, %r1}; mov.b64 %d8, {%r1, %r0}; fma.rn.f32x2 %d7, %d9, %d8, %d9;"
    a, b = X[12:].repeat(2)[:32], Y[::-1].copy()
    b[~np.isfinite(b)] = 1
    a[~np.isfinite(a)] = 2
    a, b = np.clip(a, -1e15, 1e15), np.clip(b, -1e15, 1e15)
    got = per_lane(text, [a, b], np.uint64, "%d7", "b64").view(np.float32).reshape(32, 2)
    product = a.astype(np.float64) * b
    np.testing.assert_array_equal(got[:, 0], (product + a).astype(np.float32))
    np.testing.assert_array_equal(got[:, 1], (product + b).astype(np.float32))


APPROX = {"ex2.approx.ftz.f32": np.exp2, "rcp.approx.f32": np.reciprocal, "sqrt.rn.f32": np.sqrt,
          "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x), "lg2.approx.f32": np.log2,
          "tanh.approx.f32": np.tanh}  # fmt: skip


@pytest.mark.parametrize("opcode", APPROX)
def test_functions(opcode):
    x = np.abs(rng.standard_normal(32)).astype(np.float32) + np.float32(0.01)
    got = per_lane(f"{opcode} %r2, %r0;", [x], np.float32, "%r2", "b32")
    np.testing.assert_allclose(got, APPROX[opcode](x.astype(np.float64)), rtol=2.0**-23)


def bf16(x):
    b = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + (b >> 16 & 1)) >> 16).astype(np.uint32)


def test_conversions():
    x = np.where(np.isnan(X), np.float32(1), X).astype(np.float32)
    got = per_lane("cvt.rn.bf16x2.f32 %r2, %r0, %r1;", [x, x[::-1].copy()], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, bf16(x) << 16 | bf16(x[::-1].copy()))
    got = per_lane("cvt.rn.f16.f32 %h9, %r0;", [x], np.uint16, "%h9", "b16")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, x.astype(np.float16).view(np.uint16))
    got = per_lane("cvt.rzi.s32.f32 %r2, %r0;", [X], np.int32, "%r2", "b32")
    want = np.clip(np.trunc(np.nan_to_num(X.astype(np.float64), nan=0)), -(2.0**31), 2.0**31 - 1)
    np.testing.assert_array_equal(got, want.astype(np.int64).astype(np.int32))
    got = per_lane("cvt.rn.f32.s32 %r2, %r0;", [U], np.float32, "%r2", "b32")
    np.testing.assert_array_equal(got, s32(U).astype(np.float32))
    got = per_lane("cvt.s64.s32 %d9, %r0;", [U], np.int64, "%d9", "b64")
    np.testing.assert_array_equal(got, s32(U))
    got = per_lane("cvt.u16.u32 %h9, %r0; cvt.s32.s16 %r2, %h9;", [U], np.int32, "%r2", "b32")
    np.testing.assert_array_equal(got, U.astype(np.uint16).view(np.int16))
    got = per_lane("cvt.sat.u8.s32 %r2, %r0;", [U], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, np.clip(s32(U), 0, 255))


def test_double_precision():
    a, b = rng.standard_normal(32), rng.standard_normal(32)
    text = "add.f64 %d9, %d10, %d11; mul.f64 %d9, %d9, %d10; div.rn.f64 %d9, %d9, %d11;"
    np.testing.assert_array_equal(per_lane(text, [a, b], np.float64, "%d9", "b64"), (a + b) * a / b)
    got = per_lane("cvt.rn.f32.f64 %r2, %d10; cvt.f64.f32 %d9, %r2;", [a], np.float64, "%d9", "b64")
    np.testing.assert_array_equal(got, a.astype(np.float32))
    got = per_lane("cvt.rzi.s64.f64 %d9, %d10;", [a * 1e9], np.int64, "%d9", "b64")
    np.testing.assert_array_equal(got, np.trunc(a * 1e9))


LANE = np.arange(32)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("shfl.sync.idx.b32 %r2, %r0, 5, 31, -1;", lambda a: np.full(32, a[5])),
        ("shfl.sync.up.b32 %r2, %r0, 3, 0, -1;", lambda a: np.where(LANE < 3, a, a[LANE - 3])),
        ("shfl.sync.down.b32 %r2, %r0, 2, 31, -1;", lambda a: np.where(LANE > 29, a, a[(LANE + 2) % 32])),
        ("shfl.sync.bfly.b32 %r2, %r0, 16, 31, -1;", lambda a: a[LANE ^ 16]),
        ("shfl.sync.idx.b32 %r2, %r0, 1, 0x181F, -1;", lambda a: a[LANE // 8 * 8 + 1]),
        ("redux.sync.add.u32 %r2, %r0, -1;", lambda a: np.full(32, a.sum(dtype=np.uint32))),
        ("redux.sync.min.s32 %r2, %r0, -1;", lambda a: np.full(32, a.view(np.int32).min().view(np.uint32))),
        (
            "setp.gt.u32 %p0, %r0, 1000; vote.sync.ballot.b32 %r2, %p0, -1;",
            lambda a: np.full(32, sum(1 << n for n in range(32) if a[n] > 1000)),
        ),
        (
            "elect.sync %r3|%p0, -1; selp.b32 %r2, 1, 0, %p0; add.s32 %r2, %r2, %r3;",
            lambda a: (LANE == 0).astype(np.uint32),
        ),
        (
            "and.b32 %r3, %r0, 1; match.any.sync.b32 %r2, %r3, -1;",
            lambda a: np.array([sum(1 << k for k in range(32) if a[k] % 2 == a[n] % 2) for n in range(32)]),
        ),
    ],
)
def test_warp_wide(text, want):
    got = per_lane(text, [U], np.uint32, "%r2", "b32")
    np.testing.assert_array_equal(got, np.asarray(want(U)).astype(np.uint32))


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_of_all_lanes_of_two_warps(space):
    out = np.zeros(64, np.uint32)
    total = np.zeros(1, np.uint32)
    target = "%d1" if space == "global" else "%r9"
    body = f"""
    mov.u32 %r0, %tid.x; mov.b32 %r9, cell;
    setp.eq.b32 %p0, %r0, 0; mov.b32 %r3, 0;
    @%p0 st.shared.b32 [cell], %r3;
    bar.sync 0;
    atom.{space}.add.u32 %r1, [{target}], 1;
    mul.wide.u32 %d5, %r0, 4; add.s64 %d5, %d5, %d0; st.global.b32 [%d5], %r1;
    """
    run(body, [out, total], smem=".shared .align 4 .b8 cell[4];", block=(64, 1, 1))
    assert sorted(out.tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("text", "start", "want"),
    [
        ("red.global.max.s32 [%d0], %r0;", -5, 31),
        ("red.global.min.u32 [%d0], %r0;", 9, 0),
        ("setp.lt.u32 %p0, %r0, 3; @%p0 red.global.xor.b32 [%d0], %r0;", 5, 5 ^ 1 ^ 2),
        ("atom.global.inc.u32 %r1, [%d0], 9;", 0, 32 % 10),
        ("red.relaxed.gpu.global.add.f32 [%d0], %r1;", 0, 0x43000000),
        ("mov.b32 %r2, 0x3F803F80; red.global.add.noftz.bf16x2 [%d0], %r2;", 0, 0x42004200),
    ],
)
def test_reductions(text, start, want):
    cell = np.array([start & 0xFFFFFFFF], np.uint32)
    run("mov.u32 %r0, %tid.x; mov.f32 %r1, 0f40800000;" + text, [cell])
    assert cell[0] == want & 0xFFFFFFFF


def test_compare_and_swap_builds_a_lock():
    out, lock = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = """
    mov.u32 %r0, %tid.x; and.b32 %r0, %r0, 31; setp.ne.b32 %p0, %r0, 0; @%p0 bra END;
    AGAIN: atom.acquire.gpu.global.cas.b32 %r1, [%d1], 0, 1;
    setp.ne.b32 %p1, %r1, 0; @%p1 bra AGAIN;
    ld.global.b32 %r2, [%d0]; add.s32 %r2, %r2, 1; st.global.b32 [%d0], %r2;
    atom.release.gpu.global.exch.b32 %r1, [%d1], 0;
    END:
    """
    run(body, [out, lock], block=(128, 1, 1), grid=(3, 1, 1))
    assert out[0] == 12 and lock[0] == 0


def test_vector_loads_and_stores_of_every_width():
    source = aligned(8 * 32, np.uint32, rng.integers(0, 1 << 32, 8 * 32, np.uint32))
    for count, kind in ((2, "b32"), (4, "b32"), (8, "b32"), (2, "b64"), (4, "b64")):
        size = count * (4 if kind == "b32" else 8)
        out = aligned(size * 32 // 4)
        regs = ", ".join(f"%r{10 + n}" if kind == "b32" else f"%d{10 + n}" for n in range(count))
        body = f"""
        mov.u32 %r0, %tid.x; mul.wide.u32 %d5, %r0, {size}; add.s64 %d6, %d5, %d1; add.s64 %d7, %d5, %d0;
        ld.global.v{count}.{kind} {{{regs}}}, [%d6]; st.global.v{count}.{kind} [%d7], {{{regs}}};
        """
        run(body, [out, source])
        np.testing.assert_array_equal(out, source[: len(out)])


def test_narrow_loads_extend_and_narrow_stores_cut():
    source = rng.integers(0, 256, 32, np.uint8)
    got = np.zeros(32, np.int32)
    body = """
    mov.u32 %r0, %tid.x; cvt.u64.u32 %d5, %r0; add.s64 %d6, %d5, %d1;
    ld.global.s8 %r1, [%d6]; shl.b64 %d7, %d5, 2; add.s64 %d7, %d7, %d0; st.global.b32 [%d7], %r1;
    add.s32 %r2, %r1, 257; st.global.b8 [%d6], %r2;
    """
    before = source.copy()
    run(body, [got, source])
    np.testing.assert_array_equal(got, before.view(np.int8))
    np.testing.assert_array_equal(source, before + np.uint8(1))


def test_instructions_run_alike_with_a_register_in_braces():
    """As Triton writes loads and stores of one element."""
    text = """
    ld.global.b32 |%r5|, [%d30]; mov.b32 |%r6|, |%r5|; @%p1 ld.global.b32 |%r6|, [%d1];
    st.shared.b32 [%r9], |%r6|; ld.shared.b32 |%r7|, [%r9]; atom.shared.add.u32 |%r8|, [%r9], |%r7|;
    red.shared.add.u32 [%r9], |%r8|; ld.shared.b32 |%r7|, [%r9]; st.global.b32 [%d31], |%r7|;
    """
    prologue = """mov.u32 %r0, %tid.x; mul.wide.u32 %d9, %r0, 4; add.s64 %d30, %d1, %d9;
    add.s64 %d31, %d0, %d9; shl.b32 %r1, %r0, 2; mov.b32 %r9, cell; add.s32 %r9, %r9, %r1;
    setp.lt.u32 %p1, %r0, 3;"""
    data = np.arange(32, dtype=np.uint32) + 100
    for marks in ("", " "):
        out = np.zeros(32, np.uint32)
        body = re.sub(r"\|(%\w+)\|", rf"{{{marks}\1{marks}}}", text)
        run(prologue + body, [out, data], smem=".shared .align 4 .b8 cell[128];")
        np.testing.assert_array_equal(out, 3 * np.where(np.arange(32) < 3, 100, data))
