"""The probe's collectives and host times on CPU ranks, where a "captured" call is just called."""

from unittest import mock

import torch

from cute_emulator import Emulator
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.cli import tune
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import MX, OperandTypes
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.tuning.calibrate import COLLECTIVES
from overlap_gemm.tuning.space import candidates


def probe_on_cpu(rank: int, size: int) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    probe = tune.GpuProbe(resolve(group_name(None)), torch.device("cpu"), rounds=1)
    made: list[int] = []
    random = probe._random

    def counting(self, rows: int, columns: int) -> torch.Tensor:
        made.append(rows * columns * 2)
        return random(rows, columns)

    with (
        mock.patch.object(tune, "captured", lambda call: call),
        mock.patch.object(tune.GpuProbe, "_random", counting),
        mock.patch.object(tune.torch.cuda, "synchronize"),
        mock.patch.object(tune, "HOST_CALLS", 1),
        mock.patch.object(tune, "SMALL", (6, 8, 8)),
    ):
        seconds = {name: probe.collective(name, 1 << 14) for name in COLLECTIVES}
        moved = dict(zip(COLLECTIVES, made[1::2], strict=True))  # each makes its own part, then the whole
        hosts = {name: probe.host(name) for name in ("product", "torch", "sequential", "decomposed")}
    return seconds, moved, hosts


def kernels_in_the_emulator(rank: int, size: int) -> tuple[float, float]:
    """Plain products of this rank alone, with the world around it initialised as `tune` has it."""
    probe = tune.GpuProbe(resolve(group_name(None)), torch.device("cpu"), rounds=1)
    config = GemmConfig("sm_90a", (64, 128), (1, 1), "pingpong")
    with mock.patch.object(tune, "captured", lambda call: call), Emulator("sm_90a", 1):
        return probe.gemm(config, 64, 128, 64), probe.product(64, 128, 64)


def kernels_with_scales_of_blocks(rank: int, size: int) -> dict[str, list[str]]:
    """Which kernels a probe launches that is asked for those with scales of blocks."""
    probe = tune.GpuProbe(resolve(group_name(None)), torch.device("cpu"), rounds=1)
    launched: dict[str, list[str]] = {}
    real = plans.compiled_kernel

    def compiled(executor, config, *others):
        names.append(config.name)
        return real(executor, config, *others)

    for arch, blocks in (("sm_90a", (1, 128, 128)), ("sm_90a", (1, 32, 32)), ("sm_100a", MX)):
        config = candidates(arch, OperandTypes("e4m3", blocks))[0]
        names = launched[config.name] = []
        with (
            mock.patch.object(tune, "captured", lambda call: call),
            mock.patch.object(plans, "compiled_kernel", compiled),
            Emulator(arch, 1),
        ):
            assert probe.gemm(config, 128, 128, 256) > 0
    return launched


def test_kernels_with_scales_of_blocks_are_those_that_are_asked_for(ranks):
    (launched,) = ranks(1).run(kernels_with_scales_of_blocks)
    assert len(launched) == 3
    assert launched == {name: [name] for name in launched}


def test_kernels_are_measured_on_every_rank_alone(ranks):
    for ours, theirs in ranks(2).run(kernels_in_the_emulator):
        assert ours > theirs > 0


def test_collectives_move_what_is_asked_and_all_ranks_know_the_slowest(ranks):
    first, second = ranks(2).run(probe_on_cpu)
    assert first == second, "times are those of the slowest rank"
    seconds, moved, hosts = first
    assert all(value > 0 for value in (*seconds.values(), *hosts.values()))
    # P = 2: half of a tensor leaves each rank; an all-reduce sends half of it twice.
    assert moved == {"reduce_scatter": 1 << 15, "all_gather": 1 << 15, "all_reduce": 1 << 14, "sum": 1 << 15}
