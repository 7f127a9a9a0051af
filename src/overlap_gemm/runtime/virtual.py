"""Virtual ranks: P ranks of a group in one process, on one GPU or in the emulator.

This is how the whole fused path, from the public op to the flags between ranks, runs where there is one GPU
or none:

    with Emulator(arch="sm_100a", ranks=4) as emulator, VirtualWorld(4, emulator=emulator) as world:
        outs = [gemm_reduce_scatter(x[r], w[r], group=world.names[r], backend="fused") for r in range(4)]
        world.synchronize()

A call queues its rank's kernel and returns at once, as on a CUDA stream; outputs are there after
`synchronize`. On a GPU each rank has a stream, and the SMs are divided among the ranks, because kernels that
wait for each other must be resident together. More than 7 ranks want ``CUDA_DEVICE_MAX_CONNECTIONS`` above
its default of 8, set before CUDA starts: streams that share a hardware queue wait for each other. What else
a call launches (it copies operands that TMA cannot read) must have run before: CUDA loads a kernel at its
first launch, and may wait for the device to do so, where another rank's kernel waits for this one. What one
GPU cannot show: ordering and visibility across NVLink (everything meets in one L2 cache).
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
    """P ranks in this process.

    Args:
        size: P, at least 1.
        emulator: an open emulator with ``ranks=size``; or
        device: a CUDA device that the ranks share.
        beyond_reach: no rank reaches a peer by loads and stores; NVSHMEM puts carry the tiles. For an
            emulator opened with ``network=True``.

    Raises:
        ValueError: neither or both of emulator and device, an emulator that is not open, or a size that does
            not fit.
    """

    def __init__(
        self,
        size: int,
        *,
        emulator: Emulator | None = None,
        device: torch.device | None = None,
        beyond_reach: bool = False,
    ) -> None:
        if (emulator is None) == (device is None):
            raise ValueError("a virtual world lives in an emulator or on a CUDA device: pass one of the two")
        if size < 1:
            raise ValueError(f"size={size} must be at least 1")
        if emulator is not None and emulator.ranks != size:
            raise ValueError(
                f"{size} virtual ranks need an emulator of as many; it has ranks={emulator.ranks}"
            )
        if beyond_reach and emulator is None:
            raise ValueError("only an emulator can put peers beyond the reach of loads and stores")
        number = next(_numbers)
        names = [f"virtual-{number}-{rank}-of-{size}" for rank in range(size)]
        super().__init__(names, _executors(size, emulator, device), emulator, beyond_reach)

    def synchronize(self) -> None:
        """Runs or awaits everything the ranks have queued.

        Raises:
            CommTimeoutError: a wait in a kernel expired.
            EmulatorError: the emulator found something.
        """
        try:
            if self._emulator is not None:
                self._emulator.run()
            else:
                torch.cuda.synchronize(self._executors[0].device)
        finally:
            raise_if_failed()

    def close(self) -> None:
        """Forgets the ranks; their groups are unknown afterwards. Closing twice does nothing more."""
        for group in self.ranks:
            if virtual_ranks(group) is self:
                close_workspaces(group.name)
        super().close()

    def __enter__(self) -> VirtualWorld:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _executors(size: int, emulator: Emulator | None, device: torch.device | None) -> tuple[Executor, ...]:
    if emulator is not None:
        emulation = executors.emulation
        if emulation is None or emulation.emulator is not emulator:
            raise ValueError("a virtual world lives in an emulator that is open, within its `with` block")
        return tuple(map(emulation.executor, range(size)))
    assert device is not None
    whole = cuda_executor(device.index or 0)
    if whole.num_sms < size:
        raise ValueError(f"{size} virtual ranks need as many SMs; {whole.device} has {whole.num_sms}")
    share = replace(whole, num_sms=whole.num_sms // size, shares=size)
    return tuple(
        replace(
            share,
            stream=torch.cuda.Stream(whole.device),
            order=cuda_order(whole.device),
            record=cuda_record(),
        )
        for _ in range(size)
    )
