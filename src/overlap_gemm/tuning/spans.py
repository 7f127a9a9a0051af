"""Recording of computations and transfers over time, for timelines.

Backends put `span` around computations and pass transfers in flight to `watch`. Unless a `record` is open,
both only read one variable.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Kind = Literal["compute", "transfer"]


@dataclass(frozen=True)
class Span:
    """A computation or transfer with its begin and end.

    Attributes:
        kind: "compute" or "transfer".
        label: Name for the timeline.
        begin: Seconds since the recording began on this rank. A transfer begins when it is posted.
        end: Seconds since the recording began on this rank. A transfer ends when its bytes have arrived, even
            if it is waited for later.
    """

    kind: Kind
    label: str
    begin: float
    end: float


class Waitable(Protocol):
    """Common interface of `torch.distributed.Work` and its replacement while recording."""

    def wait(self) -> object:
        """Returns when the work is complete; raises RuntimeError if it failed."""


@contextmanager
def record(device: torch.device | str = "cpu") -> Iterator[list[Span]]:
    """Records the spans of this process while the context is open; the yielded list is filled at its end.

    On CUDA, times are events: on the current stream for computations, on a side stream that waits for each
    transfer. On other devices they are wall-clock times, and a thread waits for each transfer in flight.

    Raises:
        RuntimeError: A recording is already open.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("record: a recording is already open in this process; close it first")
    spans: list[Span] = []
    _recorder = _Recorder(torch.device(device))
    try:
        yield spans
        spans.extend(_recorder.close())
    finally:
        _recorder.watchers.shutdown(wait=False)
        _recorder = None


class span:  # noqa: N801  a class: a generator-based context manager costs each call a microsecond
    """Records the block as one span if a recording is open."""

    __slots__ = ("begin", "kind", "label")

    def __init__(self, kind: Kind, label: str) -> None:
        self.kind, self.label = kind, label

    def __enter__(self) -> None:
        self.begin = None if _recorder is None else _recorder.mark()

    def __exit__(self, failure: object, error: BaseException | None, trace: object) -> None:
        if self.begin is not None and _recorder is not None and failure is None:
            _recorder.note(self.kind, self.label, self.begin, _recorder.mark())


def watch(label: str, works: Sequence[Waitable]) -> Sequence[Waitable]:
    """Records the transfer that consists of `works`, just posted, if a recording is open.

    Returns:
        Objects to wait for in place of `works`.
    """
    return works if _recorder is None or not works else _recorder.watch(label, works)


class _Recorder:
    """Spans of a block: events on CUDA streams, or times of the host."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.side = torch.cuda.Stream(device) if self.on_cuda else None
        self.watchers = ThreadPoolExecutor(max_workers=256, thread_name_prefix="overlap_gemm-spans")
        self.notes: list[tuple[Kind, str, Any, Any]] = []
        self.origin = self.mark()

    def mark(self) -> Any:
        """Returns the current time: an event on the current stream, or seconds."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, kind: Kind, label: str, begin: Any, end: Any) -> None:
        self.notes.append((kind, label, begin, end))

    def watch(self, label: str, works: Sequence[Waitable]) -> Sequence[Waitable]:
        begin = self.mark()

        def arrive() -> None:
            for work in works:
                work.wait()
            self.note("transfer", label, begin, self.mark())

        if self.on_cuda:  # there a wait is a stream's wait, and may be repeated
            with torch.cuda.stream(self.side):
                arrive()
            return works
        return [_Watched(self.watchers.submit(arrive))]

    def close(self) -> list[Span]:
        self.watchers.shutdown()
        if self.on_cuda:
            torch.cuda.synchronize()
        spans = [Span(kind, label, self._seconds(a), self._seconds(b)) for kind, label, a, b in self.notes]
        return sorted(spans, key=lambda span: span.begin)

    def _seconds(self, mark: Any) -> float:
        return float(self.origin.elapsed_time(mark) / 1e3 if self.on_cuda else mark - self.origin)


@dataclass(frozen=True)
class _Watched:
    """A transfer whose wait is made by a watcher thread, since gloo allows only one wait."""

    arrival: "Future[None]"

    def wait(self) -> None:
        self.arrival.result()


_recorder: _Recorder | None = None
