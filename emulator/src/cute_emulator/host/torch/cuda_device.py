"""CUDA devices of a script, and the calls of their parts to the emulator.

Work is ordered as CUDA orders it, or more strictly: launches of one stream run in order, streams wait for
each other and for events, torch's operations wait for all launches. Times are those of the emulation.
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
    """Services of the emulator for the replacements of torch.cuda and other libraries.

    Args:
        emulator: Open emulator.
        current: Function that returns the index of the calling thread's device.
        synchronize: Function that waits until the calling rank's launches have run.
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
            self.copy_by_engine,
            self.touched,
        )

    def open_timelines(self) -> None:
        """Starts to record the host of each rank."""
        for rank in range(self.count):
            self.emulator.timelines.open(rank, lambda: int(self.streams.current.cuda_stream))

    def timeline(self) -> Timeline | None:
        """Returns the calling rank's timeline, or None."""
        return self.emulator.timelines.get(self.current())

    def host_waits(self, stream: int | None = None, event: StreamEvent | None = None) -> None:
        """Makes the host wait for an event, a stream, or the device of the calling rank.

        All launches of the rank run; only the awaited ones are ordered before the host's later work.
        """
        self.synchronize()
        timeline = self.timeline()
        if timeline is not None:
            timeline.host_waits(stream, None if event is None else event.before[1] if event.before else {})

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Implements `torch.Tensor.record_stream`."""
        timeline = self.timeline()
        if timeline is not None:
            timeline.recorded(tensor.untyped_storage().data_ptr(), stream.cuda_stream)

    def instructions(self) -> int:
        """Returns the warp instructions executed so far, which benchmarks measure."""
        return self.emulator.report.instructions

    def do(self, operation: Callable[[], object]) -> None:
        """Executes an operation; in a capture, at each replay."""
        capture = self.captures.get(self.current())
        if capture is not None:
            capture.keep(operation)
        else:
            operation()

    def in_order(self, operation: Callable[[], object]) -> None:
        """Executes an operation after the launches before it; in a capture, at each replay."""
        self.do(self.synchronize)
        self.do(operation)

    def copy_by_engine(self, stream: int, target: int, source: int, nbytes: int) -> bool:
        """Submits a copy to a copy engine if the rank has launches in flight and engines support the copy."""
        rank = self.current()
        is_supported = nbytes == 4 or (nbytes | target | source) % 16 == 0
        if not is_supported or not (rank in self.captures or self.emulator.has_pending(rank)):
            return False
        self.do(lambda: self.emulator.copy(rank, stream, target, source, nbytes))
        return True

    def touched(
        self, what: str, stream: int, reads: list[Range], writes: list[Range], host_waits: bool
    ) -> None:
        """Records that a stream reads and writes ranges of memory, and whether the host waits for it."""
        timeline = self.timeline()
        if timeline is None:
            return
        work = timeline.issue(what, stream)
        for ranges, write in ((reads, False), (writes, True)):
            for begin, nbytes in ranges:
                timeline.touch_at(work, (np.array([begin]), np.array([begin + nbytes])), write)
        if host_waits:
            timeline.host_waits(stream)
        self.emulator.raise_findings()

    def wait_stream(self, stream: int, other: int) -> None:
        """Orders later work of a stream after the present work of another stream."""
        rank = self.current()
        self.do(lambda: self.emulator.wait_stream(rank, stream, other))

    def attribute(self, number: int) -> int:
        """Returns a device attribute; `cudaDeviceAttr` and `CUdevice_attribute` have the same numbers."""
        if number == 38:  # L2 cache size
            return L2_BYTES
        return self.properties.attribute(number)


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields every replacement as a context manager; its exit restores the original."""
    for part in (torch_cuda, generic_torch, cuda_bindings, dsl_benchmarks):
        yield from part.changes(devices)
    yield library_ops.served()
