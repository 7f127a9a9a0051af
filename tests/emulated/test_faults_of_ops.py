"""Lost flags and dead ranks in the ops whose results go to every rank."""

import pytest
import torch

from overlap_gemm.device.failure import Role
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.spec import GEMM_ALL_GATHER, GEMM_ALL_REDUCE
from overlap_gemm.testing.cases import Case
from tests.support.emulated.fault_world import ARCHS, World, flag_fault

both = pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS if arch != "sm_90a")]
)

ROWS = {arch: 3 * fields["tile"][0] for arch, fields in ARCHS.items()}
"""Three tiles, or one in each of three shards."""


def world(arch, way, harm):
    op, algorithm = way
    rows, columns = ROWS[arch], 192 if op == "gemm_all_gather" else 64
    if algorithm == "two_shot":  # one tile in each of three shards of columns
        rows, columns = ARCHS[arch]["tile"][0], 3 * ARCHS[arch]["tile"][1]
    case = Case(op, rows, columns, 64, torch.bfloat16)
    return World(arch, harm, 1, case, algorithm=algorithm)


WAYS = {
    "one-shot": (("gemm_all_reduce", "one_shot"), GEMM_ALL_REDUCE.code, {Role.RECEIVE_PARTIAL}),
    "two-shot": (
        ("gemm_all_reduce", "two_shot"),
        GEMM_ALL_REDUCE.code,
        {Role.RECEIVE_PARTIAL, Role.RECEIVE_RESULT},  # some warps wait for the one, some for the other
    ),
    "gather": (("gemm_all_gather", None), GEMM_ALL_GATHER.code, {Role.RECEIVE_RESULT}),
}


FEWER = ["two-shot", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "two-shot")]
"""A two-shot all-reduce waits for all that the others wait for."""


@both
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_flag_is_reported_with_its_tile_and_epochs(arch, way):
    how, op, roles = WAYS[way]
    with pytest.raises(CommTimeoutError) as caught:
        world(arch, how, flag_fault("drop", 0, 2, skip=1)).run()  # of the entry, all that follow are lost
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.op) == (2, 0, op)
    assert failure.role in roles and (failure.expected, failure.seen) == (1, 0)
    assert failure.flag % 3 == failure.source


@both
def test_a_lost_result_is_told_from_a_lost_partial(arch):
    """Rank 0 tells rank 2 of its entry, of one partial tile, and of each unit that it has summed.

    These are three places of the kernel, of each of which the first flag arrives.
    """
    with pytest.raises(CommTimeoutError) as caught:
        world(arch, WAYS["two-shot"][0], flag_fault("drop", 0, 2, skip=1)).run()
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.op) == (2, 0, GEMM_ALL_REDUCE.code)
    assert (failure.role, failure.tile, failure.seen) == (Role.RECEIVE_RESULT, 0, 0)
    assert failure.flag >= 3 and failure.flag % 3 == failure.source


@both
@pytest.mark.parametrize("way", FEWER)
def test_a_dead_rank_is_named(arch, way):
    with pytest.raises(CommTimeoutError) as caught:
        world(arch, WAYS[way][0], lambda world, faults: faults.kill(1)).run()
    assert caught.value.failure.source == 1
    assert caught.value.failure.rank in (0, 2)


@both
@pytest.mark.parametrize("way", FEWER)
def test_late_flags_do_no_harm(arch, way):
    verdicts = world(arch, WAYS[way][0], flag_fault("delay", None, None, instructions=5000)).run()
    assert len(verdicts) == 1 and all(verdict.holds for verdict in verdicts), verdicts
