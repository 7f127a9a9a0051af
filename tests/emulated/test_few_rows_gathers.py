"""All-gather GEMMs of few rows, whose tiles have rows of several shards (`gather.few_rows`)."""

from dataclasses import replace

import pytest
import torch

from overlap_gemm.backends.fused.plan_cache import peers_for
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import joins_shards
from overlap_gemm.config.scale_blocks import PROMOTED
from overlap_gemm.config.visitors import SCALES
from overlap_gemm.runtime.group import find
from tests.support.chosen import in_turn
from tests.support.emulated.gather_world import KINDS, World
from tests.support.emulated.op_runs import lagging, world_of
from tests.support.emulated.scaled_cases import E5M2, GATHER, Scaled, queue, share_of_bound

WIDE = {arch: kinds[-1] for arch, kinds in KINDS.items()}


def joined(world):
    """Returns for each plan of rank 0 whether its tiles have rows of several shards."""
    plans = peers_for(find(world.names[0]), torch.device("cpu")).plans.values()
    of_gathers = [plan.gathering for plan in plans if plan.gathering is not None]
    return [len(gathering.gathered) > gathering.exchange.shard_rows for gathering in of_gathers]


ROWS = {
    "the last shard is short": (101, 3),
    "a rank without rows": (3, 4),
    "a tile of whole shards": (256, 2),
    "several tiles": (300, 4),
}


@pytest.mark.parametrize(("case", "arch"), in_turn(ROWS, KINDS))
def test_every_number_of_rows(arch, case):
    rows, ranks = ROWS[case]
    with World(arch, ranks, transport="peer_bulk", fields=WIDE[arch], mode="random") as world:
        world.call(rows, 136 * ranks, 72)
        world.run()
        assert joined(world.world) == [True]


@pytest.mark.parametrize(("keep", "arch"), in_turn([False, True], KINDS))
def test_several_weights_share_a_gather_that_is_kept(arch, keep):
    with World(arch, 2, transport="peer_bulk", mode="random", seed=3) as world:
        world.several(60, [64, 40], 64, keep)
        world.several(60, [64], 64, keep)
        world.run()
        assert joined(world.world) == [True, True]


@pytest.mark.parametrize(("starved", "arch"), in_turn([0, 2], KINDS))
def test_calls_of_both_kinds_alternate(arch, starved):
    # All calls use one workspace, also while a rank lags.
    with World(arch, 3, transport="peer_bulk", mode="random", seed=1, starved=starved) as world:
        for rows in (40, 500, 41, 2, 500, 40):
            world.call(rows, 200, 72)
        world.run()
        assert joined(world.world) == [True, False, True, True]


@pytest.mark.parametrize(
    ("arch", "ranks", "fields", "starved", "many"),
    [
        pytest.param("sm_90a", 2, {"mma": "cooperative", "tile": (128, 128)}, 0, 80, marks=pytest.mark.slow),
        ("sm_90a", 3, {"mma": "swap_ab", "tile": (32, 64)}, None, 24),
        ("sm_100a", 3, WIDE["sm_100a"], 2, 100),
    ],
)
def test_rows_with_scales(arch, ranks, fields, starved, many):
    # The same kernels serve joined and separate shards in turn, in the same workspace, with other scales.
    rows = (8 * ranks, 8 * ranks, 6 * ranks, 7 * ranks + 1, many * ranks)
    cases = [Scaled(GATHER, m, 72 * ranks, 48, E5M2, seed=i) for i, m in enumerate(rows)]
    how = {"transport": "peer_bulk", "mode": "random", "seed": 3, "schedule": lagging(starved)}
    with world_of(arch, ranks, fields, **how) as world:
        outs = [queue(case, world) for case in cases]
        world.synchronize()
        assert [share_of_bound(case, out) <= 1 for case, out in zip(cases, outs, strict=True)] == [True] * 5
        assert joined(world) == [True, False, True, False]


def test_shards_that_copy_engines_send_are_not_joined():
    with World("sm_90a", 2, transport=None) as world:
        world.call(60, 128, 64)
        world.run()
        assert joined(world.world) == [True]
    with World("sm_90a", 2, transport="copy_engine") as world:
        world.call(60, 128, 64)
        world.run()
        assert joined(world.world) == [False]


def test_the_rule():
    small = GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128))
    pair = GemmConfig(arch="sm_90a", mma="pingpong", tile=(128, 128), cluster=(2, 1))
    scaled = replace(small, in_dtype="e4m3", epilogue=(SCALES,))
    in_blocks = replace(small, in_dtype="e4m3", blocks=PROMOTED[0])
    assert [joins_shards(small, 2 * shard, shard) for shard in (1, 32, 33, 64)] == [True, True, False, False]
    assert [joins_shards(pair, 2 * shard, shard) for shard in (128, 129)] == [True, False]
    assert [joins_shards(small, 8 * shard, shard) for shard in (32, 33, 64)] == [True, False, False]
    assert not joins_shards(small, 9, 9), "one rank has all rows"
    assert [joins_shards(scaled, 2 * shard, shard) for shard in (4, 6, 32, 36)] == [True, False, True, False]
    assert not joins_shards(in_blocks, 8, 4)
