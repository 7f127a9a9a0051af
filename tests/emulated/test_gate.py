"""Shards by copy engines, a gate in front of each: `backends.by_shards`, with copies instead of products."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, EmulatorError, Schedule
from overlap_gemm.backends import by_shards
from overlap_gemm.device.failure import Role
from overlap_gemm.exchange.geometry import END
from overlap_gemm.gather import gate
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn

KERNELS = {"sm_90a": ("pingpong", (64, 128)), "sm_100a": ("1cta", (128, 64))}


def on_rank(emulator, rank, x, shards):
    """A rank's shard of x in its memory, and a place for all of x, poisoned."""
    size, depth = shards.size(rank), x.shape[1]
    own = emulator.empty((max(size, 1), depth), torch.bfloat16, rank)[:size]
    own.copy_(x[slice(*shards.range(rank))])
    return own, emulator.empty(x.shape, torch.bfloat16, rank).fill_(torch.nan)


def gather(world, emulator, rows, depth, seed):
    """Queues one call on every rank; what was to come, and where each rank's copy of it goes."""
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).bfloat16()
    shards, outs = Shards.even(rows, len(world.ranks)), []
    for group in world.ranks:
        own, out = on_rank(emulator, group.rank, x, shards)
        plan = by_shards.plan_for(group, own, shards)
        with plan.plan.executor.active() as stream, plan.call(own, out) as arrivals:
            for source, block in arrivals:
                place = out[slice(*shards.range(source))]
                plan.plan.executor.copy(stream, place.data_ptr(), block.data_ptr(), block.numel() * 2)
        outs.append(out)
    return [(out, x) for out in outs]


def fused(world, emulator, rows, depth, seed):
    """The same by the fused op, on the same workspace: weights that pick out columns."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, depth, generator=generator).bfloat16(), torch.eye(depth).bfloat16()
    shards, outs = Shards.even(rows, len(world.ranks)), []
    for group in world.ranks:
        own = x[slice(*shards.range(group.rank))].clone()
        options = {"rows": rows, "group": group.name, "backend": "fused"}
        outs.append(overlap_gemm.all_gather_gemm(own, weight, **options))
    return [(out, x) for out in outs]


def beside(world, emulator, rows, depth, seed):
    """Shards travel beside a fused reduce-scatter, whose results are wanted, too; copied out after it."""
    generator = torch.Generator().manual_seed(seed)
    ranks, shards = len(world.ranks), Shards.even(rows, len(world.ranks))
    x = torch.randn(rows, depth, generator=generator).bfloat16()
    grad, pairs = torch.randn(rows, depth, generator=generator).bfloat16(), []
    for group in world.ranks:
        own, out = on_rank(emulator, group.rank, x, shards)
        plan = by_shards.plan_for(group, own, shards)
        # Every rank adds its own columns of `grad` times those of the unit matrix: together they are `grad`.
        part = torch.zeros(depth, depth).bfloat16()
        part[:, group.rank :: ranks] = torch.eye(depth)[:, group.rank :: ranks]
        options = {"k": depth * ranks, "group": group.name, "backend": "fused"}
        scatter = partial(overlap_gemm.gemm_reduce_scatter, grad.clone(), part, **options)
        with plan.plan.executor.active() as stream, plan.alongside(own, scatter) as (summed, gathered):
            plan.plan.executor.copy(stream, out.data_ptr(), gathered.data_ptr(), gathered.numel() * 2)
        pairs.append((out, x))
        pairs.append((summed, grad[slice(*shards.range(group.rank))]))
    return pairs


def run(arch, ranks, calls, *, mode="immediate", seed=0, starved=None, dead=None):
    mma, tile = KERNELS[arch]
    lagging = Schedule(starved=lambda rank, cta, warp: rank == starved)
    with (
        configured(mma=mma, tile=tile),
        Emulator(arch, ranks, mode, seed, schedule=lagging, num_sms=4) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
        poisoned_allocations(),
    ):
        results = [call(world, emulator, rows, 64, seed + i) for i, (call, rows) in enumerate(calls)]
        if dead is not None:
            emulator.faults.kill(dead)
        world.synchronize()
        for result in results:
            for out, wanted in result:
                assert torch.equal(out, wanted)


def random_calls(seed):
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    rows = [1, 2, ranks - 1, ranks, 40, 130]
    calls = [(draw.choice([gather, beside, fused]), draw.choice(rows)) for _ in range(7)]
    return ranks, calls, draw.randrange(ranks), draw.choice(["immediate", "random", "lazy"])


@pytest.mark.parametrize(
    ("seed", "arch"),
    [
        *in_turn([0], KERNELS),
        *(pytest.param(seed, arch, marks=pytest.mark.slow) for seed in range(1, 30) for arch in KERNELS),
    ],
)
def test_random_sequences_with_the_fused_op(arch, seed):
    ranks, calls, starved, mode = random_calls(seed)
    run(arch, ranks, calls, mode=mode, seed=seed, starved=starved)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    ("how", "what"), [(gather, "await_piece"), (gather, "await_readers"), (beside, "await_readers")]
)
def test_a_gate_without_its_waits_is_noticed(how, what, monkeypatch):
    """Shards are read before they are there; a peer's next ones arrive while they are read.

    Beside another call a peer's entry says that its copies are made: its gates come after them.
    """
    monkeypatch.setattr(gate, what, lambda *_: None)
    with pytest.raises((EmulatorError, AssertionError)):
        for starved in range(3):
            run("sm_90a", 3, [(how, 130)] * 4, mode="lazy", starved=starved)


def failing(world, emulator, rows, depth, seed):
    """On every rank, what should run beside the gather raises."""
    shards = Shards.even(rows, len(world.ranks))
    for group in world.ranks:
        own = emulator.empty((shards.size(group.rank), depth), torch.bfloat16, group.rank).zero_()
        plan = by_shards.plan_for(group, own, shards)
        with pytest.raises(ZeroDivisionError), plan.alongside(own, lambda: 1 / 0):
            raise AssertionError("the block has nothing to read")
    return []


def test_a_gather_ends_where_what_ran_beside_it_fails():
    """Otherwise peers would wait for it, and so would the calls after it."""
    run("sm_90a", 3, [(gather, 130), (failing, 130), (beside, 130), (fused, 130)])


def test_a_dead_rank_is_named():
    with pytest.raises(CommTimeoutError) as caught:
        run("sm_90a", 3, [(gather, 130)], dead=1)
    failure = caught.value.failure
    assert failure.source == 1 and failure.role in (Role.CALL_ENTERED, Role.LOAD_GATE, Role.CALL_READ)


@pytest.mark.parametrize("fails", ["the block", "a gate"])
def test_a_call_ends_whatever_fails(fails):
    """Peers wait for its end."""
    launched = []

    def launch(source, is_first, exchange, stream):
        launched.append(source)
        if source >= 0 and fails == "a gate":
            raise RuntimeError(fails)

    with Emulator("sm_90a", 3) as emulator, VirtualWorld(3, emulator=emulator) as world:
        group = world.ranks[0]
        own = emulator.empty((2, 64), torch.bfloat16, group.rank).fill_(1)
        plan = by_shards.plan_for(group, own, Shards.even(6, 3))
        plan = replace(plan, plan=replace(plan.plan, gate=launch))
        with pytest.raises(RuntimeError, match=fails), plan.call(own):
            if fails == "the block":
                raise RuntimeError(fails)
        assert launched == ([1, 2, END] if fails == "the block" else [1, END])
        world.synchronize()  # the copies
