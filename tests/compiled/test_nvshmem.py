"""NVSHMEM linked where it may be: in the sm_100 GEMM, in the relay kernel, never in the sm_90 GEMM."""

import pytest

from overlap_gemm.kernels.build import compile_kernel, make_kernel
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.lint import find_ptxas, ptx_findings, ptxas_findings, run_ptxas
from overlap_gemm.transports import Staged

CONFIGS = [
    GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128)),
    GemmConfig(arch="sm_90a", mma="cooperative", tile=(128, 256)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_the_sm90_gemm_stays_free_of_nvshmem(config, tmp_path):
    options = f"--keep-ptx --dump-dir={tmp_path}"
    ptx = compile_kernel(make_kernel(config, Staged()), options).__ptx__
    assert "nvshmem" not in ptx
    assert ptx.count("setmaxnreg") == 2
    assert ptx_findings(ptx, exchanges=True) == []
    if find_ptxas():
        report = run_ptxas(ptx, config.arch)
        assert ptxas_findings(report) == [], "C7506 and C7510 are what a linked NVSHMEM call brings"
        assert report.registers == 168
