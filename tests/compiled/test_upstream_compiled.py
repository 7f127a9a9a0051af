"""examples/upstream as it is assembled: no spills, no serialised wgmma, registers moved, the right waits."""

import re
from functools import partial
from pathlib import Path

import cutlass
import pytest
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from overlap_gemm_tools.lint import inspect, ptxas_findings
from overlap_gemm_tools.sass import disassemble, sass_findings
from tests.support.scripts import load

FOLDER = Path(__file__).parents[2] / "examples" / "upstream"
CONFIGURATIONS = [((128, 256), (2, 1)), ((128, 128), (1, 1)), ((64, 64), (1, 2))]


def tensor(dtype, rank, leading):
    """Any extents; rows at multiples of 16 bytes."""
    stride = tuple(1 if i == leading else cute.sym_int64(divisibility=8) for i in range(rank))
    return make_fake_tensor(dtype, tuple(cute.sym_int32() for _ in stride), stride=stride, assumed_align=16)


def compile_example(gemm, options):
    operands = tensor(gemm.ab_dtype, 3, 1), tensor(gemm.ab_dtype, 2, 1), tensor(gemm.c_dtype, 2, 1)
    tables = [tensor(cutlass.Int64, 1, 0) for _ in range(2)]
    scalars = [Int32(0), Int32(1), Int32(1)]
    return cute.compile(
        gemm, *operands, *tables, *scalars, make_fake_stream(), options=f"--gpu-arch sm_90a {options}"
    )


@pytest.mark.parametrize(("tile", "cluster"), CONFIGURATIONS, ids=str)
def test_the_kernel_is_clean(tile, cluster):
    example = load(FOLDER / "distributed_gemm_reduce_scatter_hopper.py")
    gemm = example.HopperGemmReduceScatterKernel(cutlass.BFloat16, cutlass.BFloat16, tile, cluster)
    found = inspect(partial(compile_example, gemm))
    assert ptxas_findings(found.report) == []
    code = disassemble(found.cubin)
    assert sass_findings(code) == []
    opcodes = [one.opcode for one in code]
    assert {"USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL"} <= set(opcodes)
    # The comm lane, in the order of the text.
    wait = r"cp\.async\.bulk\.wait_group(?:\.read)?|st\.release\.\w+"
    waits = re.findall(wait, found.ptx)
    reads = ["cp.async.bulk.wait_group.read"] * (gemm.subtiles - 1)
    assert waits == [*reads, "cp.async.bulk.wait_group", "st.release.sys"]
    acquires = re.findall(r"ld\.acquire\.\w+", found.ptx)
    assert acquires and set(acquires) == {"ld.acquire.sys"}


def test_both_waits_are_one_instruction():
    """As read_wait_race.py says."""
    example, waits = load(FOLDER / "read_wait_race.py"), {}
    x, flag = (
        make_fake_tensor(dtype, (size,), stride=(1,), assumed_align=16)
        for dtype, size in ((cutlass.Float32, example.ELEMENTS), (cutlass.Int32, 1))
    )
    for is_read in (False, True):

        def build(options, is_read=is_read):
            arguments = x, x, x, flag, Int32(1), is_read, make_fake_stream()
            return cute.compile(example.send, *arguments, options=f"--gpu-arch sm_90a {options}")

        found = inspect(build)
        assert ("wait_group.read" in found.ptx) == is_read
        code = disassemble(found.cubin)
        waits[is_read] = [(one.opcode, one.operands) for one in code if one.root == "DEPBAR"]
    assert waits[True] == waits[False] == [("DEPBAR.LE", "SB0, 0x0")]
