"""What ranks agree on before their first fused call, and before they free what they share, as processes."""

from types import SimpleNamespace

import pytest
import torch

from overlap_gemm.device.failure import RECORD_WORDS
from overlap_gemm.runtime import peers
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.runtime.memory import workspace
from overlap_gemm.runtime.memory.workspace import SizeClass

CPU = torch.device("cpu")


class Block:
    """Stands in for symmetric memory: memory of this process."""

    name = "memory of this process"

    def __init__(self, group, nbytes, device):
        self.local = torch.zeros(nbytes, dtype=torch.uint8)
        self.bases = torch.zeros(group.size, dtype=torch.int64)

    @staticmethod
    def has_p2p(group, device):
        return True

    @staticmethod
    def why_not(group):
        return None

    def close(self):
        self.local = None


def side(rank, patch, arch="sm_90a", num_sms=132):
    """This rank's side of the world, on a made-up device."""
    here = SimpleNamespace(
        arch=arch,
        num_sms=num_sms,
        device=CPU,
        is_open=True,
        record=torch.zeros(RECORD_WORDS, dtype=torch.int32),
    )
    patch.setattr(peers, "executor_for", lambda group, device: here)
    patch.setattr(peers, "_peers", {})
    return peers.peers_of(resolve(group_name(None)), CPU, lambda arch: "")


def mixed_sizes(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OVERLAP_GEMM_TIMEOUT", raising=False)
        if rank == 1:
            patch.setenv("OVERLAP_GEMM_RESERVE_SMS", "8")
        found = side(rank, patch, num_sms=132 - 4 * rank)
        return found.agreed.num_sms, found.agreed.timeout_ns, found.reserve_sms


def mixed_architectures(rank, size):
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(DisagreementError, match="rank 2 has sm_100a"),
    ):
        side(rank, patch, arch="sm_100a" if rank == 2 else "sm_90a")


def one_rank_fails(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("OVERLAP_GEMM_TIMEOUT", "soon")
        with pytest.raises(DisagreementError, match="rank 1: ValueError: .*soon"):
            side(rank, patch)


def captured_by_one_rank(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "TorchSymmetric", Block)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        here = side(rank, patch)
        small = workspace.obtain(here, SizeClass(64, 1000, 2, 2))
        large = workspace.obtain(here, SizeClass(64, 5000, 2, 2))
        large.captured = rank == 1
        workspace.close_workspaces()
        assert (small.is_open, large.is_open) == (False, True)
        assert workspace.obtain(here, SizeClass(64, 1000, 2, 2)) is large


@pytest.mark.parametrize("size", [3])
def test_the_fewest_sms_count_and_the_groups_time_out(ranks, size):
    found = ranks(size).run(mixed_sizes)
    assert [sms for sms, _, _ in found] == [120] * size
    assert {bound for _, bound, _ in found} == {ranks(size).timeout * 1_000_000_000}
    assert [reserve for _, _, reserve in found] == [0, 8, 0]


@pytest.mark.parametrize("body", [mixed_architectures, one_rank_fails, captured_by_one_rank])
def test_all_ranks_come_to_the_same_end(ranks, body):
    ranks(3).run(body)
