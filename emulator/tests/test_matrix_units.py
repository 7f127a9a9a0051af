"""Descriptors, tensor memory and the matrix instructions against element-by-element references."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_emulator.numbers import formats
from cute_emulator.units import mma, smem_desc, swizzle, tcgen05, tmem, wgmma

UMMA_LAYOUT = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
WGMMA_LAYOUT = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
ROW_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


def umma(start, leading, stride, layout):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | layout << 61


def element_address(start, leading, stride, mode, row, k, size, mn_major):
    """One element's byte address by rows of 8, then the swizzle on the address's digits."""
    width = ROW_BYTES[mode]
    fast, slow = (row, k) if mn_major else (k, row)
    byte = fast * size
    address = start + byte % width + slow % 8 * width
    if mode == "none":
        address += byte // 16 * (stride if mn_major else leading) + slow // 8 * (
            leading if mn_major else stride
        )
    elif mn_major:
        address += byte // width * leading + slow // 8 * stride
    else:
        assert byte < width
        address += slow // 8 * stride
    low, line = address // 16 % 8, address // 128 % (ROW_BYTES[mode] // 16)
    return address - 16 * low + 16 * (low ^ (0 if mode == "none" else line))


@st.composite
def tiles(draw):
    size = draw(st.sampled_from([1, 2, 4]))
    mode = draw(st.sampled_from(sorted(ROW_BYTES)))
    mn_major = draw(st.booleans())
    rows = draw(st.sampled_from([8, 16, 64, 72])) if not mn_major else draw(st.sampled_from([16, 64, 128]))
    k = 32 // size
    leading, stride = (16 * draw(st.integers(8, 80)) for _ in range(2))
    start = 1024 * draw(st.integers(0, 3)) + 16 * draw(st.integers(0, 7 if mn_major or mode == "none" else 0))
    if not mn_major and mode != "none":
        start += 32 * draw(st.integers(0, ROW_BYTES[mode] // 32 - 1))
    return size, mode, mn_major, rows, k, leading, stride, start


@given(tiles())
@settings(max_examples=80)
def test_descriptor_tile_addresses(tile):
    size, mode, mn_major, rows, k, leading, stride, start = tile
    word = umma(start, leading, stride, UMMA_LAYOUT[mode])
    descriptor = smem_desc.decode_umma(word)
    sm90 = (word & ~(0xFF << 56) & ~(3 << 46)) | WGMMA_LAYOUT[mode] << 62
    assert smem_desc.decode_wgmma(sm90) == descriptor
    want = np.array(
        [
            [element_address(start, leading, stride, mode, r, c, size, mn_major) for c in range(k)]
            for r in range(rows)
        ]
    )
    np.testing.assert_array_equal(descriptor.addresses(rows, k, size, mn_major), want)
    smem = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    picked = smem[want[..., None] + np.arange(size)].view(f"u{size}")[..., 0]
    np.testing.assert_array_equal(descriptor.gather(smem, rows, k, size, mn_major), picked)
    assert set(descriptor.chunk_addresses(rows, k, size, mn_major)) == set((want // 16 * 16).reshape(-1))


def test_descriptors_refuse_what_is_not_modelled():
    word = umma(0, 128, 256, 2)
    for bad, rule in (
        (word & ~(3 << 46), "version"),
        (word | 1 << 61, "reserved"),
        (umma(0, 128, 256, 0) | 1 << 52, "absolute"),
    ):
        with pytest.raises(ValueError, match=rule):
            smem_desc.decode_umma(bad)
    with pytest.raises(ValueError, match="base offset"):
        smem_desc.decode_umma(word | 1 << 49)
    with pytest.raises(IndexError):
        smem_desc.decode_umma(umma(1 << 17, 128, 1024, 2)).gather(
            np.zeros(1 << 17, np.uint8), 64, 16, 2, False
        )


def test_swizzle_is_an_involution_within_its_repeat():
    addresses = np.arange(8192)
    for mode in (swizzle.NONE, swizzle.SW32, swizzle.SW64, swizzle.SW128, swizzle.SW128_BASE32):
        moved = mode.apply(addresses)
        np.testing.assert_array_equal(mode.apply(moved), addresses)
        assert (moved // mode.repeat == addresses // mode.repeat).all()
        assert (moved[mode.repeat :] - mode.repeat == moved[: -mode.repeat]).all()


# -- tcgen05 ---------------------------------------------------------------------------------------


def instruction(m, n, a, b, d=1, **bits):
    flags = sum(
        1 << {"negate_a": 13, "negate_b": 14, "a_mn": 15, "b_mn": 16}[k] for k, v in bits.items() if v
    )
    return d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24 | flags


def place_operand(smem, start, matrix, mn_major, size):
    """Writes a [rows, k] matrix of patterns in 128B-swizzled canonical layout; returns its descriptor."""
    leading, stride = 4096, 1024
    for (r, k), value in np.ndenumerate(matrix):
        at = element_address(start, leading, stride, "128B", r, k, size, mn_major)
        smem[at : at + size] = np.array([value], f"u{size}").view(np.uint8)
    return smem_desc.decode_umma(umma(start, leading, stride, 2))


def d_cell(row, column, m, n, ctas):
    """(cta, lane, column) of D's element, from the tables of the PTX ISA."""
    if ctas == 1:
        return 0, row if m == 128 else row // 16 * 32 + row % 16, column
    if m == 256:
        return row // 128, row % 128, column
    return row // 64, row % 64 + (64 if column >= n // 2 else 0), column % (n // 2)


KINDS = {
    "bf16": ("f16", 1, 1),
    "f16": ("f16", 0, 0),
    "tf32": ("tf32", 2, 2),
    "e4m3*e5m2": ("f8f6f4", 0, 1),
}


@pytest.mark.parametrize("types", sorted(KINDS))
@pytest.mark.parametrize("ctas, m, n", [(1, 128, 8), (1, 64, 24), (2, 256, 48), (2, 128, 32)])
@pytest.mark.parametrize("a_mn, b_mn", [(False, False), (True, True)])
def test_tcgen05_mma(types, ctas, m, n, a_mn, b_mn):
    kind, a_code, b_code = KINDS[types]
    if b_mn and n // ctas % 16:
        n += 8 * ctas
    rng = np.random.default_rng(m + n)
    shape = tcgen05.decode_instruction(instruction(m, n, a_code, b_code, a_mn=a_mn, b_mn=b_mn), kind, ctas)
    assert (shape.m, shape.n, shape.a_mn_major, shape.b_mn_major) == (m, n, a_mn, b_mn)
    size = formats.ELEMENT_BYTES[shape.a_type]
    smem = [np.full(1 << 16, 0xFF, np.uint8) for _ in range(ctas)]
    d0 = rng.standard_normal((m, n)).astype(np.float32)
    patterns = {}
    for name, rows in (("a", m), ("b", n)):
        bits = rng.integers(0, 1 << (8 * size), (rows, shape.k), np.uint64).astype(f"u{size}")
        element = shape.a_type if name == "a" else shape.b_type
        patterns[name] = np.where(np.abs(formats.widen(bits, element)) < 100, bits, 0).astype(f"u{size}")
    for cta in range(ctas):
        a = place_operand(smem[cta], 0, patterns["a"][cta * m // ctas : (cta + 1) * m // ctas], a_mn, size)
        b = place_operand(
            smem[cta], 32768, patterns["b"][cta * n // ctas : (cta + 1) * n // ctas], b_mn, size
        )
    cells = [np.full((128, 512), 0x7FC00000, np.uint32) for _ in range(ctas)]
    for row, column in itertools.product(range(m), range(n)):
        cta, lane, at = d_cell(row, column, m, n, ctas)
        cells[cta][lane, 64 + at] = d0[row, column : column + 1].view(np.uint32)[0]
    left = formats.widen(patterns["a"], shape.a_type).astype(np.float64)
    right = formats.widen(patterns["b"], shape.b_type).astype(np.float64)
    for accumulate, want in ((True, d0 + left @ right.T), (False, left @ right.T)):
        work = [c.copy() for c in cells]
        tcgen05.Mma(shape, 64, a, b, accumulate).run(smem, work)
        got = np.empty((m, n), np.float32)
        for row, column in itertools.product(range(m), range(n)):
            cta, lane, at = d_cell(row, column, m, n, ctas)
            got[row, column] = work[cta][lane, 64 + at : 65 + at].view(np.float32)[0]
            work[cta][lane, 64 + at] = 0x7FC00000
        scale = np.abs(left) @ np.abs(right).T + 1
        assert (np.abs(got - want) <= 1e-5 * scale).all()
        assert all((c == 0x7FC00000).all() for c in work), "wrote outside D"


@pytest.mark.parametrize("a_mn, b_mn", [(False, False), (False, True), (True, False), (True, True)])
def test_products_in_a_row_are_one_of_a_larger_k(a_mn, b_mn):
    rng = np.random.default_rng(0)
    smem = np.zeros(1 << 17, np.uint8)
    shape = tcgen05.decode_instruction(instruction(128, 32, 1, 1, a_mn=a_mn, b_mn=b_mn), "f16", 1)
    steps, want = [], rng.standard_normal((128, 32)).astype(np.float32)
    cells = np.zeros((128, 512), np.uint32)
    cells.view(np.float32)[:, 8:40] = want
    for place in (16384, 0, 32768):  # the second one lies below the first
        a, b = (formats.f32_to_bf16(rng.standard_normal((r, 16)).astype(np.float32)) for r in (128, 32))
        tiles = (place_operand(smem, place, a, a_mn, 2), place_operand(smem, 65536 + place, b, b_mn, 2))
        want = want + formats.bf16_to_f32(a) @ formats.bf16_to_f32(b).T
        steps.append(tcgen05.Mma(shape, 8, *tiles, accumulate=True))
    assert all(tcgen05.continues(steps[0], step) for step in steps[1:])
    tcgen05.join(tuple(steps)).run([smem], [cells])
    np.testing.assert_allclose(cells.view(np.float32)[:, 8:40], want, rtol=1e-4, atol=1e-4)


def test_products_that_are_not_one():
    smem = np.zeros(1 << 16, np.uint8)
    operand = place_operand(smem, 0, np.zeros((128, 16), np.uint16), False, 2)
    shape = tcgen05.decode_instruction(instruction(128, 32, 1, 1), "f16", 1)
    half = tcgen05.decode_instruction(instruction(128, 32, 0, 0, d=0), "f16", 1)
    mma = tcgen05.Mma(shape, 0, operand, operand, True)
    assert tcgen05.continues(mma, mma)
    for change in (
        {"d": 64}, {"accumulate": False}, {"scale_d": 1}, {"a": 100},
        {"disabled_lanes": np.zeros((1, 128), bool)}, {"b": dataclasses.replace(operand, stride=2048)},
        {"shape": tcgen05.decode_instruction(instruction(128, 48, 1, 1), "f16", 1)},
    ):  # fmt: skip
        assert not tcgen05.continues(mma, dataclasses.replace(mma, **change)), change
    halves = [dataclasses.replace(mma, shape=half) for _ in range(2)]
    assert not tcgen05.continues(*halves)


@pytest.mark.parametrize("ctas, m", [(1, 128), (2, 256)])
def test_words_of_a_vector_disable_lanes(ctas, m):
    words = np.random.default_rng(2).integers(0, 1 << 32, 4 * ctas).tolist()
    operand = umma(1024, 16, 1024, UMMA_LAYOUT["128B"])
    given = "f16", ctas, 0, operand, False, operand, instruction(m, 32, 0, 0), True, 0, 0, None
    lanes = [words[n // 32] >> n % 32 & 1 for n in range(128 * ctas)]
    np.testing.assert_array_equal(tcgen05.decode_mma(*given, tuple(words)).disabled_lanes.reshape(-1), lanes)
    assert tcgen05.decode_mma(*given, (0,) * 4 * ctas).disabled_lanes is None


def test_tcgen05_options():
    """Accumulator at lane 16, negation, scaled D, disabled lanes, f16 D, A in tensor memory."""
    rng = np.random.default_rng(0)
    smem = np.zeros(1 << 16, np.uint8)
    a, b = (rng.standard_normal((r, 16)).astype(np.float16).view(np.uint16) for r in (64, 16))
    da, db = place_operand(smem, 0, a, False, 2), place_operand(smem, 32768, b, False, 2)
    product = a.view(np.float16).astype(np.float32) @ b.view(np.float16).astype(np.float32).T
    cells = np.zeros((128, 512), np.uint32)
    shape = tcgen05.decode_instruction(instruction(64, 16, 0, 0, negate_a=True), "f16", 1)
    tcgen05.Mma(shape, 16 << 16 | 8, da, db, False).run([smem], [cells])
    view = cells.view(np.float32).reshape(4, 32, 512)
    np.testing.assert_allclose(view[:, 16:, 8:24].reshape(64, 16), -product, rtol=1e-5, atol=1e-5)
    assert not view[:, :16].any()

    off = np.zeros((1, 128), bool)
    off[0, 16] = True
    tcgen05.Mma(shape, 16 << 16 | 8, da, db, True, scale_d=1, disabled_lanes=off).run([smem], [cells])
    got = view[:, 16:, 8:24].reshape(64, 16)
    np.testing.assert_allclose(got[1:], -1.5 * product[1:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[0], -product[0], rtol=1e-5, atol=1e-5)

    half = tcgen05.decode_instruction(instruction(64, 16, 0, 0, d=0, negate_b=True), "f16", 1)
    packed = np.ascontiguousarray(a).view(np.uint32)
    cells[...] = 0
    cells.reshape(4, 32, 512)[:, :16, 100:108] = packed.reshape(4, 16, 8)
    tcgen05.Mma(half, 0, 100, db, False).run([smem], [cells])
    got = cells.reshape(4, 32, 512)[:, :16, :16].reshape(64, 16)
    np.testing.assert_array_equal(got, (-product).astype(np.float16).view(np.uint16))


@pytest.mark.parametrize(
    "word, kind, ctas, rule",
    [
        (instruction(128, 264, 1, 1), "f16", 1, "multiple of 8"),
        (instruction(256, 40, 1, 1), "f16", 2, "multiple of 16"),
        (instruction(256, 64, 1, 1), "f16", 1, "no shape"),
        (instruction(128, 32, 1, 1), "i8", 1, "reserved"),
        (instruction(128, 32, 2, 0), "f8f6f4", 1, "reserved"),
        (instruction(128, 32, 0, 0), "b1", 1, "not modelled"),
        (instruction(128, 32, 5, 1), "f16", 1, "reserved"),
        (instruction(128, 32, 2, 2, d=0), "tf32", 1, "reserved"),
        (instruction(128, 32, 1, 1) | 4, "f16", 1, "sparsity"),
    ],
)
def test_instruction_descriptor_rules(word, kind, ctas, rule):
    with pytest.raises(ValueError, match=rule):
        tcgen05.decode_instruction(word, kind, ctas)


def test_accumulator_must_fit():
    smem, cells = np.zeros(1 << 16, np.uint8), np.zeros((128, 512), np.uint32)
    shape = tcgen05.decode_instruction(instruction(128, 32, 1, 1), "f16", 1)
    operand = place_operand(smem, 0, np.zeros((1, 1), np.uint16), False, 2)
    for d in (481, 16 << 16):
        with pytest.raises(ValueError, match="does not fit"):
            tcgen05.Mma(shape, d, operand, operand, False).run([smem], [cells])


LOADS = [(s, r) for s in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2") for r in (1, 4)]


@pytest.mark.parametrize("shape, repeat", LOADS)
@pytest.mark.parametrize("packed", [False, True])
def test_tmem_store_inverts_load(shape, repeat, packed):
    rng = np.random.default_rng(0)
    cells = rng.integers(0, 1 << 32, (128, 512), np.uint32)
    lane = 32 if shape == "32x32b" else 48
    loaded = tmem.load(cells, lane << 16 | 40, shape, repeat, packed, split=64)
    assert loaded.shape == (tmem.num_registers(shape, repeat), 32)
    blank = np.full_like(cells, 0xABCDABCD)
    tmem.store(blank, lane << 16 | 40, loaded, shape, repeat, packed, split=64)
    touched = blank != 0xABCDABCD
    np.testing.assert_array_equal(blank[touched], (cells & (0xFFFF if packed else 0xFFFFFFFF))[touched])
    lanes = 32 if shape == "32x32b" else 16
    assert (
        touched.sum() == loaded.size * (2 if packed else 1)
        and touched[lane : lane + lanes].sum() == touched.sum()
    )


def test_tmem_bounds_and_names():
    cells = np.zeros((128, 512), np.uint32)
    with pytest.raises(ValueError, match="multiple of 32"):
        tmem.load(cells, 16 << 16, "32x32b", 1)
    with pytest.raises(ValueError, match="touches 16 columns"):
        tmem.load(cells, 500, "32x32b", 16)
    with pytest.raises(ValueError, match="not one of"):
        tmem.load(cells, 0, "64x32b", 1)


@pytest.mark.parametrize(
    "shape, rows, bytes_",
    [("128x256b", 128, 32), ("32x128b.warpx4", 32, 16), ("64x128b.warpx2::01_23", 64, 16)],
)
def test_tmem_copy_from_shared_memory(shape, rows, bytes_):
    smem = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    cells = np.zeros((128, 512), np.uint32)
    tmem.copy_from_smem(smem, cells, smem_desc.decode_umma(umma(1024, 128, 256, 0)), 20, shape)
    for lane in range(128):
        row = {"128x256b": lane, "32x128b.warpx4": lane % 32}.get(shape, lane % 32 + lane // 64 * 32)
        for column in range(bytes_ // 4):
            at = 1024 + row // 8 * 256 + row % 8 * 16 + column * 4 // 16 * 128 + column * 4 % 16
            assert cells[lane, 20 + column] == smem[at : at + 4].view(np.uint32)[0]


# -- warp and warpgroup fragments ------------------------------------------------------------------


def random_patterns(rng, shape, element):
    size = formats.ELEMENT_BYTES[element]
    bits = rng.integers(0, 1 << (8 * size), shape, np.uint64).astype(f"u{size}")
    return np.where(np.abs(formats.widen(bits, element)) < 100, bits, 0).astype(f"u{size}")


def fragment(matrix, registers, place):
    """Fills `[registers, 32]` words element by element; place(i, lane, part) -> (row, column)."""
    parts = 4 // matrix.dtype.itemsize
    out = np.zeros((registers, 32, parts), matrix.dtype)
    for i, lane, part in itertools.product(range(registers), range(32), range(parts)):
        out[i, lane, part] = matrix[place(i, lane, part)]
    return out.view(np.uint32)[..., 0]


def a_place(parts):
    return lambda i, t, e: (t // 4 + 8 * (i % 2), parts * (t % 4) + e + 4 * parts * (i // 2))


def c_place(i, t, e):
    return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


@pytest.mark.parametrize(
    "a_type, b_type", [("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), ("e4m3", "e5m2")]
)
@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize("k_bytes", [16, 32])
def test_mma_sync(a_type, b_type, d_type, k_bytes):
    rng = np.random.default_rng(0)
    parts = 4 // formats.ELEMENT_BYTES[a_type]
    k = k_bytes // 4 * parts
    a, b = random_patterns(rng, (16, k), a_type), random_patterns(rng, (8, k), b_type)
    c = (rng.standard_normal((16, 8)) * 100).astype(np.float16 if d_type == "f16" else np.float32)
    fa = fragment(a, k_bytes // 8, a_place(parts))
    fb = fragment(b, k_bytes // 16, lambda i, t, e: (t // 4, parts * (t % 4) + e + 4 * parts * i))
    if d_type == "f32":
        fc = fragment(c.view(np.uint32), 4, c_place)
    else:
        fc = fragment(c.view(np.uint16), 2, lambda i, t, e: (t // 4 + 8 * i, 2 * (t % 4) + e))
    left, right = formats.widen(a, a_type).astype(np.float64), formats.widen(b, b_type).astype(np.float64)
    got = mma.c_matrix(mma.mma_sync(fa, fb, fc, a_type, b_type, d_type), d_type)
    bound = (np.abs(left) @ np.abs(right).T + np.abs(c)) * (2.0**-10 if d_type == "f16" else 1e-5) + 1e-4
    assert (np.abs(got - (left @ right.T + c)) <= bound).all()
    np.testing.assert_array_equal(mma.c_matrix(fc, d_type), c.astype(np.float32))


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(num, trans):
    rows = np.random.default_rng(0).integers(0, 1 << 16, (num, 8, 8), np.uint16)
    registers = mma.ldmatrix(rows.view(np.uint8), trans)
    for i, lane, half in itertools.product(range(num), range(32), range(2)):
        at = (lane // 4, 2 * (lane % 4) + half)
        assert registers[i, lane] >> (16 * half) & 0xFFFF == rows[i][at[::-1] if trans else at]
    np.testing.assert_array_equal(mma.stmatrix(registers, trans), rows)


@pytest.mark.parametrize("element", ["bf16", "f16", "tf32", "e4m3"])
@pytest.mark.parametrize("d_type, from_registers", [("f32", False), ("f32", True), ("f16", False)])
def test_wgmma(element, d_type, from_registers):
    rng = np.random.default_rng(0)
    size = formats.ELEMENT_BYTES[element]
    operation = wgmma.Wgmma(24, element, element, d_type, negate_b=True)
    a, b = random_patterns(rng, (64, operation.k), element), random_patterns(rng, (24, operation.k), element)
    smem = np.full(1 << 16, 0xFF, np.uint8)
    da, db = place_operand(smem, 0, a, False, size), place_operand(smem, 32768, b, False, size)
    left, right = formats.widen(a, element), -formats.widen(b, element)
    d0 = rng.standard_normal((64, 24)).astype(np.float32)
    # Of bytes each of 34 terms and the sum is cut behind 13 bits (`numbers.tensor_cores`).
    close = 2e-3 if d_type == "f16" else 35 * 2.0**-13 if size == 1 else 1e-5
    for warp in range(4):
        rows = slice(16 * warp, 16 * warp + 16)
        if from_registers:
            mine = operation.operand_a_registers(fragment(a[rows], 4, a_place(4 // size)))
        else:
            mine = operation.operand_a(smem, da)[rows]
        if d_type == "f32":
            before = fragment(d0[rows].view(np.uint32), operation.d_registers, c_place)
        else:
            halves = d0[rows].astype(np.float16).view(np.uint16)
            before = fragment(
                halves,
                operation.d_registers,
                lambda i, t, e: (t // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (t % 4) + e),
            )
        after = operation.multiply(mine, operation.operand_b(smem, db), before)
        assert after.shape == (operation.d_registers, 32)
        want = left[rows] @ right.T + d0[rows]
        scale = np.abs(left[rows]) @ np.abs(right).T + 1
        assert (np.abs(mma.c_matrix(after, d_type) - want) <= scale * close).all()
        fresh = mma.c_matrix(operation.multiply(mine, operation.operand_b(smem, db), None), d_type)
        assert (np.abs(fresh - left[rows] @ right.T) <= scale * close).all()


def test_wgmma_rules():
    with pytest.raises(ValueError, match="multiple of 8"):
        wgmma.Wgmma(260, "bf16", "bf16")
    with pytest.raises(ValueError, match="16-bit"):
        wgmma.Wgmma(64, "tf32", "tf32", a_mn_major=True)
