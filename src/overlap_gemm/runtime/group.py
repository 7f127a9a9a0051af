"""The group of ranks that carries out one op."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
        process_group: torch.distributed's object, None for `LOCAL` and for virtual ranks.
    """

    name: str
    rank: int
    size: int
    process_group: dist.ProcessGroup | None

    @property
    def is_virtual(self) -> bool:
        """Whether this is a rank of a `runtime.virtual.VirtualWorld`."""
        return self.name in _virtual

    def global_rank(self, rank: int) -> int:
        """The world rank of the group's `rank`, the number a user knows a process by."""
        return rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        """Fills `out` with the ranks' equally sized `own`, one behind the other."""
        _all_gather_single(out, own, group=self.process_group)

    def all_gather_object(self, own: Any) -> list[Any]:
        """The ranks' `own`, in rank order; a group without processes (virtual ranks) has just this one."""
        if self.process_group is None:
            return [own]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.process_group)
        return everyone

    @property
    def device_types(self) -> set[str]:
        """The device types whose tensors the group can carry."""
        if self.process_group is None:
            return {"cpu", "cuda"}
        return {device.type for device in self.process_group._device_types}


_virtual: dict[str, Group] = {}


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
        return dist.distributed_c10d._get_default_group().group_name if dist.is_initialized() else LOCAL
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh, got {group.ndim} dimensions {group.mesh_dim_names}: "
                f"pass one of them, as in mesh['tp']"
            )
        return group.get_group().group_name
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group it was asked to communicate in")
    raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}")


def resolve(name: str) -> Group:
    """The group called `name`. A pure host look-up: no communication."""
    if name == LOCAL:
        return Group(LOCAL, 0, 1, None)
    if name in _virtual:
        return _virtual[name]
    process_group = dist.distributed_c10d._resolve_process_group(name)
    return Group(name, process_group.rank(), process_group.size(), process_group)


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
