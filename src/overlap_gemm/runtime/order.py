"""Order of a device's fused launches, independent of stream, group, op and size.

Two kernels that wait for peers must not run on a device at the same time. Each could hold some of the SMs
that the other needs, one kernel here and the other one on a peer. Both would wait for ever. Therefore every
launch begins after the previous one has ended. (NCCL orders its communicators' kernels for the same reason.)

The host orders the launches that it makes: calls on several streams, and branches of one capture. Replays of
a graph are ordered by their stream only. If a replay and another call of the device run at the same time, the
word "in call" turns that into an `OverlappingCallsError`. If they run one after the other, but in another
order on a peer, that is a `MismatchedCallsError` (:mod:`overlap_gemm.runtime.identity`). A call that must
compile or allocate while it is captured raises `CaptureError`.

The order must be the same on all ranks of a group, as with NCCL. All calls of a group are made by one thread.
Threads with different groups that call fused ops of one device at the same time have no common order: the
caller must provide one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

CALLS = 2**31 - 1
"""Calls are numbered from 1 to this number, then from 1 again; kernels take the number as an int32."""


class CaptureError(RuntimeError):
    """A call that must first compile or allocate was made during the capture of a CUDA graph."""


class Stream(Protocol):
    """A stream of a device: torch's, or an emulated rank's."""

    @property
    def cuda_stream(self) -> int:
        """Returns the stream handle."""

    def wait_stream(self, stream: Any) -> None:
        """Makes later launches on this stream wait for the launches on `stream` so far."""


class Streams(Protocol):
    """The streams of a device."""

    def current(self) -> Stream:
        """Returns the stream of the next launches."""

    def is_capturing(self) -> bool:
        """Returns whether the current stream is being captured."""

    def capture_of(self, stream: Stream) -> int:
        """Returns the number of the capture that includes a stream, unique in the process; 0: none."""


@dataclass
class LaunchOrder:
    """Order of the launches of one device, or of one virtual rank.

    Attributes:
        streams: Streams of the device.
        word: "In call", int32 ``[1]`` in the device's memory: the number of the running call, 0 between
            calls. It does not belong to a workspace, since calls with different workspaces must not overlap
            either.
        lock: Held from `follow` until the launch, so that other threads' launches come after it.
    """

    streams: Streams
    word: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _call: int = 0
    _last: Stream | None = None
    _handle: int | None = None
    _captures: dict[int, Stream] = field(default_factory=dict)

    def next_call(self) -> int:
        """Returns the number of the next launch, for `word`."""
        self._call = self._call % CALLS + 1
        return self._call

    def follow(self, stream: int) -> bool:
        """Makes the current stream wait for the last launch if that was on another stream.

        The event is recorded here, not after each launch, which would cost every call a microsecond. It
        covers all work on the last launch's stream so far: the launch, and what the caller queued after it.
        None of that waits for this call, so there is no cycle.

        Args:
            stream: Handle of the current stream.

        Returns:
            True if the launch is captured instead of run.
        """
        if self.streams.is_capturing():
            self._follow_in_capture()
            return True
        if stream != self._handle:
            current = self.streams.current()
            # If a capture has begun on the last stream since, torch has waited for that stream's work before.
            if self._last is not None and not self.streams.capture_of(self._last):
                current.wait_stream(self._last)
            self._handle, self._last = stream, current
        return False

    def _follow_in_capture(self) -> None:
        """Orders the launches of one capture among themselves; launches outside of it must not be waited for.

        A stream that was forked into a capture is part of it until the capture ends, joined or not.
        """
        current = self.streams.current()
        capture = self.streams.capture_of(current)
        last = self._captures.get(capture)
        if last is None:  # a new capture: remove those that have ended
            known = self._captures.items()
            self._captures = {other: s for other, s in known if self.streams.capture_of(s) == other}
        elif last.cuda_stream != current.cuda_stream:
            current.wait_stream(last)
        self._captures[capture] = current


@dataclass(frozen=True)
class CudaStreams:
    """Streams of a CUDA device, through torch."""

    device: torch.device

    def current(self) -> Stream:
        """Returns torch's current stream."""
        stream: Stream = torch.cuda.current_stream(self.device)
        return stream

    def is_capturing(self) -> bool:
        """Returns whether torch's current stream is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def capture_of(self, stream: Stream) -> int:
        """Returns the number of the capture that includes a stream; 0: none."""
        from cuda.bindings import runtime

        error, status, number, *_ = runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)
        if int(error):
            raise RuntimeError(f"cudaStreamGetCaptureInfo: {error!r}")
        active = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
        return int(number) if status == active else 0


def is_capturing(device: torch.device) -> bool:
    """Returns whether torch's current stream is being captured in a CUDA graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def forbid_capture(device: torch.device, what: str) -> None:
    """Raises a CaptureError if torch's current stream is being captured."""
    if is_capturing(device):
        raise CaptureError(
            f"{what} while a CUDA graph is captured: before the capture, call overlap_gemm.warmup(...) with "
            f"this op and shape, or make the call once"
        )
