"""NVSHMEM linked where it may be: in the sm_100 GEMM, in the relay kernel, never in the sm_90 GEMM."""

import pytest

from overlap_gemm.kernels.build import OPS, compile_kernel, make_gather_kernel, make_kernel
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.lint import find_ptxas, ptx_findings, ptxas_findings, run_ptxas
from overlap_gemm.transports import Staged

CONFIGS = [
    GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128)),
    GemmConfig(arch="sm_90a", mma="cooperative", tile=(128, 256)),
    GemmConfig(arch="sm_90a", mma="swapped", tile=(16, 64), k_split=2),
]
QUICK = [(CONFIGS[0], "two_shot"), (CONFIGS[1], "reduce_scatter"), (CONFIGS[1], "all_gather")]
EVERY = [(config, op) for config in CONFIGS for op in (*OPS, "all_gather")]


@pytest.mark.parametrize(
    ("config", "op"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY if each not in QUICK)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_sm90_gemm_stays_free_of_nvshmem(config, op, tmp_path):
    options = f"--keep-ptx --dump-dir={tmp_path}"
    if op == "all_gather":
        kernel = make_gather_kernel(config, Staged(), keep=True)
    else:
        kernel = make_kernel(config, Staged(), pattern=op)
    ptx = compile_kernel(kernel, options).__ptx__
    assert "nvshmem" not in ptx
    assert ptx.count("setmaxnreg") == 2
    assert ptx_findings(ptx, exchanges=True) == []
    if find_ptxas():
        report = run_ptxas(ptx, config.arch)
        assert ptxas_findings(report) == [], "C7506 and C7510 are what a linked NVSHMEM call brings"
        assert report.registers == 168
