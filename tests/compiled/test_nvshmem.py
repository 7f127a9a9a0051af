"""NVSHMEM linked where it may be: in the sm_100 GEMM, in the relay kernel, never in the sm_90 GEMM."""

from functools import partial

import pytest

from overlap_gemm.build import compile_kernel, make_gather_kernel, make_kernel
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.spec import PATTERNS
from overlap_gemm.transports import Staged
from overlap_gemm_tools.lint import inspect

CONFIGS = [
    GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128)),
    GemmConfig(arch="sm_90a", mma="cooperative", tile=(128, 256)),
    GemmConfig(arch="sm_90a", mma="swap_ab", tile=(16, 64), k_split=2),
]
QUICK = [(CONFIGS[0], "two_shot"), (CONFIGS[1], "reduce_scatter"), (CONFIGS[1], "input_gather")]
EVERY = [(config, op) for config in CONFIGS for op in PATTERNS]


@pytest.mark.parametrize(
    ("config", "op"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY if each not in QUICK)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_sm90_gemm_stays_free_of_nvshmem(config, op):
    if op == "input_gather":
        kernel = make_gather_kernel(config, Staged(), keep=True)
    else:
        kernel = make_kernel(config, Staged(), pattern=op)
    seen = inspect(partial(compile_kernel, kernel))
    assert "nvshmem" not in seen.ptx
    # Small accumulators leave every warp what it is launched with.
    assert seen.ptx.count("setmaxnreg") == (0 if config.is_swap_ab else 2)
    assert seen.findings(exchanges=True) == [], "C7506 and C7510 are what a linked NVSHMEM call brings"
    assert seen.report.registers <= 168 if config.is_swap_ab else seen.report.registers == 168
