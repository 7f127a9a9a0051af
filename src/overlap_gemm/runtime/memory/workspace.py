"""Workspaces: memory through which fused kernels exchange tiles.

A workspace belongs to a group and a size class (powers of two). When a class is first needed, it gets the
group's smallest workspace that is large enough, or a new one if there is none. The class keeps that
workspace. The first ``zeroed`` bytes (control words and flags) are zero at allocation and are never reset.
`exchange.geometry` defines the offsets; they depend on the size class only, never on a call's shape.

Two facts are independent: the provider of the memory (`OVERLAP_GEMM_SYMMETRIC`), and whether all peers'
blocks are P2P-accessible. The second is tested at allocation and agreed by all ranks; NVSHMEM's memory
supports both cases.

`close_workspaces` is collective and explicit; the garbage collector frees nothing. A workspace that captured
calls use stays until the process ends: a graph can be replayed at any time, and would store into freed memory
of its peers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...device.failure import RECORD_WORDS
from .. import environment
from ..agree import DisagreementError, differences, gather, together
from ..failures import error_of
from ..group import Group, GroupLike, group_name
from ..order import forbid_capture
from ..peers import Peers, local_peers, orphan, orphaned, remove_peers
from .records import watch
from .symmetric import (
    NvshmemSymmetric,
    SymmetricMemory,
    SymmetricMemoryError,
    TorchSymmetric,
    check_network_writes,
)
from .virtual_ranks import virtual_ranks

DEFAULT_LIMIT = 8 << 30
"""Limit of all workspaces of a process, 8 GiB; ``OVERLAP_GEMM_WORKSPACE_LIMIT`` overrides it. The variable is
a number of bytes, or has a unit ("8GiB"). Workspaces of all groups count, also of groups that have ended."""


@dataclass(frozen=True)
class SizeClass:
    """Key of workspaces, computed from the shape of a call and therefore equal on all ranks.

    Attributes:
        zeroed: Number of leading bytes that are zero at allocation.
        buffer: Bytes of each buffer after the zeroed bytes.
        buffers: Number of buffers.
        staging_buffers: Number of additional buffers if some peer is not P2P-accessible.
        kind: Kind of the ops that use the workspace; other kinds have workspaces of their own.
        first_epoch: Offset of a ``uint64`` of the zeroed bytes that is 1 at allocation; 0: there is none.
        filled: Value of every byte of the buffers at allocation; None: any value.
    """

    zeroed: int
    buffer: int
    buffers: int
    staging_buffers: int
    kind: str = "slots"
    first_epoch: int = 0
    filled: int | None = None

    def holds(self, other: SizeClass) -> bool:
        """Returns whether a workspace of this class can replace one of the other class."""
        return self.kind == other.kind and self.zeroed >= other.zeroed and self.buffer >= other.buffer

    def prepare(self, block: Tensor) -> None:
        """Writes the initial values of a new block."""
        block[: self.zeroed].zero_()
        if self.filled is not None:
            block[self.zeroed :].fill_(self.filled)
        if self.first_epoch:
            block[self.first_epoch : self.first_epoch + 8].view(torch.int64).fill_(1)

    def nbytes(self, has_p2p: bool) -> int:
        """Returns the size of each rank's block in bytes."""
        return self.zeroed + (self.buffers + (0 if has_p2p else self.staging_buffers)) * self.buffer


@dataclass(eq=False)
class Workspace:
    """Workspace of one group on this rank, and the failure record of the kernels that use it.

    Attributes:
        group: Group whose ranks share it.
        size: Size class.
        memory: Block on every rank.
        has_p2p: True if every rank has P2P access to the block of every other.
        record: `Executor.record`.
        captured: True if a CUDA graph may contain calls that use it.
        is_open: True until `close_workspaces` frees it.
        addresses: `SymmetricMemory.bases` in host memory, for copy engines. A capture may need them, and
            cannot read the device.
    """

    group: Group
    size: SizeClass
    memory: SymmetricMemory
    has_p2p: bool
    record: Tensor
    captured: bool = False
    is_open: bool = True
    addresses: list[int] = field(init=False, repr=False)
    _words: ctypes.Array[ctypes.c_uint32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.addresses = self.memory.bases.tolist()
        self._words = (ctypes.c_uint32 * RECORD_WORDS).from_address(self.record.data_ptr())

    def raise_if_failed(self) -> None:
        """Raises the error that a kernel has recorded, if any; reads host memory only.

        Raises:
            CommTimeoutError: A wait for a peer expired.
            OverlappingCallsError: The kernel began while another one ran.
            MismatchedCallsError: A peer was in a different call.
        """
        assert self.is_open, "a call on a closed workspace"
        if self._words[0]:
            raise error_of(list(self._words))


def obtain(peers: Peers, size: SizeClass) -> Workspace:
    """Returns a workspace for a size class: the smallest one of the group that is large enough.

    If there is none, it is allocated. The choice is made when a class is first needed, and is kept. It
    depends only on the sequence of classes so far, which is the same on all ranks, so they need no
    communication.

    Args:
        peers: This rank's state of the group.
        size: Size class.

    Raises:
        SymmetricMemoryError: On every rank, if some of them could not allocate or would exceed their limit.
        ValueError: All ranks would exceed the limit, with the same text; or virtual ranks would.
        CaptureError: An allocation is needed during CUDA graph capture.
    """
    if (known := peers.workspaces.get(size)) is not None:
        return known
    fitting = [workspace for workspace in peers.workspaces.values() if workspace.size.holds(size)]
    if not fitting:
        forbid_capture(peers.executor.device, "a workspace cannot be allocated")
        fitting = [_make(peers, size)]
    peers.workspaces[size] = chosen = min(fitting, key=lambda workspace: workspace.memory.local.numel())
    return chosen


def memory_provider() -> type[TorchSymmetric] | type[NvshmemSymmetric]:
    """Returns the provider of workspaces of processes, by ``OVERLAP_GEMM_SYMMETRIC``.

    Raises:
        ValueError: The variable names no provider.
    """
    name = environment.choice("OVERLAP_GEMM_SYMMETRIC", ("torch", "nvshmem"))
    return NvshmemSymmetric if name == "nvshmem" else TorchSymmetric


def _agreed_provider(group: Group) -> type[TorchSymmetric] | type[NvshmemSymmetric]:
    """Returns the provider of all ranks.

    Raises:
        DisagreementError: On every rank, if the ranks' providers differ, or if a rank's variable is invalid.
        ValueError: On every rank: NVSHMEM does not support this group.
    """
    names = gather(group, "choosing the memory of workspaces", lambda: memory_provider().name)
    if views := differences(group, names):
        raise DisagreementError(f"OVERLAP_GEMM_SYMMETRIC must be the same on all ranks of a group: {views}")
    provider = memory_provider()
    if reason := provider.why_not(group):
        raise ValueError(reason)
    return provider


def why_no_put_memory(group: Group) -> str | None:
    """Returns why NVSHMEM cannot put into the workspaces of a group, or None if it can."""
    virtual = virtual_ranks(group)
    if virtual is not None:
        return (
            None
            if virtual.has_nvshmem
            else "virtual ranks on a GPU are one process and have no NVSHMEM memory"
        )
    if memory_provider() is not NvshmemSymmetric:
        return "workspaces must be NVSHMEM memory: set OVERLAP_GEMM_SYMMETRIC=nvshmem on every rank"
    return NvshmemSymmetric.why_not(group)


def workspace_limit() -> int:
    """Returns the limit in bytes of all workspaces of this process."""
    return environment.nbytes("OVERLAP_GEMM_WORKSPACE_LIMIT", DEFAULT_LIMIT)


def _check_limit(nbytes: int) -> None:
    """Raises ValueError if a further block would exceed the limit of this process."""
    limit = workspace_limit()
    if workspace_bytes() + nbytes > limit:
        raise ValueError(
            f"workspaces hold {workspace_bytes()} bytes and {nbytes} more are needed; the limit is {limit} "
            f"(OVERLAP_GEMM_WORKSPACE_LIMIT): call close_workspaces() for unused groups, or raise the limit"
        )


def _make(peers: Peers, size: SizeClass) -> Workspace:
    """Allocates a workspace; tests first whether all peers are P2P-accessible."""
    group, device = peers.group, peers.executor.device
    virtual = virtual_ranks(group)
    if virtual is not None:
        nbytes = size.nbytes(not virtual.without_p2p)
        _check_limit(nbytes)
        view = virtual.symmetric(size, group.rank, nbytes, size.prepare)
        if device.type == "cuda":
            watch()
        return Workspace(group, size, view, not virtual.without_p2p, peers.executor.record)
    provider = _agreed_provider(group)
    has_p2p = provider.has_p2p(group, device)
    nbytes = size.nbytes(has_p2p)

    def check() -> None:
        _check_limit(nbytes)
        if not has_p2p:
            check_network_writes(device)

    together(group, "reserving a workspace", check, SymmetricMemoryError)
    memory: SymmetricMemory = provider(group, nbytes, device)

    def prepare() -> None:
        size.prepare(memory.local)
        torch.cuda.synchronize(device)

    # All ranks agree here, so that no peer's flag can arrive before the zeros.
    together(group, "clearing a workspace", prepare, SymmetricMemoryError)
    together(group, "watching for failures", watch)
    return Workspace(group, size, memory, has_p2p, peers.executor.record)


def workspaces(group: GroupLike = None) -> list[Workspace]:
    """Returns this rank's workspaces.

    Args:
        group: Group, as for an op; None: all groups of this process, including those that have ended.
    """
    open_workspaces = [workspace for peers in _peers_of_group(group) for workspace in _distinct(peers)]
    return open_workspaces + (orphaned if group is None else [])


def workspace_bytes(group: GroupLike = None) -> int:
    """Returns the bytes of this rank's device memory that the fused kernels' workspaces hold.

    Args:
        group: Group, as for an op; None: all groups of this process.
    """
    return sum(workspace.memory.local.numel() for workspace in workspaces(group))


def raise_if_failed() -> None:
    """Raises the error that a kernel of this process has recorded, if any (`Workspace.raise_if_failed`)."""
    for workspace in workspaces():
        workspace.raise_if_failed()


def close_workspaces(group: GroupLike = None) -> None:
    """Frees the fused kernels' workspaces; later calls allocate new ones. `finalize` closes the rest.

    Workspaces used by captured calls of any rank stay and serve later calls, because CUDA graphs may be
    replayed afterwards. They are freed with the process; so are workspaces of destroyed groups, whose ranks
    cannot be synchronized.

    Collective: every rank of the group calls it, after the same sequence of ops. It waits for the device. No
    other function frees a workspace, and the garbage collector does not.

    Args:
        group: Group, as for an op; None: all groups of this process.
    """
    for peers in _peers_of_group(group):
        if peers.group.is_destroyed:
            orphan(peers)
        elif peers.workspaces:
            _close(peers)
        if not peers.workspaces:
            remove_peers(peers)


def _close(peers: Peers) -> None:
    """Frees the group's workspaces, except those captured on any rank; collective."""
    peers.plans.clear()
    everyone = peers.group.all_gather_object([workspace.captured for workspace in _distinct(peers)])
    for workspace, *captured in zip(_distinct(peers), *everyone, strict=True):
        workspace.captured = any(captured)
        if not workspace.captured:
            workspace.memory.close()
            workspace.is_open = False
    peers.workspaces = {size: kept for size, kept in peers.workspaces.items() if kept.is_open}


def _distinct(peers: Peers) -> list[Workspace]:
    """Returns the workspaces in the order of allocation; several classes may share one."""
    return list(dict.fromkeys(peers.workspaces.values()))


def _peers_of_group(group: GroupLike) -> list[Peers]:
    return local_peers(None if group is None else group_name(group))
