"""Shuffles, votes, matches and reductions of some lanes of a warp, as the ISA defines them lane by lane."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cute_emulator.instructions.bulk import reducer

from .handwritten import per_lane

FEW = settings(max_examples=12, deadline=None)
WORDS = hnp.arrays(np.uint32, 32)
MASKS = st.integers(1, 2**32 - 1) | st.sampled_from([1, 0xFFFFFFFF, 1 << 31, 0x0000FFFF])
POISON = 0xFFFFFFFF


def of_lanes(text, mask, columns, kept=0x5EED):
    """What %r9 is in each lane after some have executed an instruction; `{m}` stands for their mask."""
    body = f"mov.u32 %r40, %laneid; mov.b32 %r41, 1; shl.b32 %r41, %r41, %r40; and.b32 %r41, %r41, {mask};"
    body += (
        f"mov.b32 %r9, {kept}; setp.eq.u32 %p9, %r41, 0; @%p9 bra OUT; {text.replace('{m}', str(mask))} OUT:"
    )
    return per_lane(body, columns, np.uint32, "%r9", "b32").tolist()


def chosen(mask):
    return [n for n in range(32) if mask >> n & 1]


@FEW
@given(
    st.sampled_from(["idx", "up", "down", "bfly"]),
    WORDS,
    WORDS,
    st.integers(0, 0x1F1F) | st.sampled_from([31, 0, 0x181F, 0x1C03]),
    MASKS,
)
def test_shuffles(mode, a, b, control, mask):
    """The pseudo-code of `shfl.sync`, for amounts beyond 31 and any clamp and segment mask."""
    b = np.where(np.arange(32) % 2 == 0, b, b & 7)
    want = [0x5EED] * 32
    for lane in chosen(mask):
        bval, cval, segment = int(b[lane]) & 31, control & 31, control >> 8 & 31
        top, low = lane & segment | cval & ~segment & 31, lane & segment
        if mode == "up":
            source = lane - bval
            inside = source >= top
        elif mode == "idx":
            source = low | bval & ~segment & 31
            inside = source <= top
        else:
            source = lane + bval if mode == "down" else lane ^ bval
            inside = source <= top
        source = source if inside else lane
        got = int(a[source]) if mask >> source & 1 else POISON  # undefined by the ISA
        want[lane] = (got ^ inside) & 0xFFFFFFFF
    text = f"shfl.sync.{mode}.b32 %r8|%p1, %r0, %r1, {control}, {{m}}; "
    text += "selp.b32 %r7, 1, 0, %p1; xor.b32 %r9, %r8, %r7;"
    assert of_lanes(text, mask, [a, b]) == want


@FEW
@given(
    st.sampled_from(["all", "any", "uni", "ballot"]),
    st.booleans(),
    MASKS,
    st.sampled_from([0, 0xFFFFFFFF]) | MASKS,
)
def test_votes(mode, negated, mask, yes):
    p = np.array([yes >> n & 1 for n in range(32)], np.uint32)
    votes = [bool(p[n]) != negated for n in chosen(mask)]
    result = {"all": all(votes), "any": any(votes), "uni": len(set(votes)) == 1}
    if mode == "ballot":
        want = sum(1 << n for n, v in zip(chosen(mask), votes, strict=True) if v)
        text = f"vote.sync.ballot.b32 %r9, {'!' * negated}%p1, {{m}};"
    else:
        want = int(result[mode])
        text = f"vote.sync.{mode}.pred %p2, {'!' * negated}%p1, {{m}}; selp.b32 %r9, 1, 0, %p2;"
    text = "setp.ne.u32 %p1, %r0, 0;" + text
    assert of_lanes(text, mask, [p]) == [want if mask >> n & 1 else 0x5EED for n in range(32)]


@FEW
@given(st.sampled_from(["b32", "b64"]), WORDS, st.integers(0, 3), MASKS)
def test_matches(kind, a, bits, mask):
    a = a & np.uint32((1 << bits) - 1)
    load = "mov.b32 %r1, %r0;" if kind == "b32" else "mov.b64 %d9, {%r63, %r0}; mov.b64 %d9, {%r2, %r0};"
    value = "%r1" if kind == "b32" else "%d9"
    alike = {n: sum(1 << k for k in chosen(mask) if a[k] == a[n]) for n in chosen(mask)}
    got = of_lanes(f"mov.b32 %r2, 5; {load} match.any.sync.{kind} %r9, {value}, {{m}};", mask, [a])
    assert got == [alike.get(n, 0x5EED) for n in range(32)]
    same = len({int(a[n]) for n in chosen(mask)}) == 1
    text = f"mov.b32 %r2, 5; {load} match.all.sync.{kind} %r8|%p1, {value}, {{m}}; "
    text += "selp.b32 %r7, 1, 0, %p1; xor.b32 %r9, %r8, %r7;"
    want = (mask if same else 0) ^ same
    assert of_lanes(text, mask, [a]) == [want if mask >> n & 1 else 0x5EED for n in range(32)]


INTEGER = {
    "add.u32": sum, "add.s32": sum, "min.u32": min, "max.u32": max,
    "min.s32": lambda v: min(v, key=lambda x: x ^ 1 << 31),
    "max.s32": lambda v: max(v, key=lambda x: x ^ 1 << 31),
    "and.b32": lambda v: int(np.bitwise_and.reduce(v)), "or.b32": lambda v: int(np.bitwise_or.reduce(v)),
    "xor.b32": lambda v: int(np.bitwise_xor.reduce(v)),
}  # fmt: skip


@pytest.mark.parametrize("operation", INTEGER)
@FEW
@given(WORDS, MASKS)
def test_reductions(operation, a, mask):
    want = INTEGER[operation]([int(a[n]) for n in chosen(mask)]) & 0xFFFFFFFF
    got = of_lanes(f"redux.sync.{operation} %r9, %r0, {{m}};", mask, [a])
    assert got == [want if mask >> n & 1 else 0x5EED for n in range(32)]


FLOATS = st.sampled_from([0.0, -0.0, 1.0, -3.0, np.nan, np.inf, 2.5])
ZEROS = st.sampled_from([0.0, -0.0, np.nan])


@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("operation", ["min", "max"])
@FEW
@given(hnp.arrays(np.float32, 32, elements=FLOATS) | hnp.arrays(np.float32, 32, elements=ZEROS), MASKS)
def test_reductions_of_floats(operation, modifiers, a, mask):
    """-0 is below +0; a NaN counts only where it is asked for or there is nothing else, and is canonical."""
    values = [abs(float(a[n])) if "abs" in modifiers else float(a[n]) for n in chosen(mask)]
    numbers = [v for v in values if not np.isnan(v)]
    if not numbers or ("NaN" in modifiers and len(numbers) < len(values)):
        want = 0x7FFFFFFF
    else:
        pick = min if operation == "min" else max
        want = int(np.float32(pick(numbers, key=lambda v: (v, -int(np.signbit(v))))).view(np.uint32))
    got = of_lanes(f"redux.sync.{operation}{modifiers}.f32 %r9, %r0, {{m}};", mask, [a.view(np.uint32)])
    assert got == [want if mask >> n & 1 else 0x5EED for n in range(32)]


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic_additions_flush_in_global_memory_alone(space):
    """PTX ISA, `atom`: `.add.f32` flushes there, inputs and results; no other type does."""
    start, tiny = (
        np.float32([1e-40, 2.0**-126, 3, -1e-40] * 8),
        np.float32([1e-40, -1.5 * 2.0**-127, 1e-40, -0.0] * 8),
    )
    text = f"""mov.u32 %r63, %tid.x; mul.wide.u32 %d31, %r63, 4; .shared .align 4 .b32 cells[32];
    mov.b32 %r5, cells; mad.lo.u32 %r5, %r63, 4, %r5; st.shared.b32 [%r5], %r0;
    add.s64 %d29, %d1, %d31; {"" if space == "global" else "cvt.u64.u32 %d29, %r5;"}
    atom.{space}.add.f32 %r8, [%d29], %r1; ld.{space}.b32 %r9, [%d29];"""
    got = per_lane(text, [start.copy(), tiny], np.float32, "%r9", "b32")
    if space == "global":
        want = np.float32([0, 2.0**-126, 3, -0.0] * 8)
    else:
        want = start + tiny
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_bulk_reductions_flush_singles_alone():
    """PTX ISA, `cp.reduce.async.bulk`: `.add.f32` flushes, the 16-bit types do not."""
    old, new = np.float32([1e-40, 2.0**-126, 3, -1e-40]), np.float32([1e-40, -1.5 * 2.0**-127, 1e-40, -0.0])
    got = reducer("add", "f32")(old.view(np.uint8), new.view(np.uint8)).view(np.uint32)
    np.testing.assert_array_equal(got, np.float32([0, 2.0**-126, 3, -0.0]).view(np.uint32))
    halves = np.float16([2.0**-24, 1, -(2.0**-20), 2.0**-16])
    got = reducer("add", "f16")(halves.view(np.uint8), halves.view(np.uint8)).view(np.float16)
    np.testing.assert_array_equal(got, 2 * halves)


def test_a_shuffle_by_a_negative_literal():
    a = np.arange(32, dtype=np.uint32)
    assert of_lanes("shfl.sync.idx.b32 %r9|%p1, %r0, -1, -1, {m};", 0xFFFFFFFF, [a]) == list(range(32))
    assert of_lanes("shfl.sync.down.b32 %r9|%p1, %r0, -31, 31, {m};", 0xFFFFFFFF, [a]) == [*range(1, 32), 31]
