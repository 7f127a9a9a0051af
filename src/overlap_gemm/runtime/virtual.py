"""Virtual ranks: P ranks of a group in one process, on one GPU or in the emulator.

They run the complete fused path, from the public op to the flags between ranks, with one GPU or none:

    with Emulator(arch="sm_100a", ranks=4) as emulator, VirtualWorld(4, emulator=emulator) as world:
        outs = [gemm_reduce_scatter(x[r], w[r], group=world.names[r], backend="fused") for r in range(4)]
        world.synchronize()

A call queues its rank's kernel and returns at once, as on a CUDA stream; outputs are complete after
`synchronize`. On a GPU each rank has a stream and an equal share of the SMs, because kernels that wait for
each other must be co-resident. Conditions on a GPU:

- More than 7 ranks need ``CUDA_DEVICE_MAX_CONNECTIONS`` above its default of 8, set before CUDA starts.
  Otherwise streams share a hardware queue and wait for each other.
- Other kernels of a call (copies of operands that TMA cannot read) must have run once before. CUDA loads a
  kernel at its first launch and may wait for the device, on which another rank's kernel waits for this rank.
- One GPU cannot test ordering and visibility across NVLink, because all ranks share one L2 cache.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import executor as executors
from .executor import Executor, cuda_executor, cuda_order, cuda_record
from .memory.virtual_ranks import VirtualRanks, virtual_ranks
from .memory.workspace import close_workspaces, raise_if_failed

if TYPE_CHECKING:
    from cute_emulator import Emulator

_numbers = itertools.count()


class VirtualWorld(VirtualRanks):
    """P ranks of a group in this process. Pass either `emulator` or `device`.

    Args:
        size: Number of ranks P, at least 1.
        emulator: Open emulator with ``ranks=size``.
        device: CUDA device that the ranks share.
        without_p2p: True: no rank has P2P access to a peer, and NVSHMEM puts send the tiles. The emulator
            must be opened with ``network=True``.

    Raises:
        ValueError: Both or none of emulator and device were passed, the emulator is not open, or the size
            does not fit.
    """

    def __init__(
        self,
        size: int,
        *,
        emulator: Emulator | None = None,
        device: torch.device | None = None,
        without_p2p: bool = False,
    ) -> None:
        if (emulator is None) == (device is None):
            raise ValueError("VirtualWorld: pass either emulator= or device=, got both or none")
        if size < 1:
            raise ValueError(f"VirtualWorld: size must be at least 1, got {size}")
        if emulator is not None and emulator.ranks != size:
            raise ValueError(f"VirtualWorld: the emulator must have ranks={size}, got ranks={emulator.ranks}")
        if without_p2p and emulator is None:
            raise ValueError("VirtualWorld: without_p2p=True needs an emulator, got a CUDA device")
        number = next(_numbers)
        names = [f"virtual-{number}-{rank}-of-{size}" for rank in range(size)]
        super().__init__(names, _executors(size, emulator, device), emulator, without_p2p)

    def synchronize(self) -> None:
        """Runs or awaits all queued work of the ranks.

        Raises:
            CommTimeoutError: A wait in a kernel expired.
            EmulatorError: The emulator detected an error.
        """
        try:
            if self._emulator is not None:
                self._emulator.run()
            else:
                torch.cuda.synchronize(self._executors[0].device)
        finally:
            raise_if_failed()

    def close(self) -> None:
        """Removes the ranks and their groups. A second call does nothing."""
        for group in self.ranks:
            if virtual_ranks(group) is self:
                close_workspaces(group.name)
        super().close()

    def __enter__(self) -> VirtualWorld:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _executors(size: int, emulator: Emulator | None, device: torch.device | None) -> tuple[Executor, ...]:
    """Returns an executor for each rank: the emulator's, or equal shares of a GPU's SMs."""
    if emulator is not None:
        emulation = executors.emulation
        if emulation is None or emulation.emulator is not emulator:
            raise ValueError("VirtualWorld: the emulator must be open; use it within its `with` block")
        return tuple(map(emulation.executor, range(size)))
    assert device is not None
    full_device = cuda_executor(device.index or 0)
    if full_device.num_sms < size:
        raise ValueError(
            f"VirtualWorld: size must be at most {full_device.num_sms}, the number of SMs of "
            f"{full_device.device}, got {size}"
        )
    share = replace(full_device, num_sms=full_device.num_sms // size, shares=size)
    return tuple(
        replace(
            share,
            stream=torch.cuda.Stream(full_device.device),
            order=cuda_order(full_device.device),
            record=cuda_record(),
        )
        for _ in range(size)
    )
