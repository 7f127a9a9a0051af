"""Groups: the ranks that make an op's calls together, and their lookup by process group, mesh or name."""

import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from .identity import Progress

# The name since torch 2.13, where the older one warns.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | str | None"

LOCAL = ""
"""Name of the group of one rank that needs no torch.distributed."""


@dataclass(frozen=True)
class Group:
    """A process group as the backends use it.

    Attributes:
        name: Name that torch.ops calls pass in place of the object; `LOCAL` for a world of one.
        rank: Rank of this process within the group.
        size: Number of ranks P.
        calls: Prepared data of calls, by call signature (`overlap_gemm.dispatch.calls`).
        agreed: Facts on which the ranks have agreed (`runtime.agree`).
        progress: Counters of the group's calls (`runtime.identity`).
        enter: Function that compares a transfer, by its name, with that of the other ranks before it begins
            (`runtime.agree.of_calls`); None: transfers are not compared.
        signed: Options of a call that all ranks have, as text, which are part of the signature of its
            fused kernels (`runtime.identity`).
    """

    name: str
    rank: int
    size: int
    _process_group: "weakref.ref[dist.ProcessGroup] | None" = field(default=None, repr=False)
    calls: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    agreed: set[Hashable] = field(default_factory=set, repr=False, compare=False)
    progress: Progress = field(default_factory=Progress, repr=False, compare=False)
    enter: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    signed: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes the group one thread's if it has peers."""
        self.progress.is_shared = self.size > 1

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Returns torch.distributed's object; None for `LOCAL`, virtual ranks and destroyed groups.

        The reference is weak: a process group whose threads outlive `destroy_process_group` aborts the
        process.
        """
        return None if self._process_group is None else self._process_group()

    @property
    def is_destroyed(self) -> bool:
        """Returns whether the process group was destroyed, also if a reference to it remains."""
        groups = dist.distributed_c10d._world.pg_map
        return self._process_group is not None and self.process_group not in groups

    @property
    def is_virtual(self) -> bool:
        """Returns whether this is a rank of a `runtime.virtual.VirtualWorld`."""
        return self.name in _virtual

    def global_rank(self, rank: int) -> int:
        """Returns the world rank of the group's `rank`, by which users identify a process."""
        return rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)

    def all_gather(self, out: Tensor, local: Tensor) -> None:
        """Fills `out` with the ranks' equally sized `local` tensors, in rank order."""
        _all_gather_single(out, local, group=self.process_group)

    def all_gather_object(self, local: Any) -> list[Any]:
        """Returns the ranks' `local` objects in rank order; for virtual ranks and `LOCAL`, `[local]`."""
        if self.process_group is None:
            return [local]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, local, group=self.process_group)
        return everyone

    def timeout(self, device_type: str) -> timedelta | None:
        """Returns the timeout of the group's collectives on a type of device; None: there is none.

        If no backend supports that type, it is the first backend's: a group of gloo on a machine with GPUs.
        """
        if self.process_group is None:
            return None
        known = [device.type for device in self.process_group._device_types]
        backend = self.process_group._get_backend(
            torch.device(device_type if device_type in known else known[0])
        )
        options = getattr(backend, "options", None)  # not every backend has options
        timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
        return timeout

    @property
    def has_gloo(self) -> bool:
        """Returns whether gloo communicates tensors in host memory."""
        group = self.process_group
        return group is not None and group._get_backend(torch.device("cpu")).name() == "gloo"

    @property
    def device_types(self) -> set[str]:
        """Returns the device types whose tensors the group can communicate."""
        if self.process_group is None:
            return {"cpu", "cuda"}
        return {device.type for device in self.process_group._device_types}


LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Environment variables in which launchers store the number of processes."""

_virtual: dict[str, Group] = {}
_groups: dict[str, Group] = {}
_groups_by_id: dict[int, Group] = {}
"""Groups by `id` of the process group. An id may be reused, so `find` verifies the object."""

_is_single_process = False

_inherited: list["weakref.ref[dist.ProcessGroup]"] = []
"""Process groups of the parent when this process was forked; their threads run in the parent only."""


def _after_fork() -> None:
    """Clears the known groups in a forked child: they are the parent's."""
    if dist.is_available() and dist.is_initialized():
        _inherited[:] = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
        _groups.clear()
        _groups_by_id.clear()


os.register_at_fork(after_in_child=_after_fork)


def is_forked(group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether a group, by default the world, is the parent's; its threads are not in this process."""
    if not _inherited:
        return False
    group = dist.group.WORLD if group is None else group
    return group is not None and any(inherited() is group for inherited in _inherited)


def forbid_forked(group: dist.ProcessGroup | None = None) -> None:
    """Raises if a group, by default the world, was inherited by a fork: a collective on it would never end.

    Raises:
        RuntimeError: The group was inherited.
    """
    if is_forked(group):
        raise RuntimeError(
            f"process {os.getpid()} was forked from one that had joined its peers: it lacks "
            f"torch.distributed's threads and connections. Start processes with multiprocessing's 'spawn' "
            f"or 'forkserver', or fork before overlap_gemm.init() (init_process_group)"
        )


def add_virtual(group: Group) -> None:
    """Registers `group`, a rank of a `runtime.virtual.VirtualWorld`, for `resolve`."""
    _virtual[group.name] = group


def remove_virtual(group: Group) -> None:
    """Reverts `add_virtual`."""
    del _virtual[group.name]


def group_name(group: GroupLike) -> str:
    """Returns the name by which `resolve` finds `group`.

    Args:
        group: Process group, its name, 1-D device mesh, or None for the world (one rank if torch.distributed
            is not initialised).

    Raises:
        ValueError: The mesh has more than one dimension, or this rank is not in the group.
        TypeError: `group` has another type.
    """
    if group is None:
        return str(dist.distributed_c10d._get_default_group().group_name) if dist.is_initialized() else LOCAL
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh, got {group.ndim} dimensions {group.mesh_dim_names}: "
                f"pass one of them, such as mesh['tp']"
            )
        return str(group.get_group().group_name)
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not a member of it; call the op on member ranks only")
    raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}")


def find(group: GroupLike) -> Group:
    """Returns `resolve(group_name(group))`, in a third of the time if the group is known."""
    if isinstance(group, str):
        return resolve(group)
    process_group = dist.GroupMember.WORLD if group is None else group
    if process_group is None and LOCAL in _groups:
        return _groups[LOCAL]
    known = _groups_by_id.get(id(process_group))
    if known is not None and known._process_group is not None and known._process_group() is process_group:
        try:  # a destroyed group is no longer in torch's table, even if a reference remains
            if dist.distributed_c10d._resolve_process_group(known.name) is process_group:
                return known
        except RuntimeError:
            pass
    resolved = resolve(group_name(group))
    if resolved.process_group is process_group:
        _groups_by_id[id(process_group)] = resolved
    elif isinstance(group, dist.ProcessGroup):
        raise RuntimeError(
            f"process group {resolved.name!r} has been destroyed, and another one has its name now"
        )
    return resolved


def resolve(name: str) -> Group:
    """Returns the group called `name`, without communication.

    It is the same object as long as the group exists; a new process group of the same name has a new one.

    Raises:
        RuntimeError: There is no such group, or several processes were started and this one has not joined
            the others.
    """
    if name in _virtual:
        return _virtual[name]
    known = _groups.get(name)
    if name == LOCAL:
        if known is None or dist.is_initialized():
            _check_single_process()
        return known or _groups.setdefault(LOCAL, Group(LOCAL, 0, 1))
    try:
        process_group = dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"there is no process group {name!r} in this process: it was not created, or was destroyed "
            f"(overlap_gemm.init() creates the world's)"
        ) from error
    if known is None or known.process_group is not process_group:
        forbid_forked(process_group)
        _remove_destroyed()
        known = Group(name, process_group.rank(), process_group.size(), weakref.ref(process_group))
        _groups[name] = known
        _groups.pop(LOCAL, None)  # a later call without a group is checked again (`_check_single_process`)
    return known


def _remove_destroyed() -> None:
    """Removes destroyed groups and their prepared calls, which stay until the next group."""
    tables: list[dict[Any, Group]] = [_groups, _groups_by_id]
    for groups in tables:
        for key, group in list(groups.items()):
            if group.is_destroyed:
                groups.pop(key, None)


def known_progress() -> dict[str, Progress]:
    """Returns the counters of each group's calls, by group name."""
    return {name: group.progress for name, group in (*_groups.items(), *_virtual.items())}


def clear_groups(single_process: bool) -> None:
    """Clears the known groups when the world is joined or left.

    Args:
        single_process: True if `init` determined that this process is the full world. The variables of
            `LAUNCHERS` are then not checked.
    """
    global _is_single_process
    _groups.clear()
    _groups_by_id.clear()
    _is_single_process = single_process


def _check_single_process() -> None:
    """Raises unless a world of one is intended; otherwise sums would be wrong without an error."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise RuntimeError(
                f"group {LOCAL!r} is a world of one, but torch.distributed has {dist.get_world_size()} "
                f"ranks: call overlap_gemm.init() (or init_process_group) before building layers, and pass "
                f"group=None for the world"
            )
        return
    if lost := next((group for group in _groups.values() if group.size > 1), None):
        raise RuntimeError(
            f"the process group {lost.name!r} of {lost.size} ranks has been destroyed before finalize(): "
            f"call overlap_gemm.finalize(), then init() or init_process_group"
        )
    for variable in LAUNCHERS:
        count = os.environ.get(variable, "")
        if not _is_single_process and count.isdecimal() and int(count) > 1:
            raise RuntimeError(
                f"{variable}={count} processes were started, but this one has not joined the others: call "
                f"overlap_gemm.init() first, and no ops after finalize()"
            )


def _constant_to_compile(function: Callable[[str], int]) -> Callable[[str], int]:
    """Marks a function like `torch.compiler.assume_constant_result`, which takes a second to import."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_to_compile
def group_size(name: str) -> int:
    """Returns the number of ranks of the group called `name`."""
    return resolve(name).size


@_constant_to_compile
def group_rank(name: str) -> int:
    """Returns this process's rank in the group called `name`."""
    return resolve(name).rank
