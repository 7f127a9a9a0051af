"""The one order of a device's fused launches, and what ranks agree on, with kernels that really run."""

from dataclasses import replace

import pytest
import torch

from cute_emulator import Emulator, EmulatorError, Schedule
from overlap_gemm.backends.fused import transport_hosts
from overlap_gemm.exchange.geometry import ENTERED_OFFSET, READ_OFFSET, ExchangeShape
from overlap_gemm.runtime import peers
from overlap_gemm.runtime.failures import CommTimeoutError, OverlappingCallsError
from overlap_gemm.runtime.memory.workspace import workspaces
from overlap_gemm.runtime.order import LaunchOrder
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch, run_launches
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.space import default_config
from tests.support.chosen import in_turn

ARCHS = {"sm_100a": {"mma": "1cta", "tile": (128, 64)}, "sm_90a": {"mma": "pingpong", "tile": (64, 128)}}

CASES = [
    Case("gemm_reduce_scatter", 256, 64, 64, torch.bfloat16),
    Case("gemm_reduce_scatter", 256, 128, 64, torch.bfloat16, seed=1),
]
"""Of two size classes."""


@pytest.fixture
def small_classes(monkeypatch):
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    with configured(mma="1cta", tile=(128, 64)):
        yield


def calls_on_streams(world, calls):
    """Queues the calls, given as (case, stream), of all ranks; runs and judges them."""
    queued = []
    for case, stream in calls:
        for rank in range(len(world.ranks)):
            world.executor(rank).streams.handle = stream
        queued.append((case, *queue_launch(case, world)))
    world.synchronize()
    return [judge(case, given, outs, torch.bfloat16) for case, given, outs in queued]


def run_on_two_streams(seed):
    """Calls of two size classes on two streams of devices with one SM, which start kernels as they like."""
    with (
        Emulator("sm_100a", 2, seed=seed, num_sms=1, schedule=Schedule(grids="random")) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        verdicts = calls_on_streams(world, [(CASES[call % 2], call % 2) for call in range(4)])
        assert len(workspaces()) == 4, "two a rank"
    assert all(verdict.holds for verdict in verdicts), verdicts


@pytest.mark.usefixtures("small_classes")
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_streams_and_two_size_classes(seed):
    run_on_two_streams(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("small_classes")
def test_without_the_order_they_wait_for_each_other_for_ever(monkeypatch):
    """The control: one of these seeds shows the hole."""
    monkeypatch.setattr(LaunchOrder, "follow", lambda self, stream: False)
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "0")
    with pytest.raises(EmulatorError, match="(?i)deadlock"):
        for seed in range(3):
            run_on_two_streams(seed)


@pytest.fixture
def own_choice(monkeypatch):
    """As before ranks agreed: each chooses by its own SMs."""
    meet = peers.merge_proposals

    def alone(group, everyone):
        return replace(meet(group, everyone), num_sms=everyone[group.rank].num_sms)

    return lambda: monkeypatch.setattr(peers, "merge_proposals", alone)


@pytest.mark.parametrize("agreed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_of_different_sizes_run_the_same_kernel(own_choice, agreed):
    """Two SMs and three, as beside a MIG slice: alone they would choose different tiles."""
    sms = (2, 3)
    differing = [
        (rows, columns)
        for rows in (128, 256, 384)  # of fewer it may be an all-reduce
        for columns in (64, 128, 256)
        if default_config("sm_100a", "bf16", ExchangeShape.even(rows, columns, 2), sms[0])
        != default_config("sm_100a", "bf16", ExchangeShape.even(rows, columns, 2), sms[1])
    ]
    rows, columns = differing[0]
    case = Case("gemm_reduce_scatter", rows, columns, 64, torch.bfloat16)
    if not agreed:
        own_choice()
    with (
        Emulator("sm_100a", 2, num_sms=sms, collect=True) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        try:
            launched = list(run_launches(case, world, 2))
        except (EmulatorError, CommTimeoutError):
            launched = []
        chosen = {plan.products[0].config for side in peers.local_peers() for plan in side.plans.values()}
    verdicts = [judge(case, given, outs, torch.bfloat16) for given, outs in launched]
    assert len(chosen) == (1 if agreed else 2)
    assert (len(verdicts) == 2 and all(verdict.holds for verdict in verdicts)) == agreed, verdicts


def test_sms_that_are_left_to_others_change_no_bit():
    case = Case("gemm_reduce_scatter", 256, 128, 64, torch.bfloat16)
    outs = []
    with (
        configured(mma="1cta", tile=(128, 64)),
        Emulator("sm_100a", 2, num_sms=3) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        for reserve in (None, 1, 2):
            with configured(reserve_sms=reserve):
                given, out = queue_launch(case, world)
            world.synchronize()
            outs.append(out)
            assert judge(case, given, out, torch.bfloat16).holds
        grids = [
            [plan.products[0].num_clusters for plan in side.plans.values()] for side in peers.local_peers()
        ]
    assert grids == [[3, 2, 1]] * 2
    assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


@pytest.mark.parametrize(("way", "arch"), in_turn(["scatter", "gather"], ARCHS))
def test_a_call_beside_another_tells_nobody_of_its_entry(arch, way, monkeypatch):
    """It registers the launch first, and where another one runs its peers hear nothing of it.

    The second call's workspace is its own, so that what lies in it is of that call.
    """
    monkeypatch.setattr(LaunchOrder, "follow", lambda self, stream: False)
    case = {
        "scatter": Case("gemm_reduce_scatter", 512, 128, 64, torch.bfloat16, seed=1),
        "gather": Case("all_gather_gemm", 256, 128, 64, torch.bfloat16, seed=1),
    }[way]
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    with (
        configured(**ARCHS[arch], shard_transport="copy_engine"),
        Emulator(arch, 2, num_sms=8) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
    ):
        with pytest.raises(OverlappingCallsError) as caught:
            calls_on_streams(world, [(CASES[0], 0), (case, 1)])
        failed = caught.value.failure
        assert failed.expected == 2
        used = [held for held in workspaces() if held.group.rank != failed.rank]
        words = [held.memory.local[: held.size.zeroed].view(torch.int64) for held in used]
        entered = [
            (of[ENTERED_OFFSET // 8 : READ_OFFSET // 8].view(2, -1)[:, failed.rank] != 0).any().item()
            for of in words
        ]
    assert entered == [True, False]


@pytest.mark.parametrize("first", [0, 1], ids=["another-class", "same-class"])
def test_a_call_beside_another_is_an_error_by_name(monkeypatch, first):
    """As a replay of a graph beside a call, which the host does not see: the device's word does."""
    monkeypatch.setattr(LaunchOrder, "follow", lambda self, stream: False)
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    with (
        configured(mma="1cta", tile=(128, 64)),
        Emulator("sm_100a", 2, num_sms=8) as emulator,
        VirtualWorld(2, emulator=emulator) as world,
        pytest.raises(OverlappingCallsError, match=r"call 2 of rank . began while call 1 ran .*wait_stream"),
    ):
        calls_on_streams(world, [(CASES[first], 0), (CASES[1], 1)])
