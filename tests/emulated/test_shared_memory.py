"""What a kernel takes of shared memory is what its configuration says."""

import pytest
import torch

from cute_emulator import Emulator
from overlap_gemm.build import make_kernel
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.rules import CONTROL_WORDS
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.transports import PeerBulk
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.space import every_config

ARCHS = ["sm_90a", "sm_100a"]


def full(arch):
    """Fields of a configuration whose stages leave nothing: what came after them had no room."""
    fields = [
        {"mma": "swap_ab", "tile": (16, 64), "ring_stages": stages, "inflight": 1} for stages in range(2, 40)
    ]
    return min(fields, key=lambda each: unused(GemmConfig(arch=arch, **each)))


def unused(config):
    return config.on.smem_bytes - config.smem_bytes


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_whose_stages_leave_no_byte_runs(arch, monkeypatch):
    fields = full(arch)
    config, case = GemmConfig(arch=arch, **fields), Case("gemm_all_reduce", 16, 64, 128, torch.bfloat16)
    assert unused(config) < 2048, "no room for another ring stage"
    taken = []
    with (
        configured(**fields),
        Emulator(arch, 2, num_sms=2) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        submit = emulator.machine.submit
        monkeypatch.setattr(
            emulator.machine, "submit", lambda launch: (taken.append(launch.dynamic_smem), submit(launch))
        )
        for given, outs in run_launches(case, world, 2):
            assert judge(case, given, outs, torch.bfloat16).holds
    assert taken and all(config.smem_bytes - 1024 <= nbytes <= config.smem_bytes for nbytes in taken)


@pytest.mark.parametrize("arch", ARCHS)
def test_control_words_have_room(arch):
    for config in every_config(arch):
        words = make_kernel(config, PeerBulk()).mainloop.num_barriers - 2 * config.ab_stages + 1
        assert words <= CONTROL_WORDS, config.name
