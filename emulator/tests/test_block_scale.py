"""Block-scaled and integer tcgen05.mma, narrow operands, and what brings them there, element by element."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.units import smem_desc, tcgen05, tma, tmem
from cute_emulator.units.block_scale import Scaling
from cute_emulator.units.tma_encode import encode_tiled

from .handwritten import aligned, run
from .test_matrix_units import d_cell, instruction, place_operand, umma

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "s8": np.int8,
    "u8": np.uint8,
}
CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}
ELSEWHERE = 0x7FC01234


def values(codes, kind):
    return codes.view(DTYPES[kind]).astype(np.float64)


def random_codes(rng, rows, k, kind):
    """Patterns of moderate finite numbers."""
    codes = rng.integers(0, 1 << BITS.get(kind, 8), (rows, k)).astype(np.uint8)
    return np.where(np.abs(np.nan_to_num(values(codes, kind), nan=1e9)) < 300, codes, 1).astype(np.uint8)


def in_smem(codes, bits, packed):
    """The bytes that hold codes, k fastest: packed pairs, or chunks of 16 elements in 16 bytes."""
    if bits == 8:
        return codes
    out = np.full((codes.shape[0], codes.shape[1] // 2 if packed else codes.shape[1]), 0xEE, np.uint8)
    group = out.shape[1] if packed else 16
    for row, start in itertools.product(range(len(codes)), range(0, out.shape[1], group)):
        elements = codes[row, start * (2 if packed else 1) :][: group * (2 if packed else 1)]
        number = sum(int(c) << bits * n for n, c in enumerate(elements))
        used = len(elements) * bits // 8
        out[row, start : start + used] = np.frombuffer(number.to_bytes(used, "little"), np.uint8)
    return out


def write_factors(cells, column, codes, data_id, lanes):
    """Row r's factors begin at byte `data_id` of column + r // 32, lane r % 32 of each quarter of `lanes`."""
    view = cells.view(np.uint8).reshape(128, 512, 4)
    for (row, block), code in np.ndenumerate(codes):
        cell, byte = divmod(data_id + block, 4)
        for quarter in lanes:
            view[32 * quarter + row % 32, column + row // 32 + cell * 4 * -(-len(codes) // 128), byte] = code


CASES = [
    ("mxf8f6f4", "e4m3", "e5m2", "ue8m0", 32, 0, 1, 128, 40),
    ("mxf8f6f4", "e2m1", "e4m3", "ue8m0", 32, 3, 1, 128, 256),
    ("mxf8f6f4", "e3m2", "e2m3", "ue8m0", 32, 2, 2, 256, 64),
    ("mxf4", "e2m1", "e2m1", "ue8m0", 32, 2, 1, 128, 72),
    ("mxf4nvf4", "e2m1", "e2m1", "e4m3", 16, 0, 1, 128, 256),
    ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", 16, 0, 2, 256, 96),
    ("mxf4nvf4", "e2m1", "e2m1", "e4m3", 16, 0, 2, 128, 256),
]


@pytest.mark.parametrize("kind, a_type, b_type, scale, block, data_id, ctas, m, n", CASES)
def test_block_scaled_products(kind, a_type, b_type, scale, block, data_id, ctas, m, n):
    rng = np.random.default_rng(n)
    packed = kind != "mxf8f6f4"
    k = 64 if packed else 32
    a, b = random_codes(rng, m, k, a_type), random_codes(rng, n, k, b_type)
    low, high = (120, 134) if scale == "ue8m0" else (0x20, 0x60)
    sa, sb = (rng.integers(low, high, (rows, k // block)).astype(np.uint8) for rows in (m, n))
    codes = (1, 1) if packed else (CODES[a_type], CODES[b_type])
    word = codes[0] << 7 | codes[1] << 10 | n >> 3 << 17 | m >> 7 << 27 | (scale == "ue8m0") << 23
    word |= data_id << 29 | data_id << 4
    smem = [np.full(1 << 17, 0xFF, np.uint8) for _ in range(ctas)]
    cells = [np.full((128, 512), ELSEWHERE, np.uint32) for _ in range(ctas)]
    for cta in range(ctas):
        mine, its = (slice(cta * rows // ctas, (cta + 1) * rows // ctas) for rows in (m, n))
        da = place_operand(smem[cta], 0, in_smem(a[mine], BITS.get(a_type, 8), packed), False, 1)
        db = place_operand(smem[cta], 65536, in_smem(b[its], BITS.get(b_type, 8), packed), False, 1)
        write_factors(cells[cta], 400, sa[mine], data_id, range(4))
        if (ctas, m) == (2, 128):  # the lanes that hold half of D's columns hold the factors of these
            write_factors(cells[cta], 420, sb[: n // 2], data_id, (0, 1))
            write_factors(cells[cta], 420, sb[n // 2 :], data_id, (2, 3))
        else:
            write_factors(cells[cta], 420, sb, data_id, range(4))
    shape = tcgen05.decode_instruction(word, kind, ctas, block)
    before = [c.copy() for c in cells]
    tcgen05.Mma(shape, 64, da, db, False, scales=(400, 420)).run(smem, cells)
    left = values(a, a_type) * np.repeat(values(sa, scale), block, 1)
    right = values(b, b_type) * np.repeat(values(sb, scale), block, 1)
    want, bound = left @ right.T, np.abs(left) @ np.abs(right).T
    for row, column in itertools.product(range(m), range(n)):
        cta, lane, at = d_cell(row, column, m, n, ctas)
        got = cells[cta][lane, 64 + at : 65 + at].view(np.float32)[0]
        assert abs(got - want[row, column]) <= 1e-5 * bound[row, column], (row, column)
        cells[cta][lane, 64 + at] = ELSEWHERE
    assert all(np.array_equal(now, then) for now, then in zip(cells, before, strict=True)), "wrote outside D"


@pytest.mark.parametrize("first", [0x30, 0x60, 0x70])
@pytest.mark.parametrize("scale, block, data_id", [("e4m3", 16, 0), ("ue8m0", 16, 2), ("ue8m0", 32, 3)])
@pytest.mark.parametrize("ctas, m, n", [(1, 128, 24), (2, 256, 256)])
def test_48_bytes_of_k_in_two_tiles(first, scale, block, data_id, ctas, m, n):
    """K = 96 of sm_103: a row that ends goes on in the tile whose address the descriptor gives."""
    rng = np.random.default_rng(first)
    a, b = (random_codes(rng, rows, 96, "e2m1") for rows in (m, n))
    low, high = (120, 134) if scale == "ue8m0" else (0x20, 0x60)
    sa, sb = (rng.integers(low, high, (rows, 96 // block)).astype(np.uint8) for rows in (m, n))
    smem = [np.full(1 << 17, 0xFF, np.uint8) for _ in range(ctas)]
    cells = [np.full((128, 512), ELSEWHERE, np.uint32) for _ in range(ctas)]

    def place(cta, codes, base, further):
        held, room = in_smem(codes, 4, True), 128 - first
        place_operand(smem[cta], base + first, held[:, :room], False, 1)
        place_operand(smem[cta], further, held[:, room:], False, 1)
        return smem_desc.decode_umma(umma(base + first, further, 1024, 2) | 1 << 52)

    for cta in range(ctas):
        mine, its = (slice(cta * rows // ctas, (cta + 1) * rows // ctas) for rows in (m, n))
        da, db = place(cta, a[mine], 0, 65536), place(cta, b[its], 98304, 32768)
        write_factors(cells[cta], 400, sa[mine], data_id, range(4))
        write_factors(cells[cta], 420, sb, data_id, range(4))
    word = 1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 7 << 27 | (scale == "ue8m0") << 23
    word |= data_id << 29 | data_id << 4 | 1 << 31
    shape = tcgen05.decode_instruction(word, "mxf4nvf4", ctas, block)
    mma = tcgen05.Mma(shape, 64, da, db, False, scales=(400, 420))
    mma.run(smem, cells)
    left = values(a, "e2m1") * np.repeat(values(sa, scale), block, 1)
    right = values(b, "e2m1") * np.repeat(values(sb, scale), block, 1)
    got = np.concatenate([c[: m // ctas, 64 : 64 + n].view(np.float32) for c in cells])
    assert (np.abs(got - left @ right.T) <= 1e-5 * (np.abs(left) @ np.abs(right).T)).all()

    beyond = (data_id + 96 // block - 1) // 4  # further cells of each row's factors
    assert mma.scale_cells(ctas)[0] == (400, 4 * beyond + 4, (0, 1))
    room = 128 - first
    pieces = [min(48, room)] * 2 if room >= 48 else [room, 48 - room] * 2
    assert [k for _, (_, k, _, _) in mma.smem_tiles(ctas)] == pieces[: 2 if room >= 48 else 4]


def test_factors_beyond_single_precision_and_in_unlike_copies():
    smem, cells = np.zeros(1 << 16, np.uint8), np.zeros((128, 512), np.uint32)
    operand = place_operand(smem, 0, np.full((128, 32), 0x7E, np.uint8), False, 1)  # 448
    write_factors(cells, 400, np.full((128, 1), 254, np.uint8), 0, range(4))  # 2**127
    write_factors(cells, 420, np.full((128, 1), 1, np.uint8), 0, range(4))  # 2**-126
    word = 128 >> 3 << 17 | 1 << 27 | 1 << 23
    shape = tcgen05.decode_instruction(word, "mxf8f6f4", 1, 32)
    mma = tcgen05.Mma(shape, 0, operand, operand, False, scales=(400, 420))
    mma.run([smem], [cells])
    assert (cells.view(np.float32)[:, :128] == 64 * 448**2).all()
    cells[40, 421] += 1
    with pytest.raises(ValueError, match="not the same in quarters"):
        mma.run([smem], [cells])
    with pytest.raises(ValueError, match="do not fit"):
        tcgen05.Mma(shape, 0, operand, operand, False, scales=(400, 509)).run([smem], [cells])


@pytest.mark.parametrize("a_type, b_type", [("s8", "s8"), ("u8", "s8"), ("u8", "u8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integer_products(a_type, b_type, saturate):
    rng = np.random.default_rng(0)
    smem, cells = np.zeros(1 << 16, np.uint8), np.zeros((128, 512), np.uint32)
    a, b = (rng.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (128, 32))
    da, db = place_operand(smem, 0, a, False, 1), place_operand(smem, 32768, b, False, 1)
    word = instruction(128, 32, int(a_type == "s8"), int(b_type == "s8"), d=2) | saturate << 3
    shape = tcgen05.decode_instruction(word, "i8", 1)
    d0 = rng.integers(-(1 << 31), 1 << 31, (128, 32))
    d0[:64] = np.where(d0[:64] < 0, -(1 << 31), (1 << 31) - 1)
    cells[:, 8:40] = d0.astype(np.uint32)
    mma = tcgen05.Mma(shape, 8, da, db, True)
    mma.run([smem], [cells])
    want = d0 + a.view(DTYPES[a_type]).astype(np.int64) @ b.view(DTYPES[b_type]).astype(np.int64).T
    if saturate:
        want = np.clip(want, -(1 << 31), (1 << 31) - 1)
    np.testing.assert_array_equal(cells[:, 8:40], want.astype(np.uint32))
    assert tcgen05.continues(mma, mma) != saturate


def test_many_integer_products_at_once_stay_exact():
    smem, cells = np.zeros(1 << 16, np.uint8), np.zeros((128, 512), np.uint32)
    codes = np.full((128, 32), 127, np.uint8)
    a = place_operand(smem, 0, codes, False, 1)
    codes[:, 0] = 126
    b = place_operand(smem, 32768, codes, False, 1)
    shape = tcgen05.decode_instruction(instruction(128, 32, 1, 1, d=2), "i8", 1)
    tcgen05.join((tcgen05.Mma(shape, 0, a, b, True),) * 65).run([smem], [cells])
    want = 65 * (31 * 127 * 127 + 127 * 126)  # odd and beyond 2**24
    assert (cells[:, :32] == want).all()


@pytest.mark.parametrize("kind, bits", [("b4x16_p64", 4), ("b6x16_p32", 6), ("b4x16", 4)])
def test_tensor_maps_of_narrow_types(kind, bits):
    """A box at an edge, from packed rows, in the chunks that the padded types need."""
    rng = np.random.default_rng(bits)
    rows, columns, padded = 6, 256, kind != "b4x16"
    codes = rng.integers(0, 1 << bits, (rows, columns))
    pitch = columns * bits // 8
    packed = np.concatenate(
        [
            np.frombuffer(
                sum(int(c) << bits * n for n, c in enumerate(row)).to_bytes(pitch, "little"), np.uint8
            )
            for row in codes
        ]
    )
    encoded = encode_tiled(
        {"b4x16": 13, "b4x16_p64": 14, "b6x16_p32": 15}[kind], 4096, [columns, rows], [pitch],
        [128, 8], [1, 1], swizzle_mode=3 if padded else 2,
    )  # fmt: skip
    tensor = tma.TensorMap.decode(encoded.encode())
    assert tensor == encoded and tensor.box_bytes == 128 * 8 * bits // 8
    plan = tensor.plan((128, 2), 1024)
    row_bytes = 128 if padded else 64
    smem = np.full(4096, 0xEE, np.uint8)
    chunks = np.zeros((len(plan.global_addresses), plan.chunk), np.uint8)
    inside = plan.global_addresses[plan.valid, None] - 4096 + np.arange(plan.chunk)
    chunks[plan.valid] = packed[inside]
    smem.reshape(-1, plan.chunk)[plan.smem_numbers] = chunks
    for row in range(8):
        elements = codes[2 + row, 128:] if row < 4 else np.zeros(128, np.int64)
        want = in_smem(elements.astype(np.uint8)[None], bits, not padded)[0]
        for byte, value in enumerate(want):
            at = 1024 + row * row_bytes + byte
            at ^= (at // 128 % (row_bytes // 16)) << 4
            assert smem[at] == value, (row, byte)
    with pytest.raises(ValueError, match="multiple of"):
        tensor.plan((64 if padded else 1, 0), 1024)


@pytest.mark.parametrize("bits", [4, 6])
def test_copies_that_unpack(bits):
    rng = np.random.default_rng(bits)
    smem, cells = np.zeros(1 << 16, np.uint8), np.zeros((128, 512), np.uint32)
    codes = rng.integers(0, 1 << bits, (128, 32)).astype(np.uint8)
    source = place_operand(smem, 0, in_smem(codes, bits, False), False, 1)
    tmem.copy_from_smem(smem, cells, source, 16, "128x256b", bits)
    held = codes << (2 if bits == 4 else 1)  # 00xxxx00 and 0xxxxxx0
    np.testing.assert_array_equal(cells[:, 16:24].view(np.uint8).reshape(128, 32), held)
    kind = "e2m1" if bits == 4 else "e3m2"
    word = CODES[kind] << 7 | 128 >> 3 << 17 | 1 << 27 | 1 << 23
    b = place_operand(smem, 32768, np.eye(128, 32, dtype=np.uint8) * 0x38, False, 1)
    write_factors(cells, 400, np.full((128, 1), 127, np.uint8), 0, range(4))
    shape = tcgen05.decode_instruction(word, "mxf8f6f4", 1, 32)
    tcgen05.Mma(shape, 32, 16, b, False, scales=(400, 400)).run([smem], [cells])
    np.testing.assert_array_equal(cells.view(np.float32)[:, 32:64], values(codes, kind))


SMEM = """
.shared .align 1024 .b8 buffer[33792]; .shared .align 8 .b64 loaded; .shared .align 8 .b64 done;
.shared .align 4 .b32 slot;
"""
KERNEL = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0;
mov.u32 %r10, buffer; mov.u32 %r11, loaded; mov.u32 %r12, done; mov.u32 %r13, slot;
@%p0 mbarrier.init.shared.b64 [%r11], 1; @%p0 mbarrier.init.shared.b64 [%r12], 1;
fence.mbarrier_init.release.cluster;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r13], 256;
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
ld.shared.b32 %r2, [%r13];
@!%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r11], 33792;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%d1], 33792, [%r11];
LOADED: mbarrier.try_wait.parity.shared.b64 %p2, [%r11], 0; @!%p2 bra LOADED;
add.u32 %r3, %r2, 128; add.u32 %r4, %r2, 132;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3], %d4; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4], %d5;
cvt.u32.u64 %r5, %d6; setp.ne.b32 %p3, %r5, %r5;
tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r2], %d2, %d3, %r5, [%r3], [%r4], %p3;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r12], 0; @!%p2 bra WAIT;
bar.sync 0; tcgen05.fence::after_thread_sync;
shl.b32 %r6, %r1, 21; add.u32 %r6, %r6, %r2;
mul.wide.u32 %d8, %r0, 512; add.s64 %d8, %d8, %d0; mov.b32 %r7, 0;
COLUMN: add.u32 %r8, %r6, %r7; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r8];
tcgen05.wait::ld.sync.aligned; st.global.b32 [%d8], %r9; add.s64 %d8, %d8, 4;
add.u32 %r7, %r7, 1; setp.lt.u32 %p4, %r7, 128; @%p4 bra COLUMN;
tcgen05.fence::before_thread_sync; bar.sync 0;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 256;
"""


def scaled_kernel(kernel=KERNEL, **options):
    """Runs an NVFP4 product of one instruction; returns D, what it should be, and the findings."""
    rng = np.random.default_rng(3)
    a, b = (random_codes(rng, 128, 64, "e2m1") for _ in range(2))
    sa, sb = (rng.integers(0x30, 0x50, (128, 4)).astype(np.uint8) for _ in range(2))
    image = aligned(33792, np.uint8)
    da = place_operand(image, 0, in_smem(a, 4, True), False, 1)
    place_operand(image, 16384, in_smem(b, 4, True), False, 1)
    for at, factors in ((32768, sa), (33280, sb)):  # row r: 16 bytes of r % 32, four of r // 32 in them
        for (row, block), code in np.ndenumerate(factors):
            image[at + row % 32 * 16 + row // 32 * 4 + block] = code
    assert da == smem_desc.decode_umma(umma(0, 4096, 1024, 2))
    out = aligned(128 * 128, np.float32, np.nan)
    base = 1024  # where the first shared variable lies
    words = [umma(base, 4096, 1024, 2), umma(base + 16384, 4096, 1024, 2)]
    words += [umma(base + at, 128, 128, 0) for at in (32768, 33280)]
    word = 1 << 7 | 1 << 10 | 128 >> 3 << 17 | 1 << 27
    m = run(kernel, [out, image, *words, word], SMEM, block=(128, 1, 1), **options)
    left = values(a, "e2m1") * np.repeat(values(sa, "e4m3"), 16, 1)
    right = values(b, "e2m1") * np.repeat(values(sb, "e4m3"), 16, 1)
    return out.reshape(128, 128), left @ right.T, m.report.findings


@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
def test_a_block_scaled_kernel(mode):
    got, want, findings = scaled_kernel(mode=mode)
    assert not findings, findings
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_scale_factors_must_have_arrived():
    """A copy of scales that nobody waits for, before the load's wait: the detector sees the read."""
    copies = " ".join(f"tcgen05.cp.cta_group::1.32x128b.warpx4 [%r{n}], %d{n + 1};" for n in (3, 4))
    early = "add.u32 %r3, %r2, 128; add.u32 %r4, %r2, 132;"
    assert copies in KERNEL
    broken = KERNEL.replace(copies, "").replace("LOADED:", early + copies + "LOADED:")
    _, _, findings = scaled_kernel(broken, mode="immediate")
    assert "shared-race" in {f.kind for f in findings}


ARRIVAL = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, done; setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
mov.u32 %r4, 1; mapa.shared::cluster.u32 %r3, %r2, %r4; ld.shared::cluster.b32 %r5, [%r3+8];
@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r3];
bra EXIT;
WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
EXIT:
"""


def test_a_neighbours_arrival_that_was_waited_for_is_no_access_after_the_end():
    cluster = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
    smem = ".shared .align 8 .b64 done; .shared .align 8 .b64 data;"
    assert not run(ARRIVAL, [], smem, **cluster).report.findings
    hasty = ARRIVAL.replace("@!%p2 bra WAIT;", "")  # looks once
    with pytest.raises(EmulatorError, match="has exited"):
        run(hasty, [], smem, **cluster)


QUARTERS = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, slot; setp.eq.u32 %p0, %r1, 0;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0; ld.shared.b32 %r3, [%r2]; add.u32 %r4, %r3, OTHER;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; tcgen05.wait::st.sync.aligned;
shl.b32 %r5, %r1, 21; add.u32 %r5, %r5, %r3;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r5]; tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5; st.global.b32 [%d6], %r6;
tcgen05.fence::before_thread_sync; bar.sync 0;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
"""


def test_an_address_without_a_quarter_means_the_warps_own():
    out = aligned(128)
    smem = ".shared .align 4 .b32 slot;"
    run(QUARTERS.replace("OTHER", "0"), [out], smem, block=(128, 1, 1))
    np.testing.assert_array_equal(out, np.arange(128))
    with pytest.raises(EmulatorError, match="this warp can access lanes"):
        run(QUARTERS.replace("OTHER", str(1 << 21)), [out], smem, block=(128, 1, 1))


@pytest.mark.parametrize("factor", [np.nan, 2.0**-100, 2.0**100, 2.0])
def test_factors_of_any_size_are_multiplied_with(factor):
    """Memory that nothing was written to has NaN in all of them."""
    operand = np.full((4, 64), 3.0, np.float32)
    scaled = Scaling(32, "ue8m0", 0, 0).apply(operand, np.full((4, 2), factor, np.float32))
    np.testing.assert_array_equal(scaled, np.full((4, 64), 3.0 * factor))
