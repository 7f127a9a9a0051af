"""Reduce-scatters of few rows as all-reduces, of which a rank keeps its rows (`lower_small_rs_to_ar`)."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, Schedule
from overlap_gemm.backends.fused import fused_backend as fused
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import patterns_of
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, poisoned_allocations, queue_launch, run_launches
from overlap_gemm.tuning import space
from overlap_gemm.tuning.machine import machine_for
from overlap_gemm.tuning.settings import configured

KERNELS = {
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
    "sm_100a": {"mma": "1cta", "tile": (128, 64)},
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Whatever the model expects of products as small as these."""
    eager = cache(lambda arch: replace(machine_for(arch), ar_gain=1e9))
    monkeypatch.setattr(space, "constants", eager)


@pytest.fixture
def taken(monkeypatch):
    """(pattern of the op, pattern of its plan) of each call."""
    found, plan_for = [], fused.plan_for

    def noting(group, device, dtype, shape, *others):
        plan = plan_for(group, device, dtype, shape, *others)
        found.append((shape.pattern, plan.pattern))
        return plan

    monkeypatch.setattr(fused, "plan_for", noting)
    return found


AS_ALL_REDUCES = {("reduce_scatter", pattern) for pattern in patterns_of("gemm_all_reduce")}
QUICK = [("sm_90a", 4, 5), ("sm_100a", 2, 16)]
SWEEP = [(arch, ranks, rows) for arch in KERNELS for ranks in (2, 3, 4) for rows in (1, 5, 16, 40, 64)]


@pytest.mark.parametrize(
    ("arch", "ranks", "rows"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SWEEP if one not in QUICK)],
)
def test_every_world(taken, arch, ranks, rows):
    """Uneven shards; with fewer rows than ranks, and 5 of 4 ranks, the last ones own none."""
    case = Case("gemm_reduce_scatter", rows, 136, 72 * ranks, torch.bfloat16, bias=rows % 2 == 1)
    with (
        Emulator(arch, ranks, "lazy", num_sms=4) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
        poisoned_allocations(),
    ):
        for given, outs in run_launches(case, world, 3):
            assert judge(case, given, outs, torch.bfloat16).holds
    assert taken and set(taken) <= AS_ALL_REDUCES


@pytest.mark.parametrize("named", [{"tile": (16, 64), "mma": "swap_ab"}, {"transport": "peer_bulk"}])
def test_who_names_a_kernel_or_a_transport_gets_the_reduce_scatter(taken, named):
    case = Case("gemm_reduce_scatter", 16, 136, 128, torch.bfloat16)
    with configured(**named), Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for given, outs in run_launches(case, world, 1):
            assert judge(case, given, outs, torch.bfloat16).holds
    assert set(taken) == {("reduce_scatter", "reduce_scatter")}


@pytest.mark.parametrize("launch", [pytest.param("ordered", marks=pytest.mark.slow), "dependent_weights"])
def test_when_a_kernel_begins_names_no_kernel(taken, launch):
    case = Case("gemm_reduce_scatter", 16, 136, 128, torch.bfloat16)
    with (
        configured(launch=launch), Emulator("sm_90a", 2) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):  # fmt: skip
        for given, outs in run_launches(case, world, 2):
            assert judge(case, given, outs, torch.bfloat16).holds
    assert taken and set(taken) <= AS_ALL_REDUCES


def test_ranks_may_name_different_ways_for_the_shards_of_another_op(taken):
    """A reduce-scatter looks at how tiles travel alone; virtual ranks are not compared."""
    x, weight, outs = torch.randn(6, 64).bfloat16(), torch.randn(64, 64).bfloat16(), []
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for group, transport in zip(world.ranks, ("copy_engine", None), strict=True):
            with configured(shard_transport=transport):
                how = {"group": group.name, "backend": "fused", "k": 128}
                outs.append(overlap_gemm.gemm_reduce_scatter(x, weight, **how))
        world.synchronize()
    exact = 2 * (x.double() @ weight.double().t())
    alike = 2 * (x @ weight.t()).double()
    assert (torch.cat(outs).double() - exact).abs().max() <= 2 * (alike - exact).abs().max() + 1e-6
    assert set(taken) <= AS_ALL_REDUCES and len({got for _, got in taken}) == 1


def test_many_rows_get_the_reduce_scatter(taken):
    case = Case("gemm_reduce_scatter", machine_for("sm_90a").ar_rows + 1, 64, 128, torch.bfloat16)
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for given, outs in run_launches(case, world, 1):
            assert judge(case, given, outs, torch.bfloat16).holds
    assert set(taken) == {("reduce_scatter", "reduce_scatter")}


def test_operands_that_tma_cannot_read(taken):
    """The way without a plan of its own: K of 68 values is no multiple of 16 bytes."""
    x, weight = torch.randn(6, 68).bfloat16(), torch.randn(64, 68).bfloat16()
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        outs = [
            overlap_gemm.gemm_reduce_scatter(x, weight, group=group.name, backend="fused", k=136)
            for group in world.ranks
        ]
        world.synchronize()
    exact = 2 * (x.double() @ weight.double().t())
    alike = 2 * (x @ weight.t()).double()
    assert (torch.cat(outs).double() - exact).abs().max() <= 2 * (alike - exact).abs().max() + 1e-6
    assert taken and set(taken) <= AS_ALL_REDUCES


def test_what_is_reserved_suffices(monkeypatch):
    monkeypatch.setattr(plans, "compiled_kernel", lambda *_: lambda *_: None)
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        for group in world.ranks:
            overlap_gemm.reserve(
                "gemm_reduce_scatter", max_rows=600, columns=136, dtype=torch.bfloat16, group=group.name
            )
        held = overlap_gemm.workspace_bytes()
        for rows in (1, 16, 40, 64, 600):
            for group in world.ranks:
                x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(136, 64).bfloat16()
                overlap_gemm.gemm_reduce_scatter(x, weight, group=group.name, backend="fused", k=128)
        world.synchronize()
        assert overlap_gemm.workspace_bytes() == held


def random_cases(seed):
    """(ranks, (case, kernel) of each call): few rows, with a named kernel or none, all-reduces, more rows."""
    draw = random.Random(seed)
    ranks, cases = draw.choice([2, 3, 4]), []
    for number in range(5):
        op = draw.choice(["gemm_reduce_scatter", "gemm_reduce_scatter", "gemm_all_reduce"])
        rows, columns = draw.choice([1, 2, ranks - 1, ranks, 17, 40, 130]), draw.choice([8, 64, 136])
        case = Case(
            op, rows, columns, 64 * ranks, torch.bfloat16, bias=number % 2 == 1, seed=7 * seed + number
        )
        cases.append((case, draw.choice([{}, {}, KERNELS[list(KERNELS)[seed % 2]]])))
    return ranks, cases


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_random_sequences(taken, seed):
    """Of either architecture in turn, with a rank that lags after, on the same workspaces."""
    ranks, cases = random_cases(seed)
    starved, mode = seed % ranks, ("immediate", "random", "lazy")[seed % 3]
    lagging = Schedule(starved=lambda rank, cta, warp: rank == starved, grids="random")
    arch, queued = list(KERNELS)[seed % 2], []
    with (
        Emulator(arch, ranks, mode, seed, schedule=lagging, num_sms=2) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
        poisoned_allocations(),
    ):
        for case, kernel in cases:
            with configured(**kernel):
                queued.append((case, *queue_launch(case, world)))
        world.synchronize()
        assert all(judge(*call, torch.bfloat16).holds for call in queued)
    assert AS_ALL_REDUCES & set(taken)
