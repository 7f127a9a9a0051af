"""Block-scaled `mma.sync`, element by element: in which lanes and bytes operands and factors lie."""

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.numbers import formats

from .handwritten import aligned, run

KINDS = {
    "mxf4nvf4, block 16": ("mxf4nvf4", "scale_vec::4X", 64, "e2m1", "e2m1", "ue4m3", 4),
    "mxf4nvf4, block 32": ("mxf4nvf4", "scale_vec::2X", 64, "e2m1", "e2m1", "ue8m0", 2),
    "mxf4": ("mxf4", "scale_vec::2X", 64, "e2m1", "e2m1", "ue8m0", 2),
    "mxf8f6f4": ("mxf8f6f4", "scale_vec::1X", 32, "e4m3", "e5m2", "ue8m0", 1),
}
LOADS = "".join(
    f"ld.global.b32 %r{8 + n}, [%d2+{128 * n}];\n" for n in range(12)
)  # a: 8 to 11, b: 12 and 13, c: 14 to 17, factors: 18 and 19


def kernel(kind, vector, k, a, b, factor, byte_a, lane_a, byte_b, lane_b):
    return f"""
    mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1;
    {LOADS}
    mov.b16 %h0, {byte_a}; mov.b16 %h1, {lane_a}; mov.b16 %h2, {byte_b}; mov.b16 %h3, {lane_b};
    mma.sync.aligned.kind::{kind}.block_scale.{vector}.m16n8k{k}.row.col.f32.{a}.{b}.f32.{factor}
      {{%r1, %r2, %r3, %r4}}, {{%r8, %r9, %r10, %r11}}, {{%r12, %r13}}, {{%r14, %r15, %r16, %r17}},
      {{%r18}}, {{%h0, %h1}}, {{%r19}}, {{%h2, %h3}};
    st.global.b32 [%d2], %r1; st.global.b32 [%d2+128], %r2; st.global.b32 [%d2+256], %r3;
    st.global.b32 [%d2+384], %r4;
    """


def codes_of(rng, kind, shape):
    if kind == "e2m1":
        return rng.integers(0, 16, shape).astype(np.uint8)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(np.isfinite(formats.widen(codes, kind)), codes, 0x38).astype(np.uint8)


def factors_of(rng, factor, shape):
    codes = rng.integers(120, 134, shape) if factor == "ue8m0" else rng.integers(0x20, 0x50, shape)
    codes = codes.astype(np.uint8)
    return codes, formats.ue8m0_to_f32(codes) if factor == "ue8m0" else formats.widen(codes, "e4m3")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("choice", [0, 1])
def test_every_element_and_factor_is_taken_from_its_place(name, choice):
    kind, vector, k, a_type, b_type, factor, blocks = KINDS[name]
    byte_a, byte_b = {4: (0, 0), 2: (0, 2), 1: (3, 1)}[blocks]
    lane_a, lane_b = (0, 3) if choice else (1, 2)
    rng = np.random.default_rng(choice)
    a, b = codes_of(rng, a_type, (16, k)), codes_of(rng, b_type, (8, k))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    (codes_a, scale_a), (codes_b, scale_b) = (factors_of(rng, factor, (n, blocks)) for n in (16, 8))
    bits, per = (4, 8) if k == 64 else (8, 4)
    registers = aligned(12 * 32)
    registers[:] = rng.integers(0, 1 << 32, 12 * 32, dtype=np.uint32)  # of other lanes' factors, too
    place = registers.reshape(12, 32)
    place[:6] = 0
    for row, col in np.ndindex(16, k):
        half, q, i = col // (4 * per), col % (4 * per) // per, col % per
        place[row // 8 + 2 * half, 4 * (row % 8) + q] |= np.uint32(int(a[row, col]) << bits * i)
    for n, row in np.ndindex(8, k):
        half, q, i = row // (4 * per), row % (4 * per) // per, row % per
        place[4 + half, 4 * n + q] |= np.uint32(int(b[n, row]) << bits * i)
    for row, col in np.ndindex(16, 8):
        place[6 + 2 * (row // 8) + col % 2, 4 * (row % 8) + col // 2] = c[row, col].view(np.uint32)
    bytes_of = place.view(np.uint8).reshape(12, 32, 4)
    for row, block in np.ndindex(16, blocks):
        bytes_of[10, 4 * (row % 8) + 2 * lane_a + row // 8, byte_a + block] = codes_a[row, block]
    for n, block in np.ndindex(8, blocks):
        bytes_of[11, 4 * n + lane_b, byte_b + block] = codes_b[n, block]
    left, right = (formats.widen(x, t).astype(np.float64) for x, t in ((a, a_type), (b, b_type)))
    left *= np.repeat(scale_a, k // blocks, axis=1)
    right *= np.repeat(scale_b, k // blocks, axis=1)
    expected = left @ right.T + c
    body = kernel(kind, vector, k, a_type, b_type, factor, byte_a, lane_a, byte_b, lane_b)
    run(body, [registers], block=(32, 1, 1), arch="sm_120a")
    got = np.empty((16, 8), np.float32)
    for row, col in np.ndindex(16, 8):
        got[row, col] = place[2 * (row // 8) + col % 2, 4 * (row % 8) + col // 2].view(np.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(left @ right.T).max())


def test_factors_beyond_a_register_are_refused():
    body = kernel(*KINDS["mxf4"][:6], 3, 0, 0, 0)
    with pytest.raises(EmulatorError, match="of the scale factors"):
        run(body, [aligned(12 * 32)], block=(32, 1, 1), arch="sm_120a")


def test_shared_memory_of_sm_120_is_smaller():
    shape = {"block": (32, 1, 1), "dynamic_smem": 101_377}
    with pytest.raises(ValueError, match="at most 101376 are valid"):
        run("", [], **shape, arch="sm_120a")
    run("", [], **shape, arch="sm_100a")
