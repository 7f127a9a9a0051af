"""The group of ranks that carries out one op."""

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
"""Name of the group of one that needs no torch.distributed."""


@dataclass(frozen=True)
class Group:
    """A process group as the backends see it.

    Attributes:
        name: What torch.ops calls carry instead of the object; `LOCAL` for a world of one.
        rank: This process's rank within the group.
        size: Ranks of the group, P.
        calls: What is kept for calls that are alike (`overlap_gemm.dispatch.calls`).
        agreed: What the ranks found that they agree on (`runtime.agree`).
        progress: What became of the calls (`runtime.identity`).
        enter: Compares a transfer, given its name, with that of the other ranks before it begins
            (`runtime.agree.of_calls`); None: transfers are not compared.
    """

    name: str
    rank: int
    size: int
    _process_group: "weakref.ref[dist.ProcessGroup] | None" = field(default=None, repr=False)
    calls: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    agreed: set[Hashable] = field(default_factory=set, repr=False, compare=False)
    progress: Progress = field(default_factory=Progress, repr=False, compare=False)
    enter: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch.distributed's object; None for `LOCAL`, for virtual ranks, and when it has been destroyed.

        Not kept alive: a process group whose threads outlive `destroy_process_group` aborts the process.
        """
        return None if self._process_group is None else self._process_group()

    @property
    def is_virtual(self) -> bool:
        """Whether this is a rank of a `runtime.virtual.VirtualWorld`."""
        return self.name in _virtual

    def global_rank(self, rank: int) -> int:
        """The world rank of the group's `rank`, the number a user knows a process by."""
        return rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        """Fills `out` with the ranks' equally sized `own`, one after the other."""
        _all_gather_single(out, own, group=self.process_group)

    def all_gather_object(self, own: Any) -> list[Any]:
        """The ranks' `own`, in rank order; a group without processes (virtual ranks) has just this one."""
        if self.process_group is None:
            return [own]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.process_group)
        return everyone

    def timeout(self, device_type: str) -> timedelta | None:
        """How long the group's collectives on that type of device may take; None where nothing bounds them.

        The first backend's, if none is for that type: a group of gloo on a machine with GPUs.
        """
        if self.process_group is None:
            return None
        known = [device.type for device in self.process_group._device_types]
        backend = self.process_group._get_backend(
            torch.device(device_type if device_type in known else known[0])
        )
        options = getattr(backend, "options", None)  # not every backend has some
        timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
        return timeout

    @property
    def has_gloo(self) -> bool:
        """Whether gloo carries its tensors in host memory."""
        group = self.process_group
        return group is not None and group._get_backend(torch.device("cpu")).name() == "gloo"

    @property
    def device_types(self) -> set[str]:
        """The device types whose tensors the group can carry."""
        if self.process_group is None:
            return {"cpu", "cuda"}
        return {device.type for device in self.process_group._device_types}


LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Where launchers say how many processes they started."""

_virtual: dict[str, Group] = {}
_known: dict[str, Group] = {}
_found: dict[int, Group] = {}
"""By name, and by the process group's identity, which proves nothing but where to look."""

_is_alone = False

_inherited: list["weakref.ref[dist.ProcessGroup]"] = []
"""Process groups that were the parent's when this process was forked: their threads stayed there."""


def _after_fork() -> None:
    """In the child: what is known of groups is the parent's."""
    if dist.is_available() and dist.is_initialized():
        _inherited[:] = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
        _known.clear()
        _found.clear()


os.register_at_fork(after_in_child=_after_fork)


def is_forked(group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether a group, by default the world, is the parent's: its threads are not in this process."""
    if not _inherited:
        return False
    group = dist.group.WORLD if group is None else group
    return group is not None and any(inherited() is group for inherited in _inherited)


def forbid_forked(group: dist.ProcessGroup | None = None) -> None:
    """Raises where a group, by default the world, came by a fork; a collective on it would wait for ever.

    Raises:
        RuntimeError: It did.
    """
    if is_forked(group):
        raise RuntimeError(
            f"process {os.getpid()} was forked from one that had joined its peers: torch.distributed's "
            f"threads and connections stayed there. Start processes with multiprocessing's 'spawn' or "
            f"'forkserver', or fork before overlap_gemm.init() (init_process_group)"
        )


def add_virtual(group: Group) -> None:
    """Makes `group`, a rank of a `runtime.virtual.VirtualWorld`, known to `resolve`."""
    _virtual[group.name] = group


def remove_virtual(group: Group) -> None:
    """Takes back `add_virtual`."""
    del _virtual[group.name]


def group_name(group: GroupLike) -> str:
    """The name by which `resolve` finds `group` again.

    Args:
        group: A process group, its name, a 1-D device mesh, or None for the world (which is one rank if
            torch.distributed is not initialised).

    Raises:
        ValueError: The mesh has more than one dimension, or this rank is not in the group.
        TypeError: `group` is something else.
    """
    if group is None:
        return str(dist.distributed_c10d._get_default_group().group_name) if dist.is_initialized() else LOCAL
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh, got {group.ndim} dimensions {group.mesh_dim_names}: "
                f"pass one of them, as in mesh['tp']"
            )
        return str(group.get_group().group_name)
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group it was asked to communicate in")
    raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}")


def find(group: GroupLike) -> Group:
    """`resolve(group_name(group))`, in a third of the time where it has been found before."""
    if isinstance(group, str):
        return resolve(group)
    process_group = dist.GroupMember.WORLD if group is None else group
    if process_group is None and LOCAL in _known:
        return _known[LOCAL]
    known = _found.get(id(process_group))
    if known is not None and known._process_group is not None and known._process_group() is process_group:
        try:  # destroyed, it is no member of the world any more, whoever still has it
            if dist.distributed_c10d._resolve_process_group(known.name) is process_group:
                return known
        except RuntimeError:
            pass
    found = resolve(group_name(group))
    if found.process_group is process_group:
        _found[id(process_group)] = found
    elif isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"process group {found.name!r} has been destroyed; another one has its name now")
    return found


def resolve(name: str) -> Group:
    """The group called `name`. A pure host look-up: no communication.

    The same object as long as the group lasts; a new one for a new process group of the same name.

    Raises:
        RuntimeError: There is no such group, or several processes were started and none has joined them.
    """
    if name in _virtual:
        return _virtual[name]
    known = _known.get(name)
    if name == LOCAL:
        if known is None or dist.is_initialized():
            _check_alone()
        return known or _known.setdefault(LOCAL, Group(LOCAL, 0, 1))
    try:
        process_group = dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"there is no process group {name!r} in this process: it was never made, or it has been "
            f"destroyed (overlap_gemm.init() makes the world's)"
        ) from error
    if known is None or known.process_group is not process_group:
        forbid_forked(process_group)
        size = process_group.size()
        progress = Progress(is_shared=size > 1)
        known = Group(name, process_group.rank(), size, weakref.ref(process_group), progress=progress)
        _known[name] = known
    return known


def known_progress() -> dict[str, Progress]:
    """Returns by name what became of each group's calls."""
    return {name: group.progress for name, group in (*_known.items(), *_virtual.items())}


def forget_groups(alone: bool) -> None:
    """Begins anew with what is known of groups: the world has been joined, or left.

    Args:
        alone: Whether `init` found that this process is the whole world, whatever its environment says.
    """
    global _is_alone
    _known.clear()
    _found.clear()
    _is_alone = alone


def _check_alone() -> None:
    """Raises unless a world of one is meant: silently it would give wrong sums."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise RuntimeError(
                f"group {LOCAL!r} is a world of one, but torch.distributed has {dist.get_world_size()} "
                f"ranks: call overlap_gemm.init() (or init_process_group) before layers are built, and pass "
                f"group=None for the world"
            )
        return
    for variable in LAUNCHERS:
        count = os.environ.get(variable, "")
        if not _is_alone and count.isdecimal() and int(count) > 1:
            raise RuntimeError(
                f"{variable}={count} processes were started, but this one has joined no others: call "
                f"overlap_gemm.init() first (and nothing after finalize())"
            )


def _constant_to_compile(function: Callable[[str], int]) -> Callable[[str], int]:
    """`torch.compiler.assume_constant_result` without the second that it takes to import torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_to_compile
def group_size(name: str) -> int:
    """Ranks of the group called `name`."""
    return resolve(name).size


@_constant_to_compile
def group_rank(name: str) -> int:
    """This process's rank in the group called `name`."""
    return resolve(name).rank
