"""A call has an identity: ranks that are in different calls get an error by name, never a wrong result."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, Schedule
from overlap_gemm.backends.fused import gather_plans
from overlap_gemm.backends.fused import launch_plan as plan
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.dispatch import bound as dispatch
from overlap_gemm.runtime import identity
from overlap_gemm.runtime.failures import CommTimeoutError, MismatchedCallsError
from overlap_gemm.runtime.group import find
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn
from tests.support.emulated.list_cases import several_launches
from tests.support.emulated.op_runs import world_of
from tests.support.emulated.programs import Call, Programs, Step
from tests.support.emulated.scaled_cases import Scaled, queue
from tests.support.emulated.sequences import ARCHS

WAYS = {
    "scatter": ("gemm_reduce_scatter", ()),
    "one-shot": ("gemm_all_reduce", (("algorithm", "one_shot"),)),
    "two-shot": ("gemm_all_reduce", (("algorithm", "two_shot"),)),
    "output gather": ("gemm_all_gather", ()),
    "gather by copies": ("all_gather_gemm", (("transport", "copy_engine"),)),
    "gather by kernel": ("all_gather_gemm", (("transport", "peer_bulk"),)),
    "LL": ("gemm_all_reduce", (("algorithm", "one_shot"), ("transport", "ll"))),
}


def call_of(way, m, n, ranks, seed):
    op, settings = WAYS[way]
    width = ranks if op in ("gemm_all_gather", "all_gather_gemm") else 1
    return Call(Case(op, m, n * width, 64, torch.bfloat16, seed=seed), settings)


def run(arch, calls, programs, **options):
    options = {"mode": "immediate", "num_sms": 3, **options}
    return Programs(arch, calls, programs, fields=ARCHS[arch], **options).run()


def steps(*numbers):
    return [Step(number) for number in numbers]


# --- another order ---


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", ["scatter", *(pytest.param(w, marks=pytest.mark.slow) for w in list(WAYS)[1:])]
)
def test_another_order_is_an_error_by_name(arch, way):
    """As where a replay and a call run on streams of which neither waits for the other: in any order."""
    calls = [call_of(way, 130, 64, 3, 0), call_of(way, 200, 64, 3, 1)]
    found = run(arch, calls, [steps(0, 1), steps(1, 0), steps(0, 1)])
    assert isinstance(found.error, MismatchedCallsError) and not found.wrong, found
    assert "rows=130" in str(found.error) and "rows=200" in str(found.error)


@pytest.mark.parametrize(
    "ways",
    [
        ("gather by copies", "gather by kernel"),
        pytest.param(("scatter", "output gather"), marks=pytest.mark.slow),
    ],
)
def test_another_order_of_ops(ways):
    calls = [call_of(way, 64 + 66 * i, 64, 2, i) for i, way in enumerate(ways)]
    found = run("sm_90a", calls, [steps(0, 1), steps(1, 0)])
    assert isinstance(found.error, MismatchedCallsError) and not found.wrong, found


@pytest.mark.parametrize("way", ["gather by copies", "scatter"])
def test_rows_that_only_some_ranks_have(way):
    """Of one row rank 0 is the only owner: nobody would wait for the others' data."""
    calls = [call_of(way, 1, 64, 3, 0), call_of(way, 200, 64, 3, 1)]
    found = run("sm_90a", calls, [steps(0, 1), steps(1, 0), steps(0, 1)], schedule=lagging(1))
    assert isinstance(found.error, MismatchedCallsError) and not found.wrong, found


def lagging(rank):
    return Schedule(starved=lambda found, cta, warp: found == rank, grids="random")


# --- a call that one rank skips ---


@pytest.mark.parametrize(
    ("way", "arch"),
    [
        *in_turn(["one-shot", "gather by copies"], ARCHS),
        *(pytest.param(way, arch, marks=pytest.mark.slow) for way in ("scatter", "LL") for arch in ARCHS),
    ],
)
def test_a_call_that_raised_on_one_rank_is_not_paired_with_its_next(arch, way):
    """The two are alike, but for their data."""
    calls = [call_of(way, 130, 64, 2, seed) for seed in range(3)]
    found = run(arch, calls, [steps(0, 1, 2), [Step(0), Step(1, "skip"), Step(2)]])
    assert isinstance(found.error, MismatchedCallsError) and not found.wrong, found
    assert "after 1 calls that raised before their launch" in str(found.error)
    assert found.finished == 2, "both ranks' first call"


def test_a_call_that_raised_on_all_ranks_differs_in_nothing():
    calls = [call_of("scatter", 130, 64, 2, seed) for seed in range(3)]
    found = run("sm_90a", calls, [[Step(0), Step(1, "skip"), Step(2)]] * 2)
    assert found.error is None and not found.wrong and found.finished == 4, found


def test_a_call_that_raised_counts_once_and_if_nothing_of_it_was_launched():
    progress = identity.Progress()
    for launched in (1, 0, 0):
        before = progress.events
        progress.events += launched
        try:
            raise ValueError
        except ValueError:
            for _ in range(2):  # an op called by an op
                progress.raised(before, "op", None)
    assert (progress.events, progress.skipped) == (3, 2)


def test_arguments_that_do_not_fit_count_also_where_one_error_is_raised_twice(monkeypatch):
    """The op was entered, and nothing launched; an error may be kept, and raised in several calls."""
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        group, kept = find(world.names[0]), ValueError("kept")

        def fails(*_):
            raise kept

        monkeypatch.setattr(dispatch, "_prepare", fails)
        for number in (1, 2):
            with pytest.raises(ValueError, match="kept"):
                overlap_gemm.gemm_reduce_scatter(torch.ones(2, 8), torch.ones(8, 8), group=group.name)
            assert group.progress.skipped == number


# --- the controls ---


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the kind of call", "calls that raised"])
def test_without_its_part_of_the_signature_a_wrong_result_is_returned(monkeypatch, what):
    calls = [call_of("one-shot", 130 + 70 * i * (what == "the kind of call"), 64, 2, i) for i in range(2)]
    if what == "the kind of call":
        monkeypatch.setattr(plans, "signature_of", lambda *_: 0)
        programs = [steps(0, 1), steps(1, 0)]
    else:
        monkeypatch.setattr(plan, "after_skipped", lambda signature, skipped: 0)
        programs = [steps(0, 1), [Step(0, "skip"), Step(1)]]
    found = run("sm_90a", calls, programs)
    assert found.wrong, found


@pytest.mark.slow
def test_with_equal_signatures_a_gather_returns_a_wrong_result(monkeypatch):
    monkeypatch.setattr(gather_plans, "signature_of", lambda *_: 0)
    calls = [call_of("gather by copies", 64 * (1 + i), 64, 2, i) for i in range(2)]
    found = run("sm_90a", calls, [steps(0, 1), steps(1, 0)])
    assert found.wrong, found


# --- a call of several products of which one fails ---


class Failing:
    """A product's kernel that cannot be launched."""

    def __call__(self, *_):
        raise RuntimeError("no launch")


def test_a_second_product_that_fails_leaves_nobody_waiting(monkeypatch):
    """The call that was begun ends, its peers' results are right, and the next call is not blamed."""
    x, weight = torch.randn(130, 64).bfloat16(), torch.randn(2, 3, 64, 64).bfloat16()
    launch, broken = Plan.launch, {"rank": 1}
    several_launches(monkeypatch)

    def breaking(plan, own, weights, *rest):
        if plan.workspace.group.rank == broken["rank"]:
            first, second = plan.products
            plan = replace(plan, products=(first, second._replace(gemm=Failing())))
        return launch(plan, own, weights, *rest)

    monkeypatch.setattr(Plan, "launch", breaking)
    with (
        configured(**ARCHS["sm_90a"]),
        Emulator("sm_90a", 3, num_sms=3) as emulator,
        VirtualWorld(3, emulator=emulator) as world,
    ):
        for transport in ("copy_engine", "peer_bulk"):
            outs = []
            for again in range(2):
                broken["rank"] = None if again else 1
                for rank, name in enumerate(world.names):
                    own = x[44 * rank : 44 * rank + 44].clone()
                    how = {"rows": 130, "group": name, "backend": "fused"}
                    with configured(transport=transport):
                        try:
                            both_outs = overlap_gemm.all_gather_gemm(own, list(weight[:, rank]), **how)
                        except RuntimeError as error:
                            assert str(error) == "no launch" and rank == 1 and not again
                            continue
                    outs.append((rank, both_outs))
            world.synchronize()
            assert len(outs) == 5
            for rank, found in outs:
                for i, out in enumerate(found):
                    exact = x.double() @ weight[i, rank].double().t()
                    assert (out.double() - exact).abs().max() < 0.2


def test_a_peer_that_never_comes_is_a_time_out():
    calls = [call_of("scatter", 64, 64, 2, seed) for seed in range(2)]
    found = run("sm_90a", calls, [steps(0, 1), [Step(0), Step(1, "never")]])
    assert isinstance(found.error, CommTimeoutError) and not found.wrong, found


# --- calls of one layout ---


def test_an_option_without_effect_on_layouts_that_differs_is_named():
    """Compares `deterministic`, with which no backend but torch does anything else."""
    x, weight = torch.ones(128, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    with world_of("sm_90a", 2) as world:
        for ordered in (True, False):
            for rank, name in enumerate(world.names):
                how = {"group": name, "backend": "fused", "deterministic": ordered or rank == 0}
                overlap_gemm.gemm_reduce_scatter(x, weight, **how)
            if ordered:
                world.synchronize()
        with pytest.raises(MismatchedCallsError) as caught:
            world.synchronize()
    assert "deterministic=True" in str(caught.value) and "deterministic=False" in str(caught.value)


# --- kinds that differ in how sums are cut into units alone ---


def test_ranks_with_units_of_different_sizes_are_named():
    """Both kinds have been called by both ranks, so that flags and slots of either hold earlier calls."""
    case = Scaled("gemm_all_reduce", 128, 256, 2 * 64)
    with world_of("sm_90a", 2, algorithm="two_shot") as world:
        for kinds in ((False, False), (True, True)):
            with different_accumulation(kinds):
                queue(case, world)
            world.synchronize()
        with different_accumulation((False, True)):
            queue(case, world)
        with pytest.raises(MismatchedCallsError) as caught:
            world.synchronize()
    assert "unit_bytes=2048" in str(caught.value) and "unit_bytes=4096" in str(caught.value)


@contextmanager
def different_accumulation(fast_accum):
    """In the block rank r calls with `fast_accum[r]`."""
    call = overlap_gemm.gemm_all_reduce

    def configured_by_rank(*operands, group, **options):
        with configured(fast_accum=fast_accum[find(group).rank]):
            return call(*operands, group=group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_gemm, "gemm_all_reduce", configured_by_rank)
        yield
