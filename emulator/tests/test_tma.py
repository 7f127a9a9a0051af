"""Tensor-map codec and box plans against an element-by-element reference."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_emulator.errors import UnsupportedInstruction
from cute_emulator.units import tma
from cute_emulator.units.tma_encode import encode_tiled

from .handwritten import aligned, run

API = {"u8": 0, "u16": 1, "u32": 2, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
SIZES = {"u8": 1, "u16": 2, "u32": 4, "f16": 2, "f32": 4, "f64": 8, "bf16": 2}


@st.composite
def boxes(draw):
    """A tensor in a byte buffer, a map over it and a position, legal for the driver."""
    name = draw(st.sampled_from(sorted(API)))
    size = SIZES[name]
    mode = draw(st.integers(0, 4))
    widest = 128 if mode in (0, 4) else 16 << mode
    rank = draw(st.integers(1, 4))
    box = [draw(st.sampled_from([b for b in (16, 32, 64, 96, 128) if b <= widest])) // size]
    box += [draw(st.integers(1, 5)) for _ in range(rank - 1)]  # up to 125 rows of 128 bytes
    dims = [draw(st.integers(1, 150 // size + 1))] + [draw(st.integers(1, 7)) for _ in range(rank - 1)]
    steps = [1] + [draw(st.integers(1, 3)) for _ in range(rank - 1)]
    strides, pitch = [], dims[0] * size
    for dim in dims[1:]:
        pitch = -(-pitch // 16) * 16 + 16 * draw(st.integers(0, 2))
        strides.append(pitch)
        pitch *= dim
    at = [draw(st.integers(-b - 1, d + 1)) for b, d in zip(box, dims, strict=True)]
    at[0] -= at[0] % (16 // size)
    smem = draw(st.integers(0, 20)) * 128
    return name, dims, strides, box, steps, mode, at, smem, pitch + 64


def reference(name, dims, strides, box, steps, mode, at, smem):
    """(global byte offset or None, shared byte address) of every byte, from the definition alone."""
    size, row = SIZES[name], box[0] * SIZES[name]
    pitch = row if mode == 0 else min(16 << mode, 128)
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    for number, outer in enumerate(itertools.product(*(range(n) for n in counts[:0:-1]))):
        coordinates = [at[0], *(a + i * s for a, i, s in zip(at[1:], outer[::-1], steps[1:], strict=True))]
        for i in range(counts[0]):
            c = [coordinates[0] + i, *coordinates[1:]]
            inside = all(0 <= x < d for x, d in zip(c, dims, strict=True))
            source = c[0] * size + sum(x * s for x, s in zip(c[1:], strides, strict=True))
            for byte in range(size):
                place = smem + number * pitch + i * size + byte
                bits = f"{place:032b}"
                if mode == 4:
                    chunk, line, unit = int(bits[-7:-5], 2), int(bits[-9:-7], 2), 5
                else:
                    chunk, line, unit = int(bits[-7:-4], 2), int(bits[-10:-7], 2) % (1 << mode), 4
                place = place - (chunk << unit) + ((chunk ^ line) << unit)
                yield (source + byte if inside else None), place


@given(boxes())
@settings(max_examples=150)
def test_plan_moves_the_right_bytes(case):
    name, dims, strides, box, steps, mode, at, smem_address, length = case
    base = 4096
    tensor = encode_tiled(API[name], base, dims, strides, box, steps, swizzle_mode=mode)
    plan = tma.TensorMap.decode(tensor.encode()).plan(at, smem_address)
    source = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    got = np.full(1 << 15, 0xA5, np.uint8)
    offsets = plan.chunk * plan.smem_numbers
    valid = np.ones(offsets.size, bool) if plan.valid is None else plan.valid
    assert not (plan.global_addresses[valid] % plan.chunk).any()
    for address, offset, ok in zip(plan.global_addresses - base, offsets, valid, strict=True):
        piece = source[address : address + plan.chunk] if ok else 0
        got[offset : offset + plan.chunk] = piece
    want = np.full(1 << 15, 0xA5, np.uint8)
    bytes_moved = 0
    for byte, place in reference(name, dims, strides, box, steps, mode, at, smem_address):
        want[place] = 0 if byte is None else source[byte]
        bytes_moved += 1
    np.testing.assert_array_equal(got, want)
    assert plan.box_bytes == bytes_moved
    addresses, offsets = plan.clipped()
    count = offsets.stop - offsets.start if isinstance(offsets, slice) else offsets.size
    assert addresses.size == count == valid.sum()


@given(boxes(), st.integers(0, 3), st.booleans())
def test_codec_round_trips(case, l2_promotion, nan):
    name, dims, strides, box, steps, mode, *_ = case
    nan = nan and name in ("f16", "bf16", "f32", "f64")
    tensor = encode_tiled(
        API[name], 0x7F0012345670, dims, strides, box, steps, 0, mode, l2_promotion, int(nan)
    )
    raw = tensor.encode()[:64] + np.random.default_rng(0).bytes(
        64
    )  # the host leaves the second half as it was
    assert len(raw) == 128 and tma.TensorMap.decode(raw) == tensor
    assert tma.TensorMap.decode(np.frombuffer(raw, np.uint8)) == tensor


def test_fields_lie_where_the_hardware_reads_them():
    tensor = encode_tiled(9, 0x1000, [100, 200, 3], [2 << 36, 1 << 37], [64, 128, 2], [1, 1, 1], 0, 3, 2)
    w = np.frombuffer(tensor.encode(), np.uint64).tolist()
    assert w[0] == 0x1000
    assert w[1] & 0xFFFF == 2 | 2 << 4 | 10 << 7 | 3 << 13
    assert w[1] >> 17 & 3 == 2 and w[1] >> 21 & 1 == 1
    assert (w[1] >> 32, w[2] & 0xFFFFFFFF, w[3] >> 32) == (2 << 32 & 0xFFFFFFFF, 0, 2 | 2 << 4)
    assert (w[4], w[5] & 0xFFFFFFFF) == (99 | 199 << 32, 2)
    assert (w[6] >> 56, w[7] & 0xFFFF, w[8:]) == (63, 127 | 1 << 8, [0] * 8)


def test_fill_patterns():
    half = encode_tiled(6, 0, [8], [], [8], [1], oob_fill=1)
    assert half.fill_pattern(16).tobytes() == b"\xff\x7f" * 8
    assert encode_tiled(6, 0, [8], [], [8], [1]).fill_pattern(4).tobytes() == bytes(4)


LEGAL = {
    "data_type": 6,
    "address": 0,
    "dims": [64, 64],
    "strides": [128],
    "box": [64, 8],
    "element_strides": [1, 1],
}


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"address": 8}, "multiple of 16"),
        ({"strides": [120]}, "multiple of 16"),
        ({"strides": [1 << 40]}, "2\\*\\*40"),
        ({"box": [257, 8]}, "1..256"),
        ({"box": [4, 8]}, "16 bytes"),
        ({"dims": [0, 64]}, "1..4294967296"),
        ({"element_strides": [1, 9]}, "1..8"),
        ({"swizzle_mode": 2}, "exceeds"),
        ({"swizzle_mode": 5}, "modelled"),
        ({"interleave": 1}, "modelled"),
        ({"data_type": 2, "oob_fill": 1}, "float"),
        ({"data_type": 14}, "inner box of 128 elements"),
        ({"data_type": 14, "dims": [128, 64], "box": [128, 8], "strides": [80]}, "multiples of 32 bytes"),
        ({"data_type": 99}, "CUtensorMapDataType"),
        ({"strides": []}, "needs 1 strides"),
    ],
)
def test_encoder_refuses_what_the_driver_refuses(change, rule):
    encode_tiled(**LEGAL)
    with pytest.raises(ValueError, match=rule):
        encode_tiled(**(LEGAL | change))


def test_plan_and_decode_refuse_nonsense():
    tensor = encode_tiled(**LEGAL)
    with pytest.raises(ValueError, match="rank 2"):
        tensor.plan([0], 0)
    with pytest.raises(ValueError, match="multiple of 128"):
        tensor.plan([0, 0], 64)
    with pytest.raises(ValueError, match="not a tiled"):
        tma.TensorMap.decode(bytes(128))
    word = np.frombuffer(tensor.encode(), np.uint64).copy()
    word[1] |= 2 << 19
    with pytest.raises(ValueError, match="in units 2"):
        tma.TensorMap.decode(word.tobytes())
    with pytest.raises(ValueError, match="128 bytes"):
        tma.TensorMap.decode(bytes(64))


@pytest.mark.parametrize(
    "what",
    [
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes",
    ],
)
def test_a_copy_that_is_not_tiled_is_named(what):
    at = ", ".join(["%r1"] * (5 if "gather4" in what else 4))
    more = "" if "gather4" in what else ", {%h0, %h0}"
    with pytest.raises(UnsupportedInstruction) as said:
        run(f"{what} [%r10], [%d0, {{{at}}}], [%r11]{more};", [aligned(32)])
    assert f"{what} (only tiled tensor maps are modelled)" in str(said.value).splitlines()[0]


def test_a_tensor_map_of_another_mode_is_named():
    raw = np.frombuffer(encode_tiled(**LEGAL).encode(), np.uint64).copy()
    decoded = tma.TensorMap.decode(raw.tobytes())
    raw[1] -= np.uint64(2)  # the mode, of which 2 is tiled: a kernel that makes a map of zeros leaves 0
    assert tma.TensorMap.decode(raw.tobytes()) == decoded
    raw[1] += np.uint64(3)
    with pytest.raises(ValueError, match=r"^not a tiled tensor map \(an im2col one is not .*word 1 is"):
        tma.TensorMap.decode(raw.tobytes())


@pytest.mark.parametrize("back", [1 << 34, 1 << 47, (1 << 63) + (1 << 40)])
def test_addresses_wrap_at_64_bits(back):
    """A ragged tensor's map begins far before its memory, or beyond 2**63; the last coordinate leads back."""
    real, stride = 0x7F0012345600, 1 << 34
    steps, rest = divmod(back, stride)
    assert not rest
    base = (real - 3 * 256 - back) % (1 << 64)
    ragged = tma.TensorMap(base, "bf16", (128, 1 << 30, 1 << 31), (256, stride), (64, 4, 1), (1, 1, 1))
    plain = tma.TensorMap(real, "bf16", (128, 64), (256,), (64, 4), (1, 1))
    found, wanted = ragged.plan([0, 3, steps], 0), plain.plan([0, 0], 0)
    assert found.bounds == wanted.bounds
    np.testing.assert_array_equal(found.global_addresses, wanted.global_addresses)
