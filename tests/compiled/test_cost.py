"""What a kernel costs before it runs: registers and static instructions, kept from getting worse.

Of nvidia-cutlass-dsl 4.8.1 and ptxas 13.0. A better number replaces the one here; a worse one needs a reason.
"""

import re

import pytest

from overlap_gemm.kernels.config import CLUSTERS, GemmConfig
from overlap_gemm.kernels.lint import find_ptxas, run_ptxas

# (arch, mma, tile): registers and PTX instructions of the plain GEMM, then of GEMM reduce-scatter
COSTS = {
    ("sm_90a", "pingpong", (64, 128)): (168, 750, 168, 1655),
    ("sm_90a", "pingpong", (128, 128)): (168, 763, 168, 2250),
    ("sm_90a", "cooperative", (128, 256)): (168, 671, 168, 2222),
    ("sm_100a", "1cta", (128, 64)): (52, 693, 126, 1313),
    ("sm_100a", "1cta", (128, 256)): (51, 634, 124, 1250),
    ("sm_100a", "2cta", (256, 256)): (54, 727, 126, 1352),
}
SLACK = 1.03  # instructions: small changes of no consequence


@pytest.mark.skipif(find_ptxas() is None, reason="ptxas is not on PATH")
@pytest.mark.parametrize("kind", COSTS, ids=lambda k: f"{k[0]}-{k[1]}-{k[2][0]}x{k[2][1]}")
def test_cost_does_not_grow(kind, ptx_of):
    arch, mma, tile = kind
    config = GemmConfig(arch=arch, mma=mma, tile=tile, cluster=CLUSTERS[mma][0])
    for exchanges, registers, instructions in ((False, *COSTS[kind][:2]), (True, *COSTS[kind][2:])):
        ptx = ptx_of(config, exchanges)
        assert run_ptxas(ptx, arch).registers <= registers
        assert count_instructions(ptx) <= SLACK * instructions


def count_instructions(ptx):
    return sum(bool(re.match(r"\t(@\S+ +\t?)?[a-z][\w.]*[\s;]", line)) for line in ptx.splitlines())


def test_instructions_are_counted():
    assert (
        count_instructions("\tadd.s32 \t%r1, %r2, 3;\n\t@%p1 bra \t$L1;\n\t.reg .b32 %r<4>;\n$L1:\n\tret;\n")
        == 3
    )
