"""Workspaces: the memory that fused kernels exchange tiles through, and the reports of expired waits.

A workspace belongs to a group and to a size class (powers of two), is allocated at the first call that needs
it, and serves every later call of that class: calls never allocate. It begins with ``zeroed`` bytes that are
zero at birth (control words and flags) and are never reset. Where things lie in it is the kernels' business
(`kernels.geometry`); that its layout depends on the class alone, never on a call's shape, is this module's.

Whose memory it is (`OVERLAP_GEMM_SYMMETRIC`) and whether loads and stores reach every peer's block are two
facts. The second is found out when it is made, and agreed by all ranks; NVSHMEM's memory serves both cases.

One stream at a time: a call on another stream than the last one waits for that one's work.

`close_workspaces` is collective and explicit. The garbage collector frees nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..device.failure import RECORD_WORDS, Failure, read_record
from .executor import Executor
from .group import Group, GroupLike, group_name
from .symmetric import NvshmemSymmetric, SymmetricMemory, TorchSymmetric, agree
from .virtual import virtual_world

DEFAULT_LIMIT = 8 << 30
"""Bytes all workspaces of a process may take together; ``OVERLAP_GEMM_WORKSPACE_LIMIT`` overrides."""

DEFAULT_TIMEOUT = 30.0
"""Seconds a kernel waits for a peer, unless ``OVERLAP_GEMM_TIMEOUT`` says otherwise; 0 waits for ever."""


class CommTimeoutError(RuntimeError):
    """A kernel gave up waiting for a peer. The CUDA context of the process is unusable afterwards.

    Attributes:
        failure: the record the waiting lane left.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(
            f"{failure.op.name.lower()}: rank {failure.rank} ({failure.role.name.lower()}) gave up on "
            f"rank {failure.source}: tile {failure.tile}, flag {failure.flag}, "
            f"expected epoch {failure.expected}, seen {failure.seen}. "
            f"Rank {failure.source} is dead, stalled, or did not make the same calls."
        )


def timeout_ns() -> int:
    """How long a kernel waits for a peer, in nanoseconds; 0 for ever.

    Raises:
        ValueError: ``OVERLAP_GEMM_TIMEOUT`` is not a number of seconds.
    """
    text = os.environ.get("OVERLAP_GEMM_TIMEOUT", str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 2**32:
        raise ValueError(f"OVERLAP_GEMM_TIMEOUT must be a number of seconds, 0 for no limit; got {text!r}")
    return int(seconds * 1e9)


@dataclass(frozen=True)
class SizeClass:
    """What workspaces are told apart by; equal on all ranks, since it comes from the shape of a call.

    Attributes:
        zeroed: leading bytes that are zero at birth.
        buffer: bytes of each buffer behind them.
        buffers: how many.
        staging_buffers: how many more, where some peer is beyond reach.
    """

    zeroed: int
    buffer: int
    buffers: int
    staging_buffers: int

    def nbytes(self, reaches_all: bool) -> int:
        """Size of each rank's block."""
        return self.zeroed + (self.buffers + (0 if reaches_all else self.staging_buffers)) * self.buffer


@dataclass
class Workspace:
    """One group's block, and this rank's failure record for kernels that use it.

    Attributes:
        group: who shares it.
        size: its class.
        memory: the block on every rank.
        reaches_all: whether loads and stores of every rank reach the block of every other.
        record: int32 ``[RECORD_WORDS]`` in host memory; see `device.failure`.
    """

    group: Group
    size: SizeClass
    memory: SymmetricMemory
    reaches_all: bool
    record: torch.Tensor
    _stream: torch.cuda.Stream | None = field(default=None, repr=False)

    def order_after_last_use(self, device: torch.device) -> None:
        """Makes torch's current stream wait for the last call, if that was on another stream.

        Not during CUDA graph capture: torch begins one with a synchronised device, and a graph cannot depend
        on work outside of it. A replay is ordered by the stream it is started on, which is not seen here.
        """
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    def raise_if_failed(self) -> None:
        """Raises CommTimeoutError if a kernel has left a record; reads host memory only."""
        if self.record[0].item():
            failure = read_record([word & 0xFFFFFFFF for word in self.record.tolist()])
            assert failure is not None
            raise CommTimeoutError(failure)


_pool: dict[tuple[str, SizeClass], Workspace] = {}


def obtain(group: Group, size: SizeClass, executor: Executor) -> Workspace:
    """The group's workspace of a class; allocated, collectively, at its first use.

    Args:
        group: the ranks; all of them make the same sequence of calls.
        size: the class.
        executor: where this rank's kernels run.

    Raises:
        SymmetricMemoryError: on every rank, if one of them could not allocate or would pass its limit.
    """
    key = (group.name, size)
    if key not in _pool:
        _pool[key] = _make(group, size, executor)
    return _pool[key]


def _provider() -> type[TorchSymmetric] | type[NvshmemSymmetric]:
    """Whose memory workspaces of processes are, by ``OVERLAP_GEMM_SYMMETRIC``, the same on all ranks.

    Raises:
        ValueError: the variable names no provider.
    """
    name = os.environ.get("OVERLAP_GEMM_SYMMETRIC", "torch")
    if name not in ("torch", "nvshmem"):
        raise ValueError(f"OVERLAP_GEMM_SYMMETRIC must be torch or nvshmem, got {name!r}")
    return NvshmemSymmetric if name == "nvshmem" else TorchSymmetric


def _check_limit(nbytes: int) -> bool:
    limit = int(os.environ.get("OVERLAP_GEMM_WORKSPACE_LIMIT", DEFAULT_LIMIT))
    if workspace_bytes() + nbytes > limit:
        raise ValueError(
            f"workspaces hold {workspace_bytes()} bytes and {nbytes} more are needed; the limit is {limit} "
            f"(OVERLAP_GEMM_WORKSPACE_LIMIT): close_workspaces() of groups no longer in use, or raise it"
        )
    return True


def _make(group: Group, size: SizeClass, executor: Executor) -> Workspace:
    """Finds out who reaches whom, and allocates accordingly."""
    world, device = virtual_world(group), executor.device
    reaches_all = _provider().reaches_all(group, device) if world is None else not world.beyond_reach
    nbytes = size.nbytes(reaches_all)
    agree(group, lambda: _check_limit(nbytes), "reserving a workspace")
    memory: SymmetricMemory
    if world is not None:
        memory = world.symmetric(size, group.rank, nbytes, size.zeroed)
    else:
        memory = _provider()(group, nbytes, device)
        memory.local[: size.zeroed].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group.process_group)  # no peer's flag may arrive before the zeros
    return Workspace(group, size, memory, reaches_all, executor.host_words(RECORD_WORDS))


def workspace_bytes(group: GroupLike = None) -> int:
    """Bytes of this rank's device memory that the fused kernels' workspaces hold.

    Args:
        group: As for an op; None for all groups of this process.
    """
    return sum(workspace.memory.local.numel() for _, workspace in _of(group))


def raise_if_failed() -> None:
    """Raises CommTimeoutError if a wait of any kernel of this process has expired."""
    for workspace in _pool.values():
        workspace.raise_if_failed()


def close_workspaces(group: GroupLike = None) -> None:
    """Frees the fused kernels' workspaces; a later call makes new ones. `finalize` closes all that are left.

    Collective: every rank of the group calls it, after the same sequence of ops. Waits for the device.
        Nothing else frees a workspace, the garbage collector least of all.

    Args:
        group: As for an op; None for all groups of this process.
    """
    for key, workspace in _of(group):
        workspace.memory.close()
        del _pool[key]


def _of(group: GroupLike) -> list[tuple[tuple[str, SizeClass], Workspace]]:
    name = None if group is None else group_name(group)
    return [(key, workspace) for key, workspace in _pool.items() if name in (None, key[0])]
