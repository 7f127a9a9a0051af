"""CUDA graphs: work submitted to a rank's streams during capture is stored and executed at each replay.

The work consists of launches, torch's operations on device memory (`torch_mode`), and waits between streams.
Capture executes no launch; it executes an operation of torch once, for its result, and restores the inputs. A
replay begins after all earlier launches of the rank. During a replay the host waits at each operation of
torch. An `EmulatorError` is raised for a second capture of a rank at a time, and for an end without a
capture. A replay of a graph without a capture raises a `RuntimeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cute_emulator.errors import EmulatorError
from cute_emulator.host.timeline import Timeline, Vector


class Capture:
    """Work of one capture, in order."""

    def __init__(self, origin: int) -> None:
        self._origin = origin  # the stream in which the capture began
        self._items: list[Callable[[], object]] = []
        self._end: Vector = {}

    def keep(self, item: Callable[[], object]) -> None:
        """Stores an operation that each replay executes."""
        self._items.append(item)

    def replay(self, synchronize: Callable[[], None], timeline: Timeline | None) -> None:
        """Executes all operations.

        `synchronize` runs the rank's launches before an operation that waits for them.
        """
        synchronize()
        order = timeline.replaying(self, self._origin, self._end) if timeline else nullcontext()
        with order:
            for item in self._items:
                item()
        synchronize()


def classes(
    captures: dict[int, Capture],
    rank: Callable[[], int],
    synchronize: Callable[[], None],
    timeline: Callable[[], Timeline | None],
) -> tuple[type, Any]:
    """Returns replacements of `torch.cuda.CUDAGraph` and `torch.cuda.graph`.

    Args:
        captures: Captures in progress, by rank.
        rank: Function that returns the calling thread's rank.
        synchronize: Function that waits until the rank's launches have run.
        timeline: Function that returns the rank's timeline.
    """

    class CUDAGraph:
        """Replacement of `torch.cuda.CUDAGraph`."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._capture: Capture | None = None

        def capture_begin(self, *_: Any, **__: Any) -> None:
            if rank() in captures:
                raise EmulatorError("a capture of this rank is already in progress: end it first")
            synchronize()
            self._capture = captures[rank()] = Capture(torch.cuda.current_stream().cuda_stream)

        def capture_end(self) -> None:
            if captures.pop(rank(), None) is not self._capture or self._capture is None:
                raise EmulatorError(
                    "capture_end: this graph has no capture in progress; call capture_begin first"
                )

        def replay(self) -> None:
            if self._capture is None:
                raise RuntimeError(
                    "replay of a CUDA graph without a capture: capture work by torch.cuda.graph first"
                )
            self._capture.replay(synchronize, timeline())

        def reset(self) -> None:
            self._capture = None

        def pool(self) -> tuple[int, int]:
            return 0, 0

    @contextmanager
    def graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        with torch.cuda.stream(stream or torch.cuda.Stream()):
            cuda_graph.capture_begin()
            try:
                yield
            finally:
                cuda_graph.capture_end()

    return CUDAGraph, graph
