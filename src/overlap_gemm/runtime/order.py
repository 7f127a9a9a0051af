"""The one order of a device's fused launches, whatever their stream, group, op or size.

Two kernels that wait for peers must not share a device: each could hold a part of the SMs that the other
needs, here the one and on a peer the other, and they would wait for each other for ever. So every launch
begins after the one before it. (NCCL orders its communicators' kernels for the same reason.)

What the host sees, it orders: calls on several streams, and branches of one capture. What it cannot see is a
replay of a graph: that is ordered by the stream it is started on. If another call is resident alongside it
nevertheless, the word "in call" turns that into an `OverlappingCallsError`; if the two run one after the
other, in another order on a peer, their identities do (:mod:`overlap_gemm.runtime.identity`).

The order must be the same on all ranks of a group, as with NCCL. A group's calls are one thread's; threads
with groups of their own that call fused ops of one device at the same time have none: give them an order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

CALLS = 2**31 - 1
"""Calls are numbered 1 to this and from 1 again; the kernel takes the number as an int32."""


class CaptureError(RuntimeError):
    """A call that must compile or allocate first was made while a CUDA graph was being captured."""


class Stream(Protocol):
    """A stream of a device: torch's, or an emulated rank's."""

    @property
    def cuda_stream(self) -> int:
        """Its handle."""

    def wait_stream(self, stream: Any) -> None:
        """What is launched here from now on begins after what was launched on the other one so far."""


class Streams(Protocol):
    """The streams of a device."""

    def current(self) -> Stream:
        """The one that launches go to."""

    def is_capturing(self) -> bool:
        """Whether that one is part of a capture."""

    def capture_of(self, stream: Stream) -> int:
        """The number of the capture that a stream is part of, unique in the process; 0 for none."""


@dataclass
class LaunchOrder:
    """Of one device, or of one virtual rank.

    Attributes:
        streams: whose launches.
        word: "in call", int32 ``[1]`` in the device's memory: the number of the call that runs, 0 between
            calls. It belongs to no workspace, since calls on different ones must not overlap either.
        lock: held from `follow` until the launch, so that another thread's launch is after it.
    """

    streams: Streams
    word: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _call: int = 0
    _last: Stream | None = None
    _handle: int | None = None
    _captures: dict[int, Stream] = field(default_factory=dict)

    def next_call(self) -> int:
        """The number of the launch to come, for the word."""
        self._call = self._call % CALLS + 1
        return self._call

    def follow(self, stream: int) -> bool:
        """Makes the current stream wait for the last launch, where that was on another stream.

        The event is recorded here and not after each launch, which would cost every call a microsecond: the
        last launch's stream has it among what was queued until now, and an event covers all of that. It also
        covers what the caller queued there afterwards; that was queued before this call, so it does not wait
        for it.

        Args:
            stream: the current stream's handle.

        Returns:
            Whether the launch is captured and not run.
        """
        if self.streams.is_capturing():
            self._follow_in_capture()
            return True
        if stream != self._handle:
            current = self.streams.current()
            # Where a capture has begun on the last stream since, torch has waited for its work before.
            if self._last is not None and not self.streams.capture_of(self._last):
                current.wait_stream(self._last)
            self._handle, self._last = stream, current
        return False

    def _follow_in_capture(self) -> None:
        """The same among the launches of one capture; nothing outside of it may be waited for.

        A stream that was forked into a capture stays part of it until it ends, joined or not.
        """
        current = self.streams.current()
        capture = self.streams.capture_of(current)
        last = self._captures.get(capture)
        if last is None:  # a new one: forget those that have ended
            known = self._captures.items()
            self._captures = {other: s for other, s in known if self.streams.capture_of(s) == other}
        elif last.cuda_stream != current.cuda_stream:
            current.wait_stream(last)
        self._captures[capture] = current


@dataclass(frozen=True)
class CudaStreams:
    """Of a CUDA device, as torch knows them."""

    device: torch.device

    def current(self) -> Stream:
        """See `Streams.current`."""
        stream: Stream = torch.cuda.current_stream(self.device)
        return stream

    def is_capturing(self) -> bool:
        """See `Streams.is_capturing`."""
        return bool(torch.cuda.is_current_stream_capturing())

    def capture_of(self, stream: Stream) -> int:
        """See `Streams.capture_of`."""
        from cuda.bindings import runtime

        error, status, number, *_ = runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)
        if int(error):
            raise RuntimeError(f"cudaStreamGetCaptureInfo: {error!r}")
        active = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
        return int(number) if status == active else 0


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream is being captured in a CUDA graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def forbid_capture(device: torch.device, what: str) -> None:
    """Raises a CaptureError if torch's current stream is being captured."""
    if is_capturing(device):
        raise CaptureError(
            f"{what} while a CUDA graph is captured: call overlap_gemm.warmup(...) with this op and shape "
            f"before the capture, or make the call once without capturing"
        )
