"""Workspaces: the memory that fused kernels exchange tiles through, and the reports of expired waits.

A workspace belongs to a group and to a size class (powers of two), is allocated at the first call that no
workspace of the group is large enough for, and serves all later ones that it is large enough for. It begins
with ``zeroed`` bytes that are zero at birth (control words and flags) and are never reset. Where things lie
in it is the kernels' business (`exchange.geometry`); that its layout depends on the class alone, never on a
call's shape, is this module's.

Whose memory it is (`OVERLAP_GEMM_SYMMETRIC`) and whether loads and stores reach every peer's block are two
facts. The second is found out when it is made, and agreed by all ranks; NVSHMEM's memory serves both cases.

`close_workspaces` is collective and explicit. The garbage collector frees nothing. A workspace that captured
calls use stays until the process ends: a graph can be replayed at any time, and would store into its peers'
freed memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...device.failure import NOTHING, RECORD_WORDS, Failure, Role, read_record
from ...spec import op_coded
from .. import environment
from ..agree import DisagreementError, differences, gather, together
from ..group import Group, GroupLike, group_name
from ..identity import describe
from ..order import forbid_capture
from ..peers import Peers, forget, left_behind, sides
from ..watcher import watch
from .symmetric import (
    NvshmemSymmetric,
    SymmetricMemory,
    SymmetricMemoryError,
    TorchSymmetric,
    check_network_writes,
)
from .virtual_ranks import virtual_ranks

DEFAULT_LIMIT = 8 << 30
"""Bytes all workspaces of a process may take together; ``OVERLAP_GEMM_WORKSPACE_LIMIT`` overrides."""


class CommTimeoutError(RuntimeError):
    """A kernel gave up waiting for a peer. The CUDA context of the process is unusable afterwards.

    Attributes:
        failure: the record the waiting lane left.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        seen = "nothing of it" if failure.seen == NOTHING else failure.seen
        op, role = op_coded(failure.op), Role(failure.role).name.lower()
        super().__init__(
            f"{op}: rank {failure.rank} ({role}) gave up on "
            f"rank {failure.source}: tile {failure.tile}, flag {failure.flag}, "
            f"expected epoch {failure.expected}, seen {seen}. "
            f"Rank {failure.source} is dead, stalled, or did not make the same calls."
        )


class OverlappingCallsError(RuntimeError):
    """Two fused calls ran on a device at once. The CUDA context of the process is unusable afterwards.

    Attributes:
        failure: the record of the later one; what it saw is the number of the one that was running.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(
            f"{op_coded(failure.op)}: call {failure.expected} of rank {failure.rank} began while call "
            f"{failure.seen} ran on the same device, and the two could have waited for each other for ever. "
            f"Calls are ordered one after the other, and so are those captured in one graph; a replay is "
            f"ordered by its stream alone. Replay graphs of fused calls on the stream of the other fused "
            f"calls, or make one stream wait for the other (torch.cuda.Stream.wait_stream)."
        )


class MismatchedCallsError(RuntimeError):
    """A peer is in another call than this rank. The CUDA context of the process is unusable afterwards.

    No rank gets a result of two different calls.

    Attributes:
        failure: the record; what was expected and seen are this rank's and the peer's identity of the call
            (`exchange.call.Call.identity`).
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        here, there = describe(failure.expected >> 32), describe(failure.seen >> 32)
        super().__init__(
            f"{op_coded(failure.op)}: rank {failure.rank} is in {here}, rank {failure.source} in "
            f"{there}: call {failure.expected & 0xFFFFFFFF} of their workspace on both. All ranks of a group "
            f"must make the same calls in the same order, also where graphs are replayed. A call that raised "
            f"on one rank alone counts there: it cannot be made up for."
        )


FAILURES: dict[int, type[CommTimeoutError | OverlappingCallsError | MismatchedCallsError]] = {
    Role.IN_CALL: OverlappingCallsError,
    Role.CALL_IDENTITY: MismatchedCallsError,
}
"""What a record is raised as, by who left it; others as a CommTimeoutError."""


@dataclass(frozen=True)
class SizeClass:
    """What workspaces are told apart by; equal on all ranks, since it comes from the shape of a call.

    Attributes:
        zeroed: leading bytes that are zero at birth.
        buffer: bytes of each buffer after them.
        buffers: how many.
        staging_buffers: how many more, where some peer is beyond reach.
        kind: of ops that use it; others have workspaces of their own.
        first_epoch: offset of a ``uint64`` that is 1 at birth.
        filled: what every byte of the buffers is at birth; None: anything.
    """

    zeroed: int
    buffer: int
    buffers: int
    staging_buffers: int
    kind: str = "slots"
    first_epoch: int = 0
    filled: int | None = None

    def holds(self, other: SizeClass) -> bool:
        """Whether whatever fits into a workspace of the other class fits into one of this."""
        return self.kind == other.kind and self.zeroed >= other.zeroed and self.buffer >= other.buffer

    def prepare(self, block: Tensor) -> None:
        """Writes what a new block must hold before any kernel runs."""
        block[: self.zeroed].zero_()
        if self.filled is not None:
            block[self.zeroed :].fill_(self.filled)
        if self.first_epoch:
            block[self.first_epoch : self.first_epoch + 8].view(torch.int64).fill_(1)

    def nbytes(self, reaches_all: bool) -> int:
        """Size of each rank's block."""
        return self.zeroed + (self.buffers + (0 if reaches_all else self.staging_buffers)) * self.buffer


@dataclass(eq=False)
class Workspace:
    """One group's block, and where kernels that use it say why they gave up.

    Attributes:
        group: who shares it.
        size: its class.
        memory: the block on every rank.
        reaches_all: whether loads and stores of every rank reach the block of every other.
        record: `Executor.record`.
        captured: whether a CUDA graph may hold calls that use it.
        is_open: whether it may be used, until `close_workspaces`.
    """

    group: Group
    size: SizeClass
    memory: SymmetricMemory
    reaches_all: bool
    record: Tensor
    captured: bool = False
    is_open: bool = True
    _words: ctypes.Array[ctypes.c_uint32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._words = (ctypes.c_uint32 * RECORD_WORDS).from_address(self.record.data_ptr())

    def raise_if_failed(self) -> None:
        """Raises what a kernel has left a record of; reads host memory only.

        Raises:
            CommTimeoutError: it gave up waiting for a peer.
            OverlappingCallsError: it began while another one ran.
            MismatchedCallsError: a peer was in another call.
        """
        assert self.is_open, "a call on a closed workspace"
        if self._words[0]:
            raise self._failure()

    def _failure(self) -> CommTimeoutError | OverlappingCallsError | MismatchedCallsError:
        failure = read_record(list(self._words))
        assert failure is not None
        return FAILURES.get(failure.role, CommTimeoutError)(failure)

    def watch(self) -> None:
        """Names a failure on stderr although no call follows."""
        watch(self._words, self.record.data_ptr(), lambda: str(self._failure()))


def obtain(peers: Peers, size: SizeClass) -> Workspace:
    """The workspace of a class: the smallest of the group that is large enough when a call first needs one.

    If there is none, it is allocated. Which one it is follows from the classes needed so far, of which all
    ranks have the same sequence, and stays, since ranks need not ask again at the same calls.

    Args:
        peers: the rank's side of the group.
        size: the class.

    Raises:
        SymmetricMemoryError: on every rank, if one of them could not allocate or would pass its limit.
        CaptureError: it had to allocate during CUDA graph capture.
    """
    if (known := peers.workspaces.get(size)) is not None:
        return known
    fitting = [workspace for workspace in peers.workspaces.values() if workspace.size.holds(size)]
    if not fitting:
        forbid_capture(peers.executor.device, "a workspace cannot be allocated")
        fitting = [_make(peers, size)]
    peers.workspaces[size] = chosen = min(fitting, key=lambda workspace: workspace.memory.local.numel())
    return chosen


def _provider() -> type[TorchSymmetric] | type[NvshmemSymmetric]:
    """Whose memory workspaces of processes are, by ``OVERLAP_GEMM_SYMMETRIC``, the same on all ranks.

    Raises:
        ValueError: the variable names no provider.
    """
    name = environment.choice("OVERLAP_GEMM_SYMMETRIC", ("torch", "nvshmem"))
    return NvshmemSymmetric if name == "nvshmem" else TorchSymmetric


def _agreed_provider(group: Group) -> type[TorchSymmetric] | type[NvshmemSymmetric]:
    """That of all ranks.

    Raises:
        DisagreementError: on every rank, if they have different ones, or one of them none.
        ValueError: NVSHMEM's cannot serve this group.
    """
    names = gather(group, "choosing the memory of workspaces", lambda: _provider().name)
    if views := differences(group, names):
        raise DisagreementError(
            f"the ranks of a group must share one kind of memory (OVERLAP_GEMM_SYMMETRIC): {views}"
        )
    provider = _provider()
    if reason := provider.why_not(group):
        raise ValueError(reason)
    return provider


def why_no_put_memory(group: Group) -> str | None:
    """Why NVSHMEM cannot put into the workspaces of a group, None if it can."""
    virtual = virtual_ranks(group)
    if virtual is not None:
        return None if virtual.has_nvshmem else "virtual ranks on a GPU are one process, and have no NVSHMEM"
    if _provider() is not NvshmemSymmetric:
        return "the workspaces must be NVSHMEM's memory: OVERLAP_GEMM_SYMMETRIC=nvshmem on every rank"
    return NvshmemSymmetric.why_not(group)


def _check_limit(nbytes: int) -> None:
    limit = environment.nbytes("OVERLAP_GEMM_WORKSPACE_LIMIT", DEFAULT_LIMIT)
    if workspace_bytes() + nbytes > limit:
        raise ValueError(
            f"workspaces hold {workspace_bytes()} bytes and {nbytes} more are needed; the limit is {limit} "
            f"(OVERLAP_GEMM_WORKSPACE_LIMIT): close_workspaces() of groups no longer in use, or raise it"
        )


def _make(peers: Peers, size: SizeClass) -> Workspace:
    """Finds out who reaches whom, and allocates accordingly."""
    group, device = peers.group, peers.executor.device
    virtual = virtual_ranks(group)
    if virtual is not None:
        nbytes = size.nbytes(not virtual.beyond_reach)
        _check_limit(nbytes)
        view = virtual.symmetric(size, group.rank, nbytes, size.prepare)
        return Workspace(group, size, view, not virtual.beyond_reach, peers.executor.record)
    provider = _agreed_provider(group)
    reaches_all = provider.reaches_all(group, device)
    nbytes = size.nbytes(reaches_all)

    def check() -> None:
        _check_limit(nbytes)
        if not reaches_all:
            check_network_writes(device)

    together(group, "reserving a workspace", check, SymmetricMemoryError)
    memory: SymmetricMemory = provider(group, nbytes, device)

    def prepare() -> None:
        size.prepare(memory.local)
        torch.cuda.synchronize(device)

    # After it no peer's flag can arrive before the zeros.
    together(group, "clearing a workspace", prepare, SymmetricMemoryError)
    workspace = Workspace(group, size, memory, reaches_all, peers.executor.record)
    together(group, "watching for failures", workspace.watch)
    return workspace


def workspaces(group: GroupLike = None) -> list[Workspace]:
    """This rank's workspaces.

    Args:
        group: As for an op; None for all groups of this process, those that have ended among them.
    """
    found = [workspace for peers in _sides(group) for workspace in _distinct(peers)]
    return found + (left_behind if group is None else [])


def workspace_bytes(group: GroupLike = None) -> int:
    """Bytes of this rank's device memory that the fused kernels' workspaces hold.

    Args:
        group: As for an op; None for all groups of this process.
    """
    return sum(workspace.memory.local.numel() for workspace in workspaces(group))


def raise_if_failed() -> None:
    """Raises what a kernel of this process has left a record of; see `Workspace.raise_if_failed`."""
    for workspace in workspaces():
        workspace.raise_if_failed()


def close_workspaces(group: GroupLike = None) -> None:
    """Frees the fused kernels' workspaces; a later call makes new ones. `finalize` closes all that are left.

    Those that a captured call of any rank uses stay and serve later calls: CUDA graphs may be replayed
    afterwards. They are freed with the process.

    Collective: every rank of the group calls it, after the same sequence of ops. Waits for the device.
    Nothing else frees a workspace, the garbage collector least of all.

    Args:
        group: As for an op; None for all groups of this process.
    """
    for peers in _sides(group):
        if peers.workspaces:
            _close(peers)
        if not peers.workspaces:
            forget(peers)


def _close(peers: Peers) -> None:
    peers.plans.clear()
    everyone = peers.group.all_gather_object([workspace.captured for workspace in _distinct(peers)])
    for workspace, *captured in zip(_distinct(peers), *everyone, strict=True):
        workspace.captured = any(captured)
        if not workspace.captured:
            workspace.memory.close()
            workspace.is_open = False
    peers.workspaces = {size: kept for size, kept in peers.workspaces.items() if kept.is_open}


def _distinct(peers: Peers) -> list[Workspace]:
    """In the order in which they were made; several classes may have the same one."""
    return list(dict.fromkeys(peers.workspaces.values()))


def _sides(group: GroupLike) -> list[Peers]:
    return sides(None if group is None else group_name(group))
