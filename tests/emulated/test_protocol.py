"""The protocol of GEMM reduce-scatter over many launches: reuse, epochs, skewed ranks, empty shards."""

from contextlib import ExitStack

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, Schedule
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.exchange.geometry import EPOCH_OFFSET
from overlap_gemm.runtime.memory import workspace
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case, operands
from overlap_gemm.testing.emulated import judge, poisoned_allocations, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn

ARCHS = {
    "sm_100a": {"mma": "1cta", "tile": (128, 64)},
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
}
both = pytest.mark.parametrize("arch", ARCHS)


def case(m, n, k, seed=0):
    return Case("gemm_reduce_scatter", m, n, k, torch.bfloat16, seed=seed)


def open_world(arch, ranks, mode="random", seed=0, **options):
    """Configuration, emulator and world as one context, whose `world` is the world."""
    stack = ExitStack()
    stack.enter_context(configured(**ARCHS[arch]))
    emulator = stack.enter_context(Emulator(arch, ranks, mode, seed, **options))
    stack.world = stack.enter_context(VirtualWorld(ranks, emulator=emulator))
    return stack


def right(case, launched):
    verdicts = [judge(case, given, outs, torch.bfloat16) for given, outs in launched]
    assert verdicts and all(verdict.holds for verdict in verdicts), verdicts


def workspaces():
    return workspace.workspaces()


def words(held):
    return held.memory.local[: held.size.zeroed].view(torch.int64)


# --- many launches ---


@pytest.mark.parametrize(
    ("arch", "slow_rank"),
    [
        ("sm_90a", 1),
        *(pytest.param("sm_100a", rank, marks=pytest.mark.slow) for rank in (0, 1)),
        pytest.param("sm_90a", 0, marks=pytest.mark.slow),
    ],
)
def test_20_launches_with_a_rank_that_lags_behind(arch, slow_rank):
    """The slow rank runs only when nobody else can, so its peer gets as far ahead as the protocol lets it."""
    lagging = Schedule(starved=lambda rank, cta, warp: rank == slow_rank)
    sizes = case(128, 64, 64)
    with open_world(arch, 2, "immediate", schedule=lagging) as stack:
        right(sizes, run_launches(sizes, stack.world, 20))
        assert [words(held)[EPOCH_OFFSET // 8].item() for held in workspaces()] == [20, 20]


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_peer_that_runs_ahead_needs_the_second_buffer(monkeypatch, buffers):
    """With one buffer it overwrites slots still to be read: the control that the lagging rank really lags."""
    if buffers == 1:
        double = plans.exchange_arguments
        monkeypatch.setattr(
            plans, "exchange_arguments", lambda *given: double(*given)._replace(buffer_bytes=0)
        )
    sizes = case(512, 128, 64)
    lagging = Schedule(starved=lambda rank, cta, warp: rank == 1)
    with open_world("sm_100a", 2, "immediate", schedule=lagging, collect=True, num_sms=1) as stack:
        launched = run_launches(sizes, stack.world, 4)
        verdicts = [judge(sizes, given, outs, torch.bfloat16) for given, outs in launched]
    assert all(verdict.holds for verdict in verdicts) == (buffers == 2), verdicts


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_calls_of_different_shape_take_turns_on_one_workspace(arch):
    shapes = [case(256, 64, 64), case(70, 128, 72), case(3, 8, 8)]
    with open_world(arch, 3) as stack:
        for turn in range(2):
            for sizes in shapes:
                right(sizes.with_seed(turn), run_launches(sizes.with_seed(turn), stack.world, 1))
        assert len(workspaces()) == 3, "one workspace a rank"


@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_the_same_arguments_again_and_again(arch):
    """What a CUDA graph replays: the same kernel, tensors and scalars, with new data in the tensors."""
    with open_world(arch, 2) as stack, poisoned_allocations():
        world = stack.world
        x = [torch.empty(130, 32, dtype=torch.bfloat16) for _ in world.names]
        weight = [torch.empty(64, 32, dtype=torch.bfloat16) for _ in world.names]
        recorded = []
        launch = plans.Plan.launch

        def record(plan, *tensors):
            recorded.append((plan, *tensors))
            launch(plan, *tensors)

        def fill(given):
            for r in range(2):
                x[r].copy_(given.x[:, 32 * r : 32 * r + 32])
                weight[r].copy_(given.weight[:, 32 * r : 32 * r + 32])

        first = operands(Case("gemm_reduce_scatter", 130, 64, 64, torch.bfloat16, bias=False))
        fill(first)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans.Plan, "launch", record)
            for r, name in enumerate(world.names):
                overlap_gemm.gemm_reduce_scatter(x[r], weight[r], group=name, backend="fused")
        world.synchronize()
        for seed in range(1, 6):
            given = operands(Case("gemm_reduce_scatter", 130, 64, 64, torch.bfloat16, bias=False, seed=seed))
            fill(given)
            for plan, a, weights, (out,), extras in recorded:
                out.fill_(torch.nan)
                plan.launch(a, weights, (out,), extras)
            world.synchronize()
            outs = [out for _, _, _, (out,), _ in recorded]
            right(Case("gemm_reduce_scatter", 130, 64, 64, torch.bfloat16, bias=False), [(given, outs)])


# --- every kind of share ---


@pytest.mark.parametrize(
    ("rows", "arch"),
    [
        *in_turn([9], ARCHS),
        *(pytest.param(rows, arch, marks=pytest.mark.slow) for rows in (1, 5, 8) for arch in ARCHS),
    ],
)
def test_eight_ranks_of_whom_some_own_no_row(arch, rows):
    sizes = case(rows, 64, 64)
    with open_world(arch, 8, "immediate") as stack:
        right(sizes, run_launches(sizes, stack.world, 2))


QUICK_TILES = [(2, 3), (4, 2)]
SLOW_TILES = [(2, 1), (2, 2), (4, 1), (4, 3)]


@pytest.mark.parametrize(
    ("ranks", "num_sms", "arch"),
    [
        *in_turn(QUICK_TILES, ARCHS),
        *(pytest.param(*each, arch, marks=pytest.mark.slow) for each in SLOW_TILES for arch in ARCHS),
    ],
)
def test_many_tiles_per_cta(arch, ranks, num_sms):
    sizes = case(512, 256, 64)
    with open_world(arch, ranks, "lazy", num_sms=num_sms) as stack:
        right(sizes, run_launches(sizes, stack.world, 2))


@pytest.mark.slow
@both
@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "sizes",
    [(512, 256, 192), (300, 136, 72), (6, 64, 40), (130, 64, 1000)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_sweep(arch, mode, seed, ranks, sizes):
    schedule = Schedule(order="random", lanes=seed % 2 == 1)
    with open_world(arch, ranks, mode, seed, schedule=schedule, num_sms=3) as stack:
        right(case(*sizes), run_launches(case(*sizes), stack.world, 3))
