"""Workspaces of processes: whose memory, who is reached, and what is allocated accordingly."""

from types import SimpleNamespace

import pytest
import torch

from overlap_gemm.runtime import executor, symmetric, workspace
from overlap_gemm.runtime.executor import CudaExecutor
from overlap_gemm.runtime.group import Group
from overlap_gemm.runtime.workspace import SizeClass

SIZE = SizeClass(zeroed=64, buffer=1000, buffers=2, staging_buffers=2)
CPU = torch.device("cpu")


class Answers(Group):
    """A group of three of which this rank is the first, and whose others answer as told."""

    def __init__(self, *others):
        super().__init__("answers", 0, 3, None)
        object.__setattr__(self, "others", others)

    def all_gather_object(self, own):
        return [own, *self.others]


# --- reach ---


@pytest.mark.parametrize(
    ("own", "others", "reaches_all"),
    [
        ([1 << 40, 2 << 40, 3 << 40], (True, True), True),
        ([1 << 40, -2, 3 << 40], (True, True), False),
        ([1 << 40, 2 << 40, 3 << 40], (True, False), False),
    ],
    ids=["all", "not-by-this-rank", "not-by-another"],
)
def test_nvshmem_reaches_all_only_if_every_rank_reaches_every_other(monkeypatch, own, others, reaches_all):
    closed = []

    def allocate(self, group, nbytes, device):
        self.bases = torch.tensor(own)

    monkeypatch.setattr(symmetric.NvshmemSymmetric, "__init__", allocate)
    monkeypatch.setattr(symmetric.NvshmemSymmetric, "close", lambda self: closed.append(self))
    assert symmetric.NvshmemSymmetric.reaches_all(Answers(*others), CPU) == reaches_all
    assert len(closed) == 1


class Block:
    """Stands in for a provider: memory of this process, poisoned; its class says who is reached."""

    reach = True

    def __init__(self, group, nbytes, device):
        self.local = torch.full((nbytes,), 255, dtype=torch.uint8)

    @classmethod
    def reaches_all(cls, group, device):
        return cls.reach

    def close(self):
        pass


@pytest.fixture
def obtained(monkeypatch):
    """``obtained(reach)``: the workspace a process makes with NVSHMEM's memory."""

    def obtain(reach):
        here = SimpleNamespace(device=CPU, host_words=lambda n: torch.zeros(n, dtype=torch.int32))
        monkeypatch.setattr(Block, "reach", reach)
        return workspace.obtain(Answers(None, None), SIZE, here)

    monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "nvshmem")
    monkeypatch.setattr(workspace, "NvshmemSymmetric", Block)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    monkeypatch.setattr(workspace, "_pool", {})
    return obtain


@pytest.mark.parametrize(("reach", "nbytes"), [(True, 2064), (False, 4064)])
def test_staging_is_allocated_only_where_a_peer_is_beyond_reach(obtained, reach, nbytes):
    space = obtained(reach)
    assert (space.reaches_all, space.memory.local.numel()) == (reach, nbytes)
    assert not space.memory.local[:64].any() and space.memory.local[64:].all()
    assert workspace.workspace_bytes() == nbytes


def test_reach_is_found_out_once_per_workspace(obtained):
    assert obtained(True) is obtained(False)


def test_the_limit_counts_staging(obtained, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_WORKSPACE_LIMIT", "3000")
    with pytest.raises(symmetric.SymmetricMemoryError, match="4064 more are needed"):
        obtained(False)
    assert obtained(True).reaches_all


def test_a_provider_that_is_none_is_refused(obtained, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "shm")
    with pytest.raises(ValueError, match="torch or nvshmem, got 'shm'"):
        obtained(True)


# --- streams ---


def test_a_fork_begins_behind_the_current_stream_and_is_joined_whatever_happens(monkeypatch):
    order = []

    def stream(name, handle):
        return SimpleNamespace(
            cuda_stream=handle, wait_stream=lambda other: order.append((name, other.name)), name=name
        )

    current, second = stream("current", 1), stream("second", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(executor, "_second_stream", lambda device: second)
    with pytest.raises(RuntimeError, match="launch"), CudaExecutor("sm_90a", CPU, 132).fork() as handle:
        order.append(handle)
        raise RuntimeError("launch")
    assert order == [("second", "current"), 2, ("current", "second")]
