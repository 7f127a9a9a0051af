"""Ranks find out together whether fused kernels could serve them, and all come to the same answer."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from overlap_gemm.backends import peer_access
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.runtime.memory.symmetric import SymmetricMemoryError

CUDA = torch.device("cuda", 0)


class Block:
    """Stands for a block of symmetric memory; on rank 2 it cannot be had."""

    broken = -1

    def __init__(self, group, nbytes, device):
        if group.rank == self.broken:
            raise SymmetricMemoryError("no block for this rank")

    def close(self):
        pass


def found(rank, *, arch="sm_90a", apart=None, broken=-1):
    """What this rank finds out, with a made-up GPU."""
    own = peer_access.Device(None, arch, 132 - rank, "constants", "host", f"gpu-{rank}")
    Block.broken = broken
    with (
        mock.patch.object(peer_access, "this_device", lambda device: own),
        mock.patch.object(peer_access, "_why_no_access", lambda device, everyone: apart),
        mock.patch.object(peer_access, "TorchSymmetric", Block),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.dict(peer_access._known, clear=True),
    ):
        group = resolve(group_name(None))
        answer = peer_access.peer_access_of(group, CUDA)
        asked = mock.Mock(side_effect=AssertionError("asked again"))
        with mock.patch.object(peer_access, "_probe", asked):
            assert peer_access.peer_access_of(group, CUDA) is answer
        return answer


def answers(rank, size):
    same = peer_access.PeerAccess("sm_90a", 132 - (size - 1), None)
    assert found(rank) == same
    assert "rank 1 has sm_100a" in found(rank, arch="sm_100a" if rank == 1 else "sm_90a").why_not
    apart = found(rank, apart="device 0 cannot access device 1" if rank == 0 else None)
    assert "(rank 0: device 0 cannot access device 1)" in apart.why_not
    assert "(rank 2: SymmetricMemoryError: no block" in found(rank, broken=2).why_not


def test_every_rank_comes_to_the_same_answer(ranks):
    ranks(3).run(answers)


def refused_in_capture(rank, size):
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        mock.patch.dict(peer_access._known, clear=True),
        pytest.raises(
            RuntimeError,
            match=r"while a CUDA graph is captured: before the capture, call overlap_gemm.warmup",
        ),
    ):
        peer_access.peer_access_of(resolve(group_name(None)), CUDA)


def test_a_capture_is_no_time_to_find_out(ranks):
    ranks(2).run(refused_in_capture)


@pytest.mark.parametrize(
    ("reserved", "num_sms", "why_not"),
    [
        (None, 132, None),
        ("20", 112, None),
        ("132", 0, "OVERLAP_GEMM_RESERVE_SMS=132 leaves no SM"),
        ("many", 132, "OVERLAP_GEMM_RESERVE_SMS must be a number of SMs; got 'many'"),
    ],
)
def test_predictions_count_the_sms_that_kernels_may_fill(monkeypatch, reserved, num_sms, why_not):
    """As `runtime.peers` does for the kernels; a rank that cannot tells the others, who wait for it."""
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132, uuid="gpu-0", name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(peer_access, "why_no_cuda", lambda index: None)
    if reserved is None:
        monkeypatch.delenv("OVERLAP_GEMM_RESERVE_SMS", raising=False)
    else:
        monkeypatch.setenv("OVERLAP_GEMM_RESERVE_SMS", reserved)
    own = peer_access.this_device(CUDA)
    assert own.num_sms == num_sms
    assert (own.why_not or "").startswith(why_not or "") and (own.why_not is None) == (why_not is None)
