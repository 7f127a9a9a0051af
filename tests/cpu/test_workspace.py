"""Workspaces of processes: whose memory, who is reached, and what is allocated accordingly."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from overlap_gemm.device.failure import RECORD_WORDS, Role
from overlap_gemm.runtime import peers
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.failures import CommTimeoutError, OverlappingCallsError
from overlap_gemm.runtime.group import Group
from overlap_gemm.runtime.memory import symmetric, workspace
from overlap_gemm.runtime.memory.workspace import SizeClass
from overlap_gemm.spec import GEMM_REDUCE_SCATTER

SIZE = SizeClass(zeroed=64, buffer=1000, buffers=2, staging_buffers=2)
CPU = torch.device("cpu")


class Answers(Group):
    """A group of three of which this rank is the first, and whose others answer as told."""

    def __init__(self, *others):
        super().__init__("answers", 0, 3, None)
        object.__setattr__(self, "others", others)

    def all_gather_object(self, own):
        if isinstance(own, tuple):  # of `agree.gather`: the others did not fail, and found what this one did
            return [own, *((None, own[1] or (None,)) for _ in self.others)]
        return [own, *self.others]


# --- reach ---


@pytest.mark.parametrize(
    ("own", "others", "has_p2p"),
    [
        ([1 << 40, 2 << 40, 3 << 40], (True, True), True),
        ([1 << 40, -2, 3 << 40], (True, True), False),
        ([1 << 40, 2 << 40, 3 << 40], (True, False), False),
    ],
    ids=["all", "not-by-this-rank", "not-by-another"],
)
def test_nvshmem_reaches_all_only_if_every_rank_reaches_every_other(monkeypatch, own, others, has_p2p):
    closed = []

    def allocate(self, group, nbytes, device):
        self.bases = torch.tensor(own)

    monkeypatch.setattr(symmetric.NvshmemSymmetric, "__init__", allocate)
    monkeypatch.setattr(symmetric.NvshmemSymmetric, "close", lambda self: closed.append(self))
    assert symmetric.NvshmemSymmetric.has_p2p(Answers(*others), CPU) == has_p2p
    assert len(closed) == 1


class Block:
    """Stands in for a provider: memory of this process, poisoned; its class says who is reached."""

    name, reach = "nvshmem", True

    def __init__(self, group, nbytes, device):
        self.local = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.bases = torch.full((group.size,), self.local.data_ptr())

    @classmethod
    def has_p2p(cls, group, device):
        return cls.reach

    @staticmethod
    def why_not(group):
        return None

    def close(self):
        self.local = None


@pytest.fixture
def obtained(monkeypatch):
    """``obtained(reach, size)``: the workspace a process makes with NVSHMEM's memory."""
    here = SimpleNamespace(device=CPU, record=torch.zeros(RECORD_WORDS, dtype=torch.int32))
    side = peers.Peers(Answers(None, None), here, peers.Agreed("sm_90a", "", 132, 0), 0)

    def obtain(reach=True, size=SIZE):
        monkeypatch.setattr(Block, "reach", reach)
        return workspace.obtain(side, size)

    monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "nvshmem")
    monkeypatch.setattr(workspace, "NvshmemSymmetric", Block)
    monkeypatch.setattr(workspace, "check_network_writes", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peers, "_peers", {("answers", CPU): side})
    monkeypatch.setattr(peers, "orphaned", left := [])
    monkeypatch.setattr(workspace, "orphaned", left)
    return obtain


@pytest.mark.parametrize(("reach", "nbytes"), [(True, 2064), (False, 4064)])
def test_staging_is_allocated_only_where_a_peer_is_beyond_reach(obtained, reach, nbytes):
    space = obtained(reach)
    assert (space.has_p2p, space.memory.local.numel()) == (reach, nbytes)
    assert not space.memory.local[:64].any() and space.memory.local[64:].all()
    assert workspace.workspace_bytes() == nbytes


@pytest.mark.parametrize(("ordering", "refused"), [(0, True), (100, False), (200, False)])
def test_a_network_whose_writes_come_out_of_order_is_refused(obtained, monkeypatch, ordering, refused):
    driver = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda what, index: (0, ordering))
    monkeypatch.setattr(workspace, "check_network_writes", symmetric.check_network_writes)
    assert obtained(True, SizeClass(64, 10, 2, 2)).has_p2p, "nobody asks where there is no network"
    if refused:
        with pytest.raises(symmetric.SymmetricMemoryError, match="does not order a NIC's writes"):
            obtained(False, SizeClass(64, 1000, 2, 2))
    else:
        assert not obtained(False, SizeClass(64, 1000, 2, 2)).has_p2p


def test_puts_need_memory_of_nvshmem(obtained, monkeypatch):
    group = Answers(None, None)
    assert workspace.why_no_put_memory(group) is None
    monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "torch")
    assert "OVERLAP_GEMM_SYMMETRIC=nvshmem" in workspace.why_no_put_memory(group)


def test_reach_is_found_out_once_per_workspace(obtained):
    assert obtained(True) is obtained(False)


def test_the_limit_counts_staging(obtained, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_WORKSPACE_LIMIT", "3000")
    with pytest.raises(symmetric.SymmetricMemoryError, match="4064 more are needed"):
        obtained(False)
    monkeypatch.setenv("OVERLAP_GEMM_WORKSPACE_LIMIT", "4064")
    assert not obtained(False).has_p2p, "the limit may be reached"
    assert workspace.DEFAULT_LIMIT == 8 * 2**30, "as docs/fused.md says"


def test_a_new_block_is_emptied_up_to_its_buffers_and_its_first_epoch_is_one():
    block = torch.full((128,), 7, dtype=torch.uint8)
    SizeClass(64, 16, 2, 2, first_epoch=32).prepare(block)
    words = block.view(torch.int64)
    assert words[:8].tolist() == [0, 0, 0, 0, 1, 0, 0, 0] and (block[64:] == 7).all()
    SizeClass(64, 16, 2, 2, filled=255).prepare(block)
    assert (words[:8] == 0).all() and (block[64:] == 255).all()


@pytest.mark.parametrize(
    ("size", "shared"),
    [
        (SizeClass(64, 1000, 2, 2), True),
        (SizeClass(32, 100, 2, 2), True),
        (SizeClass(128, 100, 2, 2), False),
        (SizeClass(32, 1001, 2, 2), False),
    ],
)
def test_a_call_takes_what_is_large_enough_in_every_respect(obtained, size, shared):
    assert (obtained() is obtained(size=size)) == shared


def test_of_several_that_are_large_enough_the_smallest_is_taken(obtained):
    large, small = obtained(size=SizeClass(64, 9000, 2, 2)), obtained(size=SizeClass(128, 1000, 2, 2))
    assert large is not small
    assert obtained(size=SizeClass(64, 500, 2, 2)) is small


def test_a_class_stays_where_it_is_when_a_smaller_workspace_comes(obtained):
    """Ranks need not ask again at the same calls: one may make a plan anew that its peer still has."""
    large = obtained(size=SizeClass(64, 9000, 2, 2))
    assert obtained() is large
    small = obtained(size=SizeClass(128, 1000, 2, 2))
    assert small is not large and obtained() is large
    assert workspace.workspaces() == [large, small]


# --- closing ---


def test_close_frees_and_a_later_call_makes_a_new_one(obtained, monkeypatch):
    first = obtained()
    monkeypatch.setattr(Answers, "all_gather_object", lambda self, own: [own, own, own])
    workspace.close_workspaces()
    assert first.memory.local is None and not first.is_open
    assert workspace.workspace_bytes() == 0


@pytest.mark.parametrize("by", ["this rank", "another"])
def test_what_a_graph_may_store_into_stays_on_every_rank(obtained, monkeypatch, by):
    kept, freed = obtained(), obtained(size=SizeClass(64, 9000, 2, 2))
    kept.captured = by == "this rank"
    monkeypatch.setattr(Answers, "all_gather_object", lambda self, own: [own, own, [by == "another", False]])
    workspace.close_workspaces()
    assert kept.is_open and kept.captured and kept.memory.local is not None
    assert not freed.is_open and freed.memory.local is None
    assert workspace.workspace_bytes() == kept.memory.local.numel()


def test_a_group_that_comes_again_shares_nothing_with_the_last_of_its_name(obtained, monkeypatch):
    """torch numbers groups from 0 again when it is initialised again; a graph may store into the first."""
    here = SimpleNamespace(
        arch="sm_90a",
        num_sms=132,
        device=CPU,
        is_open=True,
        record=torch.zeros(RECORD_WORDS, dtype=torch.int32),
    )
    monkeypatch.setattr(peers, "executor_for", lambda group, device: here)
    monkeypatch.setattr(Answers, "all_gather_object", lambda self, own: [own, own, own])
    old, new = Answers(), Answers()
    object.__setattr__(new, "_process_group", lambda another=object(): another)  # noqa: B008
    monkeypatch.setattr(Answers, "timeout", lambda self, device_type: None)
    monkeypatch.setattr(Answers, "device_types", {"cuda"})
    monkeypatch.setattr(peers, "_peers", {})
    first = workspace.obtain(peers.peers_of(old, CPU, lambda arch: ""), SIZE)
    assert workspace.obtain(peers.peers_of(old, CPU, lambda arch: ""), SIZE) is first
    assert workspace.obtain(peers.peers_of(new, CPU, lambda arch: ""), SIZE) is not first
    assert peers.orphaned == [first] and first.memory.local is not None
    assert workspace.workspace_bytes() == 2 * first.memory.local.numel()


def test_workspaces_of_a_destroyed_group_stay(obtained, monkeypatch):
    """Its ranks cannot be synchronized, and a barrier without a group would be the world's."""
    space = obtained()
    monkeypatch.setattr(Group, "is_destroyed", True)
    workspace.close_workspaces()
    assert peers.orphaned == [space] and space.memory.local is not None
    assert workspace.workspaces() == [space] and peers.local_peers() == []


# --- records ---


@pytest.mark.parametrize(
    ("role", "error", "words"),
    [
        (Role.RECEIVE_PARTIAL, CommTimeoutError, "rank 1 .* gave up on rank 2: tile 3, flag 4"),
        (Role.CALL_ENTERED, CommTimeoutError, "rank 1 .* gave up on rank 2: .* expected epoch 7, seen 5"),
        (Role.IN_CALL, OverlappingCallsError, "call 7 of rank 1 began while call 5 ran .*wait_stream"),
    ],
)
def test_a_record_becomes_the_error_that_it_is(obtained, role, error, words):
    space, other = obtained(), obtained(size=SizeClass(64, 9000, 2, 2))
    other.raise_if_failed()
    record = [1, 1, GEMM_REDUCE_SCATTER.code, role, 3, 2, 4, 7, 0, 5, 0]
    assert len(record) == RECORD_WORDS
    space.record.copy_(torch.tensor(record, dtype=torch.int32))
    with pytest.raises(error, match=words) as caught:
        other.raise_if_failed()
    assert caught.value.failure.role == role


def test_a_provider_that_is_none_is_refused(obtained, monkeypatch):
    monkeypatch.setenv("OVERLAP_GEMM_SYMMETRIC", "shm")
    with pytest.raises(DisagreementError, match="rank 0: ValueError: .*torch or nvshmem; got 'shm'"):
        obtained(True)


@pytest.mark.parametrize("chosen", [None, "0"])
def test_torch_makes_no_multicast_object_of_our_blocks(monkeypatch, chosen):
    """Unless the user has decided; torch reads the variable when the blocks meet."""
    seen = []

    def rendezvous(block, group):
        seen.append(os.environ.get(symmetric.NO_MULTICAST))
        return SimpleNamespace(buffer_ptrs=[block.data_ptr()])

    monkeypatch.delenv(symmetric.NO_MULTICAST, raising=False)
    if chosen is not None:
        monkeypatch.setenv(symmetric.NO_MULTICAST, chosen)
    monkeypatch.setattr(symmetric, "together", lambda group, what, make, error: make())
    monkeypatch.setattr(symm_mem, "empty", lambda nbytes, dtype, device: torch.empty(nbytes, dtype=dtype))
    monkeypatch.setattr(symm_mem, "rendezvous", rendezvous)
    symmetric.TorchSymmetric(SimpleNamespace(process_group="ranks", rank=0), 64, torch.device("cpu"))
    assert seen == [chosen or "1"] and os.environ.get(symmetric.NO_MULTICAST) == chosen
