"""Kernels that sum leaves of K by a tree: nodes lie in local memory, which inner loops leave alone."""

import pytest

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import PROMOTED
from overlap_gemm_tools.sass import disassemble

BESIDE_NODES = 400
"""Bytes of a thread's stack, on sm_90a, for values that every tile needs once."""

CASES = [
    pytest.param("sm_90a", "pingpong", (128, 128), 2, marks=pytest.mark.slow),
    ("sm_90a", "cooperative", (128, 256), 8),
    ("sm_100a", "1cta", (128, 256), 2),
    pytest.param("sm_90a", "pingpong", (64, 128), 8, marks=pytest.mark.slow),
    pytest.param("sm_90a", "pingpong", (128, 128), 4, marks=pytest.mark.slow),
    pytest.param("sm_90a", "pingpong", (64, 256), 8, marks=pytest.mark.slow),
    pytest.param("sm_100a", "1cta", (128, 128), 8, marks=pytest.mark.slow),
]


def inner_loops(code):
    """Instructions of each loop around MMAs that has no such loop in it."""
    ends = [
        (one.targets[0], index)
        for index, one in enumerate(code)
        if one.root == "BRA" and one.targets and one.targets[0] < index
    ]
    loops = [
        (begin, end)
        for begin, end in ends
        if any(one.root in ("HGMMA", "QGMMA") for one in code[begin : end + 1])
    ]
    return [
        code[begin : end + 1]
        for begin, end in loops
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in loops)
    ]


@pytest.mark.parametrize("pattern", ["reduce_scatter", pytest.param("two_shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("arch", "mma", "tile", "leaves"), CASES)
def test_nodes_are_kept_in_local_memory_outside_of_inner_loops(arch, mma, tile, leaves, pattern, compiled):
    cluster = (1, 1)
    config = GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster, slot_dtype="f32", leaves=leaves)
    check_nodes(config, compiled(config, pattern))


@pytest.mark.parametrize(
    ("mma", "tile", "cluster"),
    [
        pytest.param("pingpong", (64, 128), (1, 1), marks=pytest.mark.slow),
        ("cooperative", (128, 128), (1, 1)),
    ],
)
def test_nodes_of_promoted_sums_are_kept_in_local_memory(mma, tile, cluster, compiled):
    eight_bits = {"in_dtype": "e4m3", "blocks": PROMOTED[0]}
    config = GemmConfig(
        arch="sm_90a", mma=mma, tile=tile, cluster=cluster, slot_dtype="f32", leaves=8, **eight_bits
    )
    check_nodes(config, compiled(config, "reduce_scatter"))


def check_nodes(config, seen):
    """Compares the stack with the nodes' bytes, and looks for local memory in inner loops."""
    assert seen.report.warnings == ()
    others = seen.report.stack_bytes - config.parked_bytes
    assert 0 <= others <= (BESIDE_NODES if config.arch == "sm_90a" else 16)
    if config.arch == "sm_90a":
        loops = sorted(inner_loops(disassemble(seen.cubin)), key=len)[:2]
        assert len(loops) == 2  # of the leaves but the last, and of the last
        assert not any(one.root in ("LDL", "STL") for loop in loops for one in loop)


@pytest.mark.parametrize(("mma", "tile"), [("pingpong", (64, 128)), ("cooperative", (128, 128))])
def test_one_node_of_a_small_accumulator_lies_in_registers(mma, tile, compiled):
    config = GemmConfig(arch="sm_90a", mma=mma, tile=tile, cluster=(1, 1), slot_dtype="f32", leaves=2)
    seen = compiled(config, "reduce_scatter")
    assert seen.findings(exchanges=True) == []
