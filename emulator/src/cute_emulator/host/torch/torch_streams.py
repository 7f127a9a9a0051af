"""Replacements of torch's streams and events; each rank has a separate current stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from cute_emulator.machine.streams import NOWHERE, StreamEvent

if TYPE_CHECKING:
    from cute_emulator.host.torch.cuda_device import CudaDevices


class Streams:
    """Streams of all ranks, and the current stream of each rank.

    Attributes:
        Stream: Replacement of `torch.cuda.Stream`.
        Event: Replacement of `torch.cuda.Event`.
    """

    def __init__(self, devices: CudaDevices) -> None:
        self._rank = devices.current
        self._default: dict[int, Any] = {}
        self._current: dict[int, Any] = {}
        self.Stream: Any = _stream_class(devices)
        self.Event = _event_class(devices, self)

    @property
    def default(self) -> Any:
        """Returns the calling rank's stream 0."""
        rank = self._rank()
        if rank not in self._default:
            self._default[rank] = self.Stream(handle=0)
        return self._default[rank]

    @property
    def current(self) -> Any:
        """Returns the stream of the calling rank's work."""
        return self._current.get(self._rank(), self.default)

    def set(self, stream: Any) -> None:
        """Implements `torch.cuda.set_stream`; None does not change the stream."""
        if stream is not None:
            self._current[self._rank()] = stream

    @contextlib.contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        """Implements `torch.cuda.stream`; None does not change the stream."""
        before = self.current
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)


def _stream_class(devices: CudaDevices) -> type:
    class Stream:
        """`torch.cuda.Stream`: a handle; launches carry it."""

        def __init__(
            self, device: Any = None, priority: int = 0, handle: int | None = None, **_: Any
        ) -> None:
            self.cuda_stream = next(devices.handles) if handle is None else handle
            if self.cuda_stream:
                devices.emulator.timelines.concurrent()
            self.device = torch.device("cuda", devices.current())
            self.priority = priority

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

        def __hash__(self) -> int:
            return hash(self.cuda_stream)

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.cuda_stream

        def synchronize(self) -> None:
            devices.host_waits(self.cuda_stream)

        def wait_stream(self, stream: Any) -> None:
            devices.wait_stream(self.cuda_stream, stream.cuda_stream)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or torch.cuda.Event()
            event.record(self)
            return event

        def query(self) -> bool:
            devices.host_waits(self.cuda_stream)
            return True

        def __enter__(self) -> Any:
            self._entered = torch.cuda.stream(self)  # type: ignore[arg-type]
            self._entered.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._entered.__exit__(*error)

    return Stream


def _event_class(devices: CudaDevices, streams: Streams) -> type:
    class Event:
        """`torch.cuda.Event`: recording notes the time and the place in the stream."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._time: float | None = None
            self._place: StreamEvent | None = None
            self.cuda_event = next(devices.handles)

        def record(self, stream: Any = None) -> None:
            self._time = time.perf_counter()
            rank, handle = devices.current(), (stream or streams.current).cuda_stream

            def mark() -> None:
                self._place = devices.emulator.record_event(rank, handle)

            devices.do(mark)

        def wait(self, stream: Any = None) -> None:
            rank, handle = devices.current(), (stream or streams.current).cuda_stream

            def wait() -> None:
                if self._place is not None:
                    devices.emulator.wait_event(rank, handle, self._place)

            devices.do(wait)

        def synchronize(self) -> None:
            devices.host_waits(event=self._place or NOWHERE)
            self._time = self._time or time.perf_counter()

        def query(self) -> bool:
            devices.host_waits(event=self._place or NOWHERE)
            return True

        def elapsed_time(self, end: Any) -> float:
            if self._time is None or end._time is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            return max((end._time - self._time) * 1e3, 1e-6)

    return Event
