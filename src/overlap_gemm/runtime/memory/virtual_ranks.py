"""Memory, devices and groups of virtual ranks; `runtime.virtual` has the class for users."""

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
        """Drops this rank's view; the memory is freed with the last view."""
        del self.local, self.bases, self.by_put
        self.is_open = False


class VirtualRanks:
    """Ranks of a group in this process, with executors and symmetric memory.

    Args:
        names: Name of each rank's group.
        executors: Executor of each rank.
        emulator: Open emulator of the ranks; None: they share a CUDA device.
        without_p2p: True: no rank has P2P access to a peer's memory.

    Attributes:
        ranks: `Group` of each rank.
        names: Names of the groups, to be passed as ``group=`` to an op.
    """

    def __init__(
        self,
        names: Sequence[str],
        executors: Sequence[Executor],
        emulator: Emulator | None,
        without_p2p: bool = False,
    ) -> None:
        self.names, self._executors = tuple(names), tuple(executors)
        self._emulator, self.without_p2p = emulator, without_p2p
        self.ranks = tuple(Group(name, rank, len(self.names)) for rank, name in enumerate(self.names))
        self._blocks: dict[Hashable, list[VirtualSymmetric]] = {}
        for group in self.ranks:
            add_virtual(group)
            _ranks[group.name] = self

    def executor(self, rank: int) -> Executor:
        """Returns the executor of ``rank``."""
        return self._executors[rank]

    def symmetric(
        self, key: Hashable, rank: int, nbytes: int, prepare: Callable[[Tensor], None]
    ) -> VirtualSymmetric:
        """Returns ``rank``'s view of the block called ``key``; the first request allocates it on all ranks.

        Every rank's block is prepared then, since the first rank's kernels may store into it at once.
        """
        if key not in self._blocks or not self._blocks[key][rank].is_open:
            self._blocks[key] = self._allocate(nbytes)
            for block in self._blocks[key]:
                prepare(block.local)
        view = self._blocks[key][rank]
        assert view.local.numel() == nbytes, (
            f"{key} has {view.local.numel()} bytes, rank {rank} needs {nbytes}"
        )
        return view

    def _allocate(self, nbytes: int) -> list[VirtualSymmetric]:
        """Returns a block for each rank, with the table of addresses that the rank reads."""
        size = len(self.ranks)
        if self._emulator is not None:
            blocks = list(self._emulator.symmetric((nbytes,), torch.uint8).tensors)
        else:
            device = self._executors[0].device
            blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(size)]
        views = []
        for rank, block in enumerate(blocks):
            addresses = torch.tensor([b.data_ptr() for b in blocks], dtype=torch.int64, device=block.device)
            by_put = -1 - torch.arange(size, dtype=torch.int64, device=block.device)
            by_put[rank] = addresses[rank]
            bases = by_put if self.without_p2p else addresses
            views.append(VirtualSymmetric(block, bases, by_put if self.has_nvshmem else None))
        return views

    @property
    def has_nvshmem(self) -> bool:
        """Returns whether the memory is also (emulated) NVSHMEM memory."""
        return self._emulator is not None

    def close(self) -> None:
        """Removes the groups and drops the memory. A second call does nothing."""
        for group in self.ranks:
            if _ranks.pop(group.name, None) is not None:
                remove_virtual(group)
        self._blocks.clear()


def virtual_ranks(group: Group) -> VirtualRanks | None:
    """Returns the ranks to which a virtual group belongs, or None for other groups."""
    return _ranks.get(group.name)
