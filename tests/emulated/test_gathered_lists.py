"""One kernel for a list of weights of `all_gather_gemm`: q, k and v; gate and up."""

import pytest
import torch

from tests.support.emulated.list_cases import (
    GatheredOperands,
    check_one_launch,
    counted_launches,
    several_launches,
)
from tests.support.emulated.op_runs import lagging, world_of

SWAPPED = {"mma": "swap_ab", "tile": (16, 64)}


@pytest.fixture
def launches(monkeypatch):
    return counted_launches(monkeypatch)


def widths(ranks):
    """Returns rows of each weight: parts of tiles, and other ones on each rank."""
    return [(136 + 8 * rank, 72, 264 - 8 * rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("arch", "ranks", "rows", "fields", "transport"),
    [
        ("sm_90a", 3, 200, None, "copy_engine"),
        ("sm_100a", 2, 201, None, None),
        pytest.param(
            "sm_90a",
            2,
            130,
            {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 2)},
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param("sm_90a", 4, 30, SWAPPED, None, marks=pytest.mark.slow),
        ("sm_90a", 2, 30, SWAPPED | {"launch": "dependent_weights"}, None),
        pytest.param("sm_100a", 8, 500, None, None, marks=pytest.mark.slow),
    ],
)
def test_a_list_is_one_launch(launches, arch, ranks, rows, fields, transport):
    """Checks ragged rows, of which few are one shard (`gather.few_rows`)."""
    operands = GatheredOperands(rows, widths(ranks))
    check_one_launch(operands, launches, arch, ranks, fields, transport)


def test_lists_and_single_weights_share_a_workspace(launches):
    """Checks it on a rank that lags, with ranks without rows, or without columns of a weight."""
    calls = [
        GatheredOperands(rows, of_ranks)
        for rows, of_ranks in [
            (130, [(144, 144), (144, 144)]),
            (1, [(144,), (144,)]),
            (130, [(0, 144), (72, 7)]),
            (130, [(144, 144), (144, 144)]),
        ]
    ]
    with world_of("sm_90a", 2, num_sms=1, schedule=lagging(1)) as world:
        outs = [operands.call(world) for operands in calls]
        world.synchronize()
    for operands, of_call in zip(calls, outs, strict=True):
        operands.check(of_call)
    assert launches == [1] * 8


@pytest.mark.parametrize(
    "kind", [pytest.param("scales of rows", marks=pytest.mark.slow), "few rows with scales", "two layouts"]
)
def test_scales_follow_their_rows_and_layouts_are_made_equal(launches, kind):
    scaled = kind != "two layouts"
    operands = GatheredOperands(16 if "few" in kind else 70, widths(2), 128 if scaled else 72, scaled)
    if not scaled:
        operands.weights[1][2] = operands.weights[1][2].t().contiguous().t()
    with world_of("sm_90a", 2, SWAPPED if "few" in kind else None) as world:
        outs = operands.call(world)
        world.synchronize()
    operands.check(outs)
    assert launches == [1, 1]


@pytest.mark.parametrize("takes_lists", [True, False])
def test_the_gathered_x_is_kept_by_one_launch_and_by_several(launches, monkeypatch, takes_lists):
    if not takes_lists:
        several_launches(monkeypatch)
    operands = GatheredOperands(130, widths(2))
    with world_of("sm_90a", 2) as world:
        outs = operands.call(world, return_gathered=True)
        world.synchronize()
    for _, gathered in outs:
        assert torch.equal(gathered, operands.x)
    operands.check([products for products, _ in outs])
    assert launches == [1 if takes_lists else 3] * 2
