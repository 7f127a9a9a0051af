"""Prints, as JSON, layouts that CuTe DSL computes on the host for the architecture in CUTE_DSL_ARCH.

Run in a process of its own by test_cute_layouts.py: the architecture is fixed when cutlass is imported.
"""

import json
import sys

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warp, warpgroup

DTYPES = {1: cutlass.Float8E4M3FN, 2: cutlass.BFloat16, 4: cutlass.TFloat32}
ROWS = range(0, 128, 3)
"""Of a tile of 128: every place in an atom of 8, and every atom, at a third of the time."""
RESULT: dict[str, object] = {}


def tv_table(layout):
    threads, values = cute.size(layout, mode=[0]), cute.size(layout, mode=[1])
    return [[layout((t, v)) for v in range(values)] for t in range(threads)]


def smem_tables(name, kinds, make_atom):
    """Tiles of repeated canonical atoms: byte swizzle, and element offset of every (row of ROWS, k)."""
    for kind in kinds:
        for size, dtype in DTYPES.items():
            if kind.name == "MN_SW128_32B" and size != 4:
                continue
            k_extent = 32 // size
            order = (0, 1) if kind.name.startswith("K") else (1, 0)
            atom = make_atom(kind, dtype)
            k = max(k_extent, cute.size(atom, mode=[1]))
            tile = cute.tile_to_shape(atom, (128, k), order)
            table = [[tile.outer((r, c)) for c in range(k_extent)] for r in ROWS]
            mode = tile.inner
            RESULT[f"{name} {kind.name} {size}"] = [mode.num_bits, mode.num_base, mode.num_shift, table]


def warp_mmas():
    for size, dtype, k in ((2, cutlass.BFloat16, 16), (2, cutlass.BFloat16, 8)):
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(dtype, cutlass.Float32, (16, 8, k)))
        for operand in "ABC":
            RESULT[f"mma {size} {k} {operand}"] = tv_table(getattr(atom, f"tv_layout_{operand}"))


def matrices_of_bytes():
    load, store = warp.LdMatrix16x16x8bOp(True, 2), warp.StMatrix16x8x8bOp(True, 2)
    RESULT["bytes load"] = tv_table(cute.make_copy_atom(load, cutlass.Int8).layout_dst_tv)
    RESULT["bytes store"] = tv_table(cute.make_copy_atom(store, cutlass.Int8).layout_src_tv)


@cute.jit
def sm_100a():
    smem_tables("smem", tcgen05.SmemLayoutAtomKind, tcgen05.make_smem_layout_atom)
    warp_mmas()
    matrices_of_bytes()
    loads = (
        tcgen05.Ld32x32bOp,
        tcgen05.Ld16x64bOp,
        tcgen05.Ld16x128bOp,
        tcgen05.Ld16x256bOp,
        tcgen05.Ld16x32bx2Op,
    )
    for op in loads:
        for repeat in (tcgen05.Repetition.x1, tcgen05.Repetition.x4):
            atom = cute.make_copy_atom(op(repeat), cutlass.Float32)
            RESULT[f"{op.__name__} {repeat.value}"] = tv_table(atom.layout_dst_tv)


@cute.jit
def sm_90a():
    smem_tables("smem", warpgroup.SmemLayoutAtomKind, warpgroup.make_smem_layout_atom)
    source, major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
    operation = warpgroup.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (64, 24, 16), source, major, major)
    atom = cute.make_mma_atom(operation)
    for operand in "AC":
        RESULT[f"wgmma {operand}"] = tv_table(getattr(atom, f"tv_layout_{operand}"))


if __name__ == "__main__":
    {"sm_100a": sm_100a, "sm_90a": sm_90a}[sys.argv[1]]()
    print(json.dumps(RESULT))
