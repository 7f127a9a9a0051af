"""Lost, late and repeated flags, dead and stalled ranks: who waited for whom is said, or the result right."""

import pytest

from overlap_gemm.device.failure import Role
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.spec import GEMM_REDUCE_SCATTER
from tests.support.emulated.fault_world import ARCHS, World, flag_fault

pytestmark = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])


@pytest.mark.parametrize(("source", "target"), [(2, 1), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_a_lost_flag_is_reported_with_its_tile_and_epochs(arch, source, target):
    with pytest.raises(CommTimeoutError) as caught:
        # A rank tells another of its entry once; of the tiles, one flag arrives, the others are lost.
        World(arch, flag_fault("drop", source, target, skip=1)).run()
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.op) == (target, source, GEMM_REDUCE_SCATTER.code)
    assert (failure.role, failure.expected, failure.seen) == (Role.RECEIVE_PARTIAL, 1, 0)
    assert failure.flag == failure.tile * 3 + source


def test_a_flag_lost_in_a_later_call_is_told_from_the_one_before(arch):
    tiles = 256 // ARCHS[arch]["tile"][0]  # flags of one call from 0 to 1
    with pytest.raises(CommTimeoutError) as caught:
        World(arch, flag_fault("drop", 0, 1, skip=tiles), launches=2).run()
    failure = caught.value.failure
    assert (failure.rank, failure.source) == (1, 0)
    assert (failure.expected, failure.seen) == (2, 1)


@pytest.mark.parametrize("action", ["delay", "duplicate"])
def test_a_late_or_repeated_flag_does_no_harm(arch, action):
    verdicts = World(arch, flag_fault(action, None, None, instructions=5000), launches=3).run()
    assert len(verdicts) == 3 and all(verdict.holds for verdict in verdicts), verdicts


def test_a_dead_rank_is_named(arch):
    with pytest.raises(CommTimeoutError) as caught:
        World(arch, lambda world, faults: faults.kill(1)).run()
    assert caught.value.failure.source == 1
    assert caught.value.failure.rank in (0, 2)


def test_a_rank_that_stalls_for_a_while_does_no_harm(arch):
    verdicts = World(arch, lambda world, faults: faults.stall(1, 1000, 60_000), launches=2).run()
    assert len(verdicts) == 2 and all(verdict.holds for verdict in verdicts), verdicts
