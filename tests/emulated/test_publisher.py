"""Tiles' flags raised by a warp of its own (`GemmConfig.publisher`): every op, world and order of warps."""

import pytest
import torch
from cutlass import Int32

from cute_emulator import EmulatorError, Schedule, mutate
from overlap_gemm.kernels.arch import ARCHS
from overlap_gemm.pipelines import Publisher
from overlap_gemm.runtime.workspace import CommTimeoutError
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches

from .chosen import in_turn
from .op_runs import SMALL, lagging, run, world_of
from .test_mutations import FLAGS_AND_WAITS, KERNELS, REASONS, TWO_CALLS, checking
from .test_sequences import Call, run_sequence

PUBLISHER = (("publisher", True),)
WAYS = {
    "scatter": ("gemm_reduce_scatter", None),
    "one-shot": ("gemm_all_reduce", "one_shot"),
    "two-shot": ("gemm_all_reduce", "two_shot"),
    "gather": ("gemm_all_gather", None),
}
MODES = {1: "immediate", 2: "lazy", 3: "random"}
MANY_TILES = 640, 256, 64  # of one CTA: more than the publisher's stages


def starving(arch, publisher):
    """The publisher's warp runs only when no other can, or all others only when it cannot."""
    number = ARCHS[arch].first_receive_warp
    return Schedule(starved=lambda rank, cta, warp: (warp == number) == publisher)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize(("way", "arch"), in_turn(WAYS, SMALL))
def test_every_op_and_world(arch, way, ranks):
    op, algorithm = WAYS[way]
    columns = 72 * ranks if op == "gemm_all_gather" else 136
    run(
        op,
        arch,
        ranks,
        (300, columns, 104 * ranks),
        {**SMALL[arch], "publisher": True},
        launches=2,
        mode=MODES[ranks],
        num_sms=2,
        algorithm=algorithm,
    )


@pytest.mark.parametrize(("first", "arch"), in_turn([True, False], SMALL))
def test_the_comm_lane_gets_ahead_of_the_publisher_or_never(arch, first):
    fields = {**SMALL[arch], "publisher": True}
    schedule = starving(arch, first)
    run("gemm_reduce_scatter", arch, 2, MANY_TILES, fields, num_sms=1, schedule=schedule)


@pytest.mark.parametrize(("seed", "arch"), in_turn([0, 1], SMALL))
def test_lanes_in_any_order(arch, seed):
    fields = {**SMALL[arch], "publisher": True}
    run(
        "gemm_all_reduce",
        arch,
        3,
        (200, 136, 192),
        fields,
        mode="random",
        seed=seed,
        num_sms=1,
        schedule=Schedule(order="random", lanes=True),
        algorithm="one_shot",
    )


@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_the_results_are_those_of_the_comm_lane(arch):
    def outs(publisher):
        case = Case("gemm_reduce_scatter", 300, 136, 208, torch.bfloat16)
        with world_of(arch, 2, {**SMALL[arch], "publisher": publisher}, mode="random", num_sms=2) as world:
            [(given, outs)] = run_launches(case, world, 1)
            assert judge(case, given, outs, torch.bfloat16).holds
        return torch.cat(outs)

    assert torch.equal(outs(True), outs(False))


@pytest.mark.parametrize(("starved", "arch"), in_turn([0, 2], SMALL))
def test_calls_with_and_without_take_turns_on_one_workspace(arch, starved):
    """In some of which ranks own no row; a rank lags."""
    kernels = [PUBLISHER, (), PUBLISHER, PUBLISHER, ()]
    calls = [(2, 64), (300, 136), (1, 64), (130, 136), (2, 136)]
    ways = [WAYS[way] for way in ("scatter", "scatter", "two-shot", "scatter", "one-shot")]
    run_sequence(
        arch,
        3,
        [Call(*sizes, *way, kernel) for sizes, way, kernel in zip(calls, ways, kernels, strict=True)] * 2,
        starved=starved,
    )


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_a_lagging_rank(arch):
    fields = {**SMALL[arch], "publisher": True}
    run("gemm_reduce_scatter", arch, 2, (256, 128, 128), fields, launches=6, num_sms=1, schedule=lagging(1))


def no_wait(self, tile):
    self.pipe.sync_object_full.arrive(tile % self.num_stages, None)


def one_stage(self, tile):
    stage, phase = self._stage(tile)
    self.pipe.sync_object_empty.wait(stage, phase ^ 1)
    self.pipe.sync_object_full.arrive(Int32(0), None)


@pytest.mark.parametrize(("broken", "arch"), in_turn([no_wait, one_stage], SMALL))
def test_a_hand_over_that_waits_for_nobody_shows(arch, broken, monkeypatch, changed_kernels):
    monkeypatch.setattr(Publisher, "hand_over", broken)
    fields, schedule = {**SMALL[arch], "publisher": True}, starving(arch, True)
    with pytest.raises((CommTimeoutError, EmulatorError)):
        run("gemm_reduce_scatter", arch, 2, MANY_TILES, fields, num_sms=1, schedule=schedule)


HANDED_OVER = ("mbarrier.test_wait*",)


@pytest.mark.parametrize(
    ("kind", "select"),
    [
        ("pingpong", HANDED_OVER),
        pytest.param("pingpong", FLAGS_AND_WAITS, marks=pytest.mark.slow),
        pytest.param("1cta", (*FLAGS_AND_WAITS, *HANDED_OVER), marks=pytest.mark.slow),
    ],
)
def test_every_weakened_flag_and_bulk_wait_shows(kind, select):
    """What hands tiles over; and as without a publisher (test_mutations.py)."""
    arch, fields, (rows, columns, _), num_sms = KERNELS[kind]
    check = checking(arch, {**fields, "publisher": True}, (rows, columns, 64), num_sms)
    tried = [mutate.Setting("lazy", 0), mutate.Setting("immediate"), mutate.Setting("lazy", 1)]
    outcomes = mutate.run(check, tried, select=select, reasons=REASONS | TWO_CALLS)
    print(*outcomes, sep="\n")
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
    assert any(o.verdict == "detected" for o in outcomes)


def test_stages_are_lanes():
    with pytest.raises(ValueError, match="num_stages=33"):
        Publisher.create(num_stages=33)
