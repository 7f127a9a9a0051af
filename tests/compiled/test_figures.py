"""Registers, shared memory and inner loops do not grow unseen.

`overlap-gemm compile-check --json benchmarks/results/kernels.json` writes the figures anew; do that in the
commit that changes them, with the reason.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from overlap_gemm.config.visitors import SCALES
from overlap_gemm_tools.compile_check import (
    check,
    checked_configs,
    figures_of,
    kernels_of,
)
from overlap_gemm_tools.lint import count_instructions, inner_loop_instructions

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/results/kernels.json").read_text())
CONFIGS = {config.name: config for arch in ("sm_90a", "sm_100a") for config in checked_configs(arch)}
QUICK = ["sm_90a_pingpong_128x128_c1x1_bf16", "sm_90a_cooperative_128x256_c1x1_bf16"]
QUICK += ["sm_100a_1cta_128x256_c1x1_bf16", "sm_100a_2cta_256x256_c2x1_bf16"]
EIGHT_BITS = "sm_90a_cooperative_128x128_c2x1_e4m3_obf16_sbf16"
QUICK_PROMOTING = [f"{EIGHT_BITS}_b1x32x32", f"{EIGHT_BITS}_{SCALES.name}"]
FOR_ALL = ("GEMM", "GEMM-RS")
IN_TURN = {
    (QUICK[2 - 2 * (number % 2)], op)
    for number, op in enumerate(op for op in kernels_of(CONFIGS[QUICK[0]]) if op not in FOR_ALL)
}
"""Other ops, each with a kernel of one architecture."""
PROMOTING = [name for name, config in CONFIGS.items() if config.promotes]
SLACK = 1.03  # instructions: small changes of no consequence


def test_every_kernel_is_recorded():
    """Of the ops whose results go to everybody, the quick ones at least."""
    every = {f"{name} {op}" for name, config in CONFIGS.items() for op in kernels_of(config)}
    wide = [name for name, config in CONFIGS.items() if not config.has_bytes]
    wanted = {f"{name} {op}" for name in wide for op in ("GEMM", "GEMM-RS")}
    wanted |= {f"{name} {op}" for name in QUICK for op in kernels_of(CONFIGS[name])}
    assert wanted <= set(RECORDED) <= every


@pytest.mark.parametrize(
    ("name", "op"),
    [
        (name, op)
        if (name, op) in IN_TURN or (name in QUICK and op in FOR_ALL)
        else pytest.param(name, op, marks=pytest.mark.slow)
        for name, op in (key.split(" ", 1) for key in RECORDED)
    ],
)
def test_nothing_has_grown(name, op):
    checked = check(CONFIGS[name], op)
    assert not checked.findings
    now, recorded = figures_of(checked), RECORDED[f"{name} {op}"]
    grown = {
        figure: (recorded[figure], value)
        for figure, value in now.items()
        if value > recorded[figure] * (SLACK if "instructions" in figure else 1)
    }
    assert not grown, f"(recorded, now): {grown}"


@pytest.mark.parametrize("name", ["sm_90a_swap_ab_32x64_c1x1_bf16_k2", "sm_90a_swap_ab_128x64_c1x1_bf16"])
def test_kernels_for_few_rows_are_checked_as_they_run(name):
    """Of small tiles the data is its own flag; with other kernels' registers their receive role spills."""
    checked = check(CONFIGS[name], "GEMM-AR two-shot")
    assert not checked.findings


@pytest.mark.parametrize(
    ("name", "op"),
    [
        (name, op)
        if (name, op)
        in zip(QUICK_PROMOTING * 2, ("GEMM-AR two-shot", "AG-GEMM sending", "GEMM-RS"), strict=False)
        else pytest.param(name, op, marks=pytest.mark.slow)
        for name in PROMOTING
        for op in kernels_of(CONFIGS[name])
    ],
)
def test_promoting_kernels_spill_nowhere(name, op):
    """Consumers have three sums in registers, the receive and shard roles few: each kernel there is."""
    assert not check(CONFIGS[name], op).findings


@pytest.mark.parametrize("op", ["A2A-GEMM sending", pytest.param("A2A-GEMM", marks=pytest.mark.slow)])
def test_kernels_of_mx_types_exchange_slices_and_spill_nowhere(op):
    assert not check(CONFIGS["sm_100a_2cta_256x256_c2x1_e4m3_obf16_sbf16_b1x1x32"], op).findings


@pytest.mark.parametrize("op", ["A2A-GEMM sending", "AG-GEMM sending", "GEMM-RS"])
def test_a_kernel_of_three_matrices_spills_nothing(op):
    """Checks the load warp, which has few registers: it loads each along K, or chooses one along N."""
    config = replace(CONFIGS[QUICK[1]], weights=3, b_major="n")
    assert not check(config, op).findings


def test_the_inner_loop_is_the_shortest_that_multiplies():
    loop = "$A:\n add.s32 %r1, %r1, 1;\n {mma}\n @%p1 bra $A;\n"
    outer = "$B:\n mov.u32 %r2, %r1;\n" + loop.format(mma="tcgen05.mma x;") + " @%p2 bra $B;\n"
    assert inner_loop_instructions(outer) == 3
    with pytest.raises(ValueError, match="no loop"):
        inner_loop_instructions(loop.format(mma="nop;"))


def test_instructions_are_counted():
    text = "\tadd.s32 \t%r1, %r2, 3;\n\t@%p1 bra \t$L1;\n\t.reg .b32 %r<4>;\n$L1:\n\tret;\n"
    assert count_instructions(text) == 3
