"""Virtual ranks' memory and devices, and which groups are theirs; `virtual` has the world of a user."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..executor import Executor
from ..group import Group, add_virtual, remove_virtual

if TYPE_CHECKING:
    from cute_emulator import Emulator

_ranks: dict[str, VirtualRanks] = {}


@dataclass
class VirtualSymmetric:
    """One rank's view of a block that every virtual rank has (`symmetric.SymmetricMemory`)."""

    local: Tensor
    bases: Tensor
    by_put: Tensor | None
    is_open: bool = True

    def close(self) -> None:
        """Drops this rank's view; the memory goes with the last one."""
        del self.local, self.bases, self.by_put
        self.is_open = False


class VirtualRanks:
    """Ranks of a group in this process: their executors and their symmetric memory.

    Args:
        names: Name of each rank's group.
        executors: Executor of each rank.
        emulator: Open emulator that they run in; None: they share a CUDA device.
        beyond_reach: No rank has addresses of a peer's memory.

    Attributes:
        ranks: a `Group` per rank.
        names: their names, to be passed as ``group=`` of an op.
    """

    def __init__(
        self,
        names: Sequence[str],
        executors: Sequence[Executor],
        emulator: Emulator | None,
        beyond_reach: bool = False,
    ) -> None:
        self.names, self._executors = tuple(names), tuple(executors)
        self._emulator, self.beyond_reach = emulator, beyond_reach
        self.ranks = tuple(Group(name, rank, len(self.names)) for rank, name in enumerate(self.names))
        self._blocks: dict[Hashable, list[VirtualSymmetric]] = {}
        for group in self.ranks:
            add_virtual(group)
            _ranks[group.name] = self

    def executor(self, rank: int) -> Executor:
        """Where ``rank``'s kernels run."""
        return self._executors[rank]

    def symmetric(
        self, key: Hashable, rank: int, nbytes: int, prepare: Callable[[Tensor], None]
    ) -> VirtualSymmetric:
        """``rank``'s view of the block called ``key``, allocated on all ranks when the first one asks.

        Every rank's block is prepared then, since from then on the first one's kernels may store into it.
        """
        if key not in self._blocks or not self._blocks[key][rank].is_open:
            self._blocks[key] = self._allocate(nbytes)
            for block in self._blocks[key]:
                prepare(block.local)
        view = self._blocks[key][rank]
        assert view.local.numel() == nbytes, (
            f"{key} has {view.local.numel()} bytes, rank {rank} wants {nbytes}"
        )
        return view

    def _allocate(self, nbytes: int) -> list[VirtualSymmetric]:
        size = len(self.ranks)
        if self._emulator is not None:
            blocks = list(self._emulator.symmetric((nbytes,), torch.uint8).tensors)
        else:
            device = self._executors[0].device
            blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(size)]
        views = []
        for rank, block in enumerate(blocks):
            near = torch.tensor([b.data_ptr() for b in blocks], dtype=torch.int64, device=block.device)
            by_put = -1 - torch.arange(size, dtype=torch.int64, device=block.device)
            by_put[rank] = near[rank]
            bases = by_put if self.beyond_reach else near
            views.append(VirtualSymmetric(block, bases, by_put if self.has_nvshmem else None))
        return views

    @property
    def has_nvshmem(self) -> bool:
        """Whether the ranks' memory is NVSHMEM's, too: emulated."""
        return self._emulator is not None

    def close(self) -> None:
        """Removes the groups and drops the memory. Closing twice does nothing more."""
        for group in self.ranks:
            if _ranks.pop(group.name, None) is not None:
                remove_virtual(group)
        self._blocks.clear()


def virtual_ranks(group: Group) -> VirtualRanks | None:
    """The ranks that a virtual group belongs to, None for other groups."""
    return _ranks.get(group.name)
