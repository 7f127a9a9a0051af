"""The rule by which Hopper's tensor cores add, against what an H200 gave, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from cute_emulator.execution.launch import Machine
from cute_emulator.numbers import formats
from cute_emulator.numbers.tensor_cores import HOPPER, Width, aligned_sum
from cute_emulator.units.wgmma import Wgmma

MEASURED = np.load(Path(__file__).parent / "data" / "wgmma-h200.npz")
"""By ``A's type.B's type/set``: ``a`` ``uint8 [blocks, instructions, rows, 32]``, ``b`` of D's columns,
``c`` and ``d`` fp32's bits ``[blocks, rows, columns]``: D of a chain of wgmma.m64n8 that begins with C."""

SETS = sorted({name.rsplit("/", 1)[0] for name in MEASURED.files})


def values(raw: np.ndarray, kind: str) -> np.ndarray:
    return formats.widen(np.ascontiguousarray(raw).view(f"u{formats.ELEMENT_BYTES[kind]}"), kind)


def chains(name: str):
    """(A, B of each instruction, C, D) of each block of a set."""
    a_type, b_type = name.split("/")[0].split(".")
    a, b, c, d = (MEASURED[f"{name}/{part}"] for part in "abcd")
    for block in range(len(a)):
        yield (
            [values(rows, a_type) for rows in a[block]],
            [values(columns, b_type) for columns in b[block]],
            c[block].view(np.float32),
            d[block].view(np.float32),
        )


def differing(name: str, width: Width) -> int:
    """Values that the rule gives other bits than the device; any NaN is a NaN."""
    different = 0
    for a, b, total, device in chains(name):
        with np.errstate(all="ignore"):
            for left, right in zip(a, b, strict=True):
                total = aligned_sum(left, right, total, width)
        same = (total.view(np.uint32) == device.view(np.uint32)) | (np.isnan(total) & np.isnan(device))
        different += int((~same).sum())
    return different


@pytest.mark.parametrize("name", SETS)
def test_every_value_is_the_devices(name):
    assert differing(name, HOPPER[name.split(".")[0]]) == 0


@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
@pytest.mark.parametrize("change", [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_bit_more_or_fewer_is_noticed(kind, change):
    width = Width(*np.add(HOPPER[kind], change).tolist())
    assert differing(f"{kind}.{kind}/random5", width) > 0


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_wgmma_of_bytes_adds_so(kind):
    name = f"{kind}.{kind}/random5"
    shape = Wgmma(n=8, a_type=kind, b_type=kind)
    for a, b, total, device in chains(name):
        for left, right in zip(a, b, strict=True):
            total = shape.accumulate(left, right, total)
        assert np.array_equal(total.view(np.uint32), device.view(np.uint32))


def test_many_products_of_one_sign_need_promotion():
    """K = 28672: a third of the sum is lost; added in fp32 by 128 of K, 0.06 %, which every 128 lose."""
    a, b, c, device = next(chains("e4m3.e4m3/positive896"))
    exact = sum(
        left.astype(np.float64) @ right.astype(np.float64).T for left, right in zip(a, b, strict=True)
    )
    assert np.abs(device / exact - 1).min() > 0.3
    promoted = np.zeros_like(c)
    for first in range(0, len(a), 4):
        part = np.zeros_like(c)
        for left, right in zip(a[first : first + 4], b[first : first + 4], strict=True):
            part = aligned_sum(left, right, part, HOPPER["e4m3"])
        promoted += part
    assert np.abs(promoted / exact - 1).max() < 1e-3


def test_the_exact_setting_adds_in_float32():
    """448 * 448 + 1, which 14 bits cannot hold."""
    ones = np.zeros((64, 32), np.float32)
    ones[:, 0], ones[:, 1] = 448, 1
    others = np.zeros((8, 32), np.float32)
    others[:, 0], others[:, 1] = 448, 1
    shape = Wgmma(8, "e4m3", "e4m3", "f32")
    assert shape.accumulate(ones, others, None, "exact")[0, 0] == 448 * 448 + 1
    assert shape.accumulate(ones, others, None)[0, 0] == 448 * 448
    with pytest.raises(ValueError, match="sums='other' must be one of device, exact, bitwise"):
        Machine("sm_90a", sums="other")
