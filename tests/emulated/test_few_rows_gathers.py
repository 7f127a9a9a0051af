"""All-gather GEMMs of few rows, whose tiles have rows of several shards (`gather.few_rows`)."""

import pytest
import torch

from overlap_gemm.backends.fused.plan_cache import peers_for
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import joins_shards
from overlap_gemm.runtime.group import find
from tests.support.emulated.chosen import in_turn
from tests.support.emulated.gather_world import KINDS, World

WIDE = {arch: kinds[-1] for arch, kinds in KINDS.items()}


def joined(world):
    """Returns for each plan of rank 0 whether its tiles have rows of several shards."""
    plans = peers_for(find(world.world.names[0]), torch.device("cpu")).plans.values()
    of_gathers = [plan.gathering for plan in plans if plan.gathering is not None]
    return [len(gathering.gathered) > gathering.exchange.shard_rows for gathering in of_gathers]


ROWS = {
    "even": (80, 2),
    "the last shard is short": (101, 3),
    "one row": (1, 2),
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
        assert joined(world) == [rows > 1]  # one rank alone has the only row


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("arch", KINDS)
def test_several_weights_share_a_gather_that_is_kept(arch, keep):
    with World(arch, 2, transport="peer_bulk", mode="random", seed=3) as world:
        world.several(60, [64, 40], 64, keep)
        world.several(60, [64], 64, keep)
        world.run()
        assert joined(world) == [True, True]


@pytest.mark.parametrize("starved", [None, 0, 2])
@pytest.mark.parametrize("arch", KINDS)
def test_calls_of_both_kinds_alternate(arch, starved):
    # All calls use one workspace, also while a rank lags.
    with World(arch, 3, transport="peer_bulk", mode="random", seed=1, starved=starved) as world:
        for rows in (40, 500, 41, 2, 500, 40):
            world.call(rows, 200, 72)
        world.run()
        assert joined(world) == [True, False, True, True]


def test_shards_that_copy_engines_send_are_not_joined():
    with World("sm_90a", 2, transport=None) as world:
        world.call(60, 128, 64)
        world.run()
        assert joined(world) == [True]
    with World("sm_90a", 2, transport="copy_engine") as world:
        world.call(60, 128, 64)
        world.run()
        assert joined(world) == [False]


def test_the_rule():
    small = GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128))
    pair = GemmConfig(arch="sm_90a", mma="pingpong", tile=(128, 128), cluster=(2, 1))
    scaled = GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128), in_dtype="e4m3")
    assert [joins_shards(small, 2 * shard, shard) for shard in (1, 32, 33, 64)] == [True, True, False, False]
    assert [joins_shards(pair, 2 * shard, shard) for shard in (128, 129)] == [True, False]
    assert [joins_shards(small, 8 * shard, shard) for shard in (32, 33, 64)] == [True, False, False]
    assert not joins_shards(small, 9, 9), "one rank has all rows"
    assert not joins_shards(scaled, 2, 1)
