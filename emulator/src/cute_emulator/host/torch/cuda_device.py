"""The CUDA that a script sees, and what its parts ask of the emulator.

Work is ordered as CUDA orders it, or more strictly: launches of one stream run in order, streams wait for
each other and for events, torch's own operations wait for all launches. Times are the emulation's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cute_emulator.host.device import L2_BYTES
from cute_emulator.host.torch import cuda_bindings, dsl_benchmarks, generic_torch, library_ops, torch_cuda
from cute_emulator.host.torch.device_memory import DeviceMemory, Range
from cute_emulator.machine.streams import StreamEvent

if TYPE_CHECKING:
    from cute_emulator.host.emulator import Emulator
    from cute_emulator.host.timeline import Timeline
    from cute_emulator.host.torch.torch_streams import Streams


class CudaDevices:
    """What torch.cuda and its kin ask of the emulator.

    Args:
        emulator: Open.
        current: Index of the calling thread's device.
        synchronize: Waits until the calling rank's launches have run.
    """

    def __init__(
        self, emulator: Emulator, current: Callable[[], int], synchronize: Callable[[], None]
    ) -> None:
        self.emulator = emulator
        self.captures = emulator.captures
        self.properties = emulator.device
        self.count = emulator.ranks
        self.current = current
        self.synchronize = synchronize
        self.handles = itertools.count(0x10)
        self.streams: Streams
        self.memory = DeviceMemory(
            lambda storage: emulator.adopt(storage, current(), pooled=False),
            self.in_order,
            self.host_waits,
            self.copy_beside,
            self.touched,
        )

    def open_timelines(self) -> None:
        """The host of each rank is a party from now on."""
        for rank in range(self.count):
            self.emulator.timelines.open(rank, lambda: int(self.streams.current.cuda_stream))

    def timeline(self) -> Timeline | None:
        """The calling rank's."""
        return self.emulator.timelines.get(self.current())

    def host_waits(self, stream: int | None = None, event: StreamEvent | None = None) -> None:
        """The host waits for an event, a stream, or the whole device of the calling rank.

        All its launches run, whatever it waits for; what it waits for is what it may then rely on.
        """
        self.synchronize()
        timeline = self.timeline()
        if timeline is not None:
            timeline.host_waits(stream, None if event is None else event.before[1] if event.before else {})

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """`torch.Tensor.record_stream`."""
        timeline = self.timeline()
        if timeline is not None:
            timeline.recorded(tensor.untyped_storage().data_ptr(), stream.cuda_stream)

    def instructions(self) -> int:
        """Warp instructions executed so far: what benchmarks measure."""
        return self.emulator.report.instructions

    def do(self, operation: Callable[[], object]) -> None:
        """Carries an operation out, in a capture at each replay."""
        capture = self.captures.get(self.current())
        if capture is not None:
            capture.keep(operation)
        else:
            operation()

    def in_order(self, operation: Callable[[], object]) -> None:
        """Carries an operation out after the launches before it; in a capture, in each replay."""
        self.do(self.synchronize)
        self.do(operation)

    def copy_beside(self, stream: int, target: int, source: int, nbytes: int) -> bool:
        """Gives a copy to a copy engine, if the rank has launches that it runs beside and engines take it."""
        rank = self.current()
        whole = nbytes == 4 or (nbytes | target | source) % 16 == 0
        if not whole or not (rank in self.captures or self.emulator.has_pending(rank)):
            return False
        self.do(lambda: self.emulator.copy(rank, stream, target, source, nbytes))
        return True

    def touched(
        self, what: str, stream: int, reads: list[Range], writes: list[Range], host_waits: bool
    ) -> None:
        """A stream reads and writes ranges of memory, for which the host may wait."""
        timeline = self.timeline()
        if timeline is None:
            return
        work = timeline.issue(what, stream)
        for ranges, write in ((reads, False), (writes, True)):
            for begin, nbytes in ranges:
                timeline.touch_at(work, (np.array([begin]), np.array([begin + nbytes])), write)
        if host_waits:
            timeline.host_waits(stream)
        self.emulator.tell()

    def wait_stream(self, stream: int, other: int) -> None:
        """What a stream is given from now on begins after what another one has."""
        rank = self.current()
        self.do(lambda: self.emulator.wait_stream(rank, stream, other))

    def attribute(self, number: int) -> int:
        """Value of a device attribute, numbered as in `cudaDeviceAttr` and `CUdevice_attribute` alike."""
        if number == 38:  # L2 cache size
            return L2_BYTES
        return self.properties.attribute(number)


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Every replacement, to be entered; leaving them restores what was there."""
    for part in (torch_cuda, generic_torch, cuda_bindings, dsl_benchmarks):
        yield from part.changes(devices)
    yield library_ops.served()
