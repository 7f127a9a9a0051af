"""Virtual ranks, their workspaces, and what happens when one of them is missing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.device.failure import Role
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import GEMM_REDUCE_SCATTER
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured

CASE = Case("gemm_reduce_scatter", 256, 64, 64, torch.bfloat16)
SMALL = {"mma": "1cta", "tile": (128, 64)}


@pytest.fixture(autouse=True)
def small_tiles():
    with configured(**SMALL):
        yield


def call(world, ranks, rows=256):
    x, weight = torch.randn(rows, 32, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    return [overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[r], backend="fused") for r in ranks]


@pytest.fixture
def world():
    with Emulator("sm_100a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        yield world


def test_a_world_fits_its_emulator():
    with Emulator("sm_100a", 2) as emulator, pytest.raises(ValueError, match="ranks=2"):
        VirtualWorld(3, emulator=emulator)
    with pytest.raises(ValueError, match="either emulator= or device="):
        VirtualWorld(2)


def test_calls_of_one_size_class_share_a_workspace_which_close_gives_back(world):
    call(world, (0, 1))
    held = overlap_gemm.workspace_bytes()
    assert held > 0
    call(world, (0, 1))
    call(world, (0, 1), rows=200)
    world.synchronize()
    assert overlap_gemm.workspace_bytes() == held
    world.close()
    assert overlap_gemm.workspace_bytes() == 0


def test_a_second_thread_is_refused_as_in_process_groups(world):
    call(world, (0, 1))
    with ThreadPoolExecutor(1) as threads, pytest.raises(overlap_gemm.GroupThreadError, match="MainThread"):
        threads.submit(call, world, (1,)).result()
    world.synchronize()


@pytest.mark.parametrize(
    ("op", "what", "rows", "shape"),
    [("all_gather_gemm", "rows", 64, (128, 64)), ("gemm_all_gather", "columns", 128, (128, 128))],
)
def test_shards_are_equal_for_virtual_ranks_which_cannot_ask(world, op, what, rows, shape):
    x, weight = torch.ones(rows, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)
    call = getattr(overlap_gemm, op)
    outs = [call(x, weight, group=name, backend="fused") for name in world.names]
    world.synchronize()
    for out in outs:
        assert torch.equal(out, torch.full(shape, 32.0, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=f"virtual ranks cannot exchange their {what}; pass {what}=<total>"):
        call(x, weight, group=world.names[0], backend="fused", **{what: "exchange"})


def test_the_limit_of_all_workspaces_is_kept(world, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_WORKSPACE_LIMIT", "1000")
    with pytest.raises(ValueError, match="the limit is 1000 .OVERLAP_GEMM_WORKSPACE_LIMIT."):
        call(world, (0, 1))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_never_calls_is_named(world, monkeypatch, rank):
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "0.001")
    call(world, (rank,))
    with pytest.raises(CommTimeoutError) as caught:
        world.synchronize()
    failure = caught.value.failure
    assert (failure.rank, failure.source, failure.op) == (rank, 1 - rank, GEMM_REDUCE_SCATTER.code)
    assert failure.role in (Role.RECEIVE_PARTIAL, Role.CALL_ENTERED)  # it waits for both
    assert (failure.expected, failure.seen) == (1, 0)
    assert f"rank {1 - rank} has exited, is stalled" in str(caught.value).lower()


def test_a_timeout_that_is_no_number_is_refused(world, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="soon"):
        call(world, (0,))


def test_shards_cut_in_groups_of_rows(world):
    """[M, batch, K] is cut along M: a shard is whole groups of `batch` rows."""
    x = torch.randn(5, 40, 64, dtype=torch.bfloat16)
    weight = torch.randn(64, 64, dtype=torch.bfloat16) / 8
    outs = [
        overlap_gemm.gemm_reduce_scatter(
            x[..., 32 * r : 32 * r + 32], weight[:, 32 * r : 32 * r + 32], group=name, backend="fused"
        )
        for r, name in enumerate(world.names)
    ]
    world.synchronize()
    assert [list(out.shape) for out in outs] == [[3, 40, 64], [2, 40, 64]]
    exact = x.double() @ weight.double().t()
    assert (torch.cat(outs).double() - exact).abs().max() < 2**-6 * exact.abs().max()


@pytest.mark.parametrize("rows", [48, 36, pytest.param(35, marks=pytest.mark.slow)])
def test_a_transposed_x_with_shards_of_any_rows(world, rows):
    """Shards of 18 rows begin where TMA does not along M."""
    x = torch.randn(64, 48, dtype=torch.bfloat16).t()[:rows]
    weight = torch.randn(64, 64, dtype=torch.bfloat16) / 8
    outs = [
        overlap_gemm.gemm_reduce_scatter(
            x[:, 32 * r : 32 * r + 32], weight[:, 32 * r : 32 * r + 32], group=name, backend="fused"
        )
        for r, name in enumerate(world.names)
    ]
    world.synchronize()
    exact = x.double() @ weight.double().t()
    assert (torch.cat(outs).double() - exact).abs().max() < 2**-6 * exact.abs().max()


@pytest.mark.parametrize("mode", [pytest.param("immediate", marks=pytest.mark.slow), "lazy"])
def test_many_launches_with_changing_data_and_no_reset(mode):
    with Emulator("sm_100a", 2, mode, seed=3) as emulator, VirtualWorld(2, emulator=emulator) as world:
        verdicts = [judge(CASE, given, outs, torch.bfloat16) for given, outs in run_launches(CASE, world, 12)]
    assert len(verdicts) == 12
    assert all(verdict.holds for verdict in verdicts), verdicts


@pytest.mark.parametrize("mode", ["random", pytest.param("lazy", marks=pytest.mark.slow)])
def test_peers_beyond_reach_get_their_tiles_through_nvshmem(mode):
    case = Case("gemm_reduce_scatter", 200, 64, 72, torch.bfloat16)
    with (
        Emulator("sm_100a", 3, mode, seed=1, network=True) as emulator,
        VirtualWorld(3, emulator=emulator, without_p2p=True) as world,
    ):
        verdicts = [judge(case, given, outs, torch.bfloat16) for given, outs in run_launches(case, world, 3)]
    assert all(verdict.holds for verdict in verdicts), verdicts


def test_only_an_emulator_puts_peers_beyond_reach():
    with pytest.raises(ValueError, match="without_p2p=True needs an emulator"):
        VirtualWorld(2, device=torch.device("cuda", 0), without_p2p=True)
