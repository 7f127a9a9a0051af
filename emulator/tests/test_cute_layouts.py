"""Addresses and register maps against the layouts CuTe DSL computes: two independent statements."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cute_emulator.units import mma, smem_desc, swizzle, tmem

ROW = {"INTER": swizzle.NONE, "SW32": swizzle.SW32, "SW64": swizzle.SW64, "SW128": swizzle.SW128}
ROW["SW128_32B"] = swizzle.SW128_BASE32


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def cute(request, tmp_path_factory):
    where = tmp_path_factory.mktemp("cute")
    environment = os.environ | {"CUTE_DSL_ARCH": request.param, "CUTE_DSL_DUMP_DIR": str(where)}
    script = Path(__file__).with_name("cute_layouts.py")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), request.param],
        env=environment, cwd=where, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def canonical(kind, size):
    """LBO and SBO of a 128-row tile made of whole atoms, stacked first along the strided dimension."""
    major, _, layout = kind.partition("_")
    mode = ROW[layout]
    if major == "K":
        # Atoms of 8 rows follow each other; without swizzle the next 16 bytes of k lie after all 128 rows.
        return mode, 128 * 16, 8 * mode.row_bytes
    k_atoms = 32 // size // 8 or 1
    group = 4 if mode.base == 5 else 8
    if mode.bits == 0:
        return mode, 128, 128 * k_atoms
    return mode, 8 * mode.row_bytes * k_atoms, group * mode.row_bytes


def test_shared_memory_tiles(cute):
    tables = {name: entry for name, entry in cute.items() if name.startswith("smem")}
    assert len(tables) >= 24
    for name, (bits, base, shift, table) in tables.items():
        kind, size = name.split()[1], int(name.split()[2])
        mode, leading, stride = canonical(kind, size)
        descriptor = smem_desc.SmemDescriptor(0, leading, stride, mode)
        ours = descriptor.addresses(128, 32 // size, size, kind.startswith("MN"))
        theirs = np.array(table) * size
        theirs ^= (theirs >> shift) & (((1 << bits) - 1) << base)
        np.testing.assert_array_equal(ours[::3], theirs, err_msg=name)


def test_register_fragments(cute):
    tables = {name: np.array(t) for name, t in cute.items() if name.split()[0] in ("mma", "wgmma")}
    assert tables
    for name, table in tables.items():
        operand, rows = name[-1], {"A": 16, "B": 8, "C": 16}[name[-1]]
        warpgroup = name.startswith("wgmma")
        k = 16 if warpgroup else int(name.split()[2])
        columns = (24 if warpgroup else 8) if operand == "C" else k
        # Fill registers with the patterns' own positions, in CuTe's (thread, value) order, and see them
        # sorted.
        pitch = 64 if warpgroup else rows
        position = (table % pitch) * columns + table // pitch  # row-major number of each element
        for w in range(4 if warpgroup else 1):
            mine = position[32 * w : 32 * w + 32].T - w * rows * columns  # [values, lanes]
            if operand == "C":
                matrix = mma.c_matrix(np.ascontiguousarray(mine.astype(np.float32)).view(np.uint32), "f32")
            else:
                words = (mine[0::2] | mine[1::2] << 16).astype(np.uint32)
                matrix = (mma.a_matrix if operand == "A" else mma.b_matrix)(words, 2)
            np.testing.assert_array_equal(
                matrix.reshape(-1), np.arange(rows * columns), err_msg=f"{name} warp {w}"
            )


def test_transposed_matrices_of_bytes(cute):
    """CuTe numbers the bytes of two matrices as they lie in shared memory, rows of 16."""
    if "bytes load" not in cute:
        assert "smem MN_SW128 2" in cute  # sm_90a has none
        return
    load, store = (np.array(cute[name]) for name in ("bytes load", "bytes store"))
    shared = np.random.default_rng(0).integers(0, 256, 512, np.uint8)
    registers = mma.ldmatrix_bytes(shared)  # [register, lane]
    np.testing.assert_array_equal(registers.T.copy().view(np.uint8).reshape(32, 16), shared[load])
    words = np.ascontiguousarray(shared[:256][store].view(np.uint32).T)
    np.testing.assert_array_equal(mma.stmatrix_bytes(words).reshape(-1), shared[:256])


def test_tensor_memory_loads(cute):
    tables = {name: np.array(t) for name, t in cute.items() if name.startswith("Ld")}
    if not tables:
        assert "smem MN_SW128 2" in cute  # sm_90a has no tensor memory
        return
    for name, table in tables.items():
        shape, repeat = name.split()[0].removeprefix("Ld").removesuffix("Op"), int(name.split()[1])
        lanes = 32 if shape == "32x32b" else 16
        columns = table.size // lanes
        cells = np.full((128, 512), 0xFFFFFFFF, np.uint32)
        cells[:lanes, :columns] = np.arange(table.size).reshape(lanes, columns)
        np.testing.assert_array_equal(
            tmem.load(cells, 0, shape, repeat, split=columns // 2), table.T, err_msg=name
        )
