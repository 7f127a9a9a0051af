"""Where in a row a tiled TMA copy may begin, against what an H200 did (`data/README.md`)."""

import re
from pathlib import Path

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.units.tma_encode import encode_tiled

from .handwritten import aligned, run

LINE = re.compile(
    r"(first byte (?P<first>\d+) )?size (?P<size>\d) swizzle (?P<swizzle>\d) box (?P<box>\d+) "
    r"coord (?P<at>-?\d+) \(-?\d+ B\) (?P<what>load|store): (?P<said>.*)"
)
RUNS = [
    LINE.fullmatch(line).groupdict()
    for line in (Path(__file__).parent / "data" / "tma-coordinates-h200.txt").read_text().splitlines()
]
ILLEGAL = "an illegal instruction was encountered"
TYPES, UINT32 = {1: 0, 2: 9, 4: 7}, 2
"""CUtensorMapDataType: uint8, bf16 and float32 by bytes of an element."""
ROW, ROWS, PITCH = 3, 8, 1024
"""First row of the box, rows in it, bytes of a row."""

LOAD = """
mbarrier.init.shared.b64 [%r11], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], {bytes};
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r10], [%d1, {{%r1, %r2}}], [%r11];
W: mbarrier.try_wait.parity.shared.b64 %p1, [%r11], 0; @!%p1 bra W;
ld.shared.u8 %r3, [%r10]; st.global.b32 [%d2], %r3;
"""
WRITE = """
mov.b32 %r3, 0; mov.b32 %r4, 0x07070707;
L: add.s32 %r5, %r10, %r3; st.shared.b32 [%r5], %r4; add.s32 %r3, %r3, 4;
setp.lt.s32 %p1, %r3, {bytes}; @%p1 bra L;
fence.proxy.async.shared::cta;
OPERATION.bulk_group [%d1, {{%r1, %r2}}], [%r10];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
BODIES = {
    "load": LOAD,
    "store": WRITE.replace("OPERATION", "cp.async.bulk.tensor.2d.global.shared::cta"),
    "reduction": WRITE.replace("OPERATION", "cp.reduce.async.bulk.tensor.2d.global.shared::cta.or.tile"),
}
SMEM = ".shared .align 1024 .b8 buf[1024]; .shared .align 8 .b64 bar;"


def copy(case, arch="sm_90a") -> tuple[np.ndarray, int]:
    """Runs the probe's copy of one case in the emulator.

    Returns:
        `uint8 [64, 1024]`: the tensor afterwards; the first byte that a load brought.
    """
    size, swizzle, box, at = (int(case[key]) for key in ("size", "swizzle", "box", "at"))
    tensor, raw, out = aligned(64 * PITCH, np.uint8), aligned(128, np.uint8), aligned(1)
    tensor[:] = np.arange(tensor.size) % 251
    data_type = UINT32 if case["what"] == "reduction" else TYPES[size]
    dims, boxes = [PITCH // size, 64], [box, ROWS]
    made = encode_tiled(data_type, tensor.ctypes.data, dims, [PITCH], boxes, [1, 1], swizzle_mode=swizzle)
    raw[:] = np.frombuffer(made.encode(), np.uint8)
    text = f"cvt.u32.u64 %r1, %d3; mov.b32 %r2, {ROW}; mov.b32 %r10, buf; mov.b32 %r11, bar;"
    text += BODIES[case["what"]].format(bytes=box * ROWS * size)
    run(text, [tensor, raw, out, at], SMEM, block=(1, 1, 1), arch=arch)
    return tensor.reshape(64, PITCH), int(out[0])


def test_the_table_is_whole():
    assert len({tuple(case[key] for key in ("size", "swizzle", "what", "at")) for case in RUNS}) == 140
    assert {case["said"] for case in RUNS} == {ILLEGAL, "no error"}


@pytest.mark.parametrize("case", RUNS, ids=lambda c: "{what}-{size}B-swizzle{swizzle}-{at}".format(**c))
def test_a_copy_runs_where_the_device_ran_it(case):
    begin = int(case["at"]) * int(case["size"])
    if case["said"] == ILLEGAL:
        with pytest.raises(EmulatorError, match=f" is byte {begin}: .* illegal instruction"):
            copy(case)
        return
    tensor, first = copy(case)
    if case["what"] == "load":
        assert first == int(case["first"])
    else:
        want = (np.arange(tensor.size) % 251).astype(np.uint8).reshape(tensor.shape)
        want[ROW : ROW + ROWS, begin : begin + int(case["box"]) * int(case["size"])] = 7
        np.testing.assert_array_equal(tensor, want)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("at", [0, 4, 2, -4, -1])
def test_a_reduction_is_judged_as_a_store_and_blackwell_as_hopper(arch, at):
    """Neither was measured."""
    case = {"what": "reduction", "size": 4, "swizzle": 0, "box": 4, "at": at}
    if at in (0, 4):
        tensor, _ = copy(case, arch)
        assert (tensor[ROW, 4 * at : 4 * at + 16] & 7 == 7).all()
        return
    with pytest.raises(EmulatorError, match=f" is byte {4 * at}: .* illegal instruction"):
        copy(case, arch)


@pytest.mark.parametrize(
    "at, what, said",
    [
        (3, "load", "is byte 6: a copy begins at a multiple of 8 elements (16 bytes)"),
        (-8, "store", "is byte -16: a store or reduction begins at 0 or later"),
    ],
)
def test_the_error_says_the_coordinate_and_the_rule(at, what, said):
    with pytest.raises(EmulatorError) as error:
        copy({"what": what, "size": 2, "swizzle": 0, "box": 8, "at": at})
    assert f"innermost coordinate {at} of bf16 (16 bits each) {said}" in str(error.value)
    assert "cp.async.bulk.tensor" in str(error.value)
