"""Words that are their own flag, sent by bulk stores: right values, and races: PTX has no rule for it."""

from contextlib import contextmanager

import pytest
import torch

from cute_emulator import Emulator
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch, run_launches
from overlap_gemm.transports import LLBulk
from tests.support.polled import assert_same_bits

from .chosen import in_turn
from .op_runs import SMALL, lagging, world_of


def found(arch, ranks, op, sizes, launches=3, **options):
    """What the emulator finds in right calls."""
    case = Case(op, *sizes, torch.bfloat16)
    with world_of(arch, ranks, transport="ll_bulk", num_sms=2, collect=True, **options) as world:
        for given, outs in run_launches(case, world, launches):
            assert judge(case, given, outs, case.dtype).holds
        return world._emulator.report.findings


WAYS = {
    "scatter": ("gemm_reduce_scatter", {"mode": "lazy"}),
    "a rank lags": ("gemm_reduce_scatter", {"schedule": lagging(1), "launches": 6}),
    "one-shot": ("gemm_all_reduce", {"mode": "random", "algorithm": "one_shot"}),
    "two-shot": ("gemm_all_reduce", {"mode": "lazy", "algorithm": "two_shot"}),
    "gather": ("gemm_all_gather", {"mode": "lazy"}),
}
QUICK = ("scatter", "a rank lags")


@pytest.mark.parametrize(
    ("way", "arch"),
    [
        *in_turn(QUICK, SMALL),
        *(
            pytest.param(way, arch, marks=pytest.mark.slow)
            for way in WAYS
            if way not in QUICK
            for arch in SMALL
        ),
    ],
)
def test_values_are_right_and_nothing_but_the_polling_is_found(arch, way):
    """Each finding is a race of a bulk store with what waits for its words, or empties them."""
    op, options = WAYS[way]
    findings = found(arch, 2, op, (140, 144, 72), **options)
    assert findings and {finding.kind for finding in findings} == {"race"}
    for finding in map(str, findings):
        assert "cp.async.bulk.global" in finding and ".relaxed.sys.global.v4" in finding, finding


def test_bulk_stores_of_empty_shards_and_three_ranks():
    found("sm_90a", 3, "gemm_reduce_scatter", (2, 64, 72), mode="random")


def test_calls_of_several_shapes_leave_nothing_behind_for_each_other():
    """A word that was sent, and that nobody took, would be a later call's."""
    cases = [
        Case("gemm_reduce_scatter", *sizes, torch.bfloat16, seed=seed)
        for seed, sizes in enumerate([(140, 144, 72), (2, 64, 72), (66, 136, 72)] * 2)
    ]
    with world_of("sm_90a", 3, transport="ll_bulk", num_sms=2, collect=True, schedule=lagging(1)) as world:
        queued = [(case, *queue_launch(case, world)) for case in cases]
        world.synchronize()
        for case, given, outs in queued:
            assert judge(case, given, outs, case.dtype).holds, case


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("gemm_all_gather", {}),
        pytest.param("gemm_reduce_scatter", {}, marks=pytest.mark.slow),
        pytest.param("gemm_all_reduce", {"algorithm": "one_shot"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_runs_on_gpus_runs_here(op, fields, ranks):
    """The body of tests/gpu/test_ll_bulk.py: its sizes are ones that every op of it takes."""

    @contextmanager
    def world():
        with (
            Emulator("sm_90a", ranks, collect=True, num_sms=4) as emulator,
            VirtualWorld(ranks, emulator=emulator) as inside,
        ):
            yield inside

    assert_same_bits(op, fields, "ragged", world, launches=2)


@pytest.mark.parametrize(("broken", "rows", "launches"), [("clear", 140, 4), ("put", 2, 1)])
def test_what_is_not_sent_or_not_emptied_shows(broken, rows, launches, monkeypatch, changed_kernels):
    if broken == "put":
        monkeypatch.setattr(LLBulk, "put", lambda *_: None)
    else:
        monkeypatch.setattr("overlap_gemm.device.ll._clear", lambda address: None)
    with pytest.raises((RuntimeError, AssertionError)):
        found("sm_90a", 2, "gemm_reduce_scatter", (rows, 136, 72), launches=launches)
