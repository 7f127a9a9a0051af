"""What `overlap-gemm tune` measures on one GPU."""

import torch

from overlap_gemm.cli.tune import GpuProbe
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import BLOCKS, OperandTypes
from overlap_gemm.runtime.executor import cuda_executor
from overlap_gemm.runtime.group import LOCAL, resolve
from overlap_gemm.tuning.machine import machine_for
from overlap_gemm.tuning.space import candidates
from overlap_gemm.tuning.time_model import efficiency_key


def test_a_probe_measures_what_one_gpu_has(device):
    probe = GpuProbe(resolve(LOCAL), torch.device("cuda", 0), rounds=2)
    arch = cuda_executor(0).arch
    machine = machine_for(arch)
    every: list[GemmConfig] = candidates(arch, OperandTypes("bf16"), machine)
    config = max(every, key=lambda each: machine.efficiency[efficiency_key(each)])
    empty, ours, theirs = probe.empty(), probe.gemm(config, 4096, 4096, 4096), probe.product(4096, 4096, 4096)
    assert 0 < empty < theirs < probe.product(8192, 4096, 4096)
    assert 0.8 < theirs / ours < 1.3
    assert 0 < probe.host("product") < 1e-3
    for blocks in BLOCKS:
        for config in candidates(arch, OperandTypes("e4m3", blocks), machine)[:1]:
            assert empty < probe.gemm(config, 4096, 4096, 4096)
