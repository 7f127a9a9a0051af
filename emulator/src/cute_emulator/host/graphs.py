"""CUDA graphs: what a rank's streams are given while it captures is kept, and carried out at every replay.

That is launches, torch's operations on device memory (`torch_mode`), and places where one stream waits for
another, where a replay's host waits. A replay begins after all that the rank launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cute_emulator.errors import EmulatorError
from cute_emulator.host.timeline import Timeline, Vector


class Capture:
    """The work of one capture, in order."""

    def __init__(self, origin: int) -> None:
        self._origin = origin  # the stream in which the capture began
        self._items: list[Callable[[], object]] = []
        self._end: Vector = {}

    def keep(self, item: Callable[[], object]) -> None:
        """Something that each replay does."""
        self._items.append(item)

    def replay(self, synchronize: Callable[[], None], timeline: Timeline | None) -> None:
        """Does everything; `synchronize` runs the rank's launches, whatever waits for them."""
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
    """`torch.cuda.CUDAGraph` and `torch.cuda.graph`.

    Args:
        captures: The captures under way, by rank.
        rank: The calling thread's.
        synchronize: Waits until its launches have run.
        timeline: Its timeline.
    """

    class CUDAGraph:
        """`torch.cuda.CUDAGraph`."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._capture: Capture | None = None

        def capture_begin(self, *_: Any, **__: Any) -> None:
            if rank() in captures:
                raise EmulatorError("a capture of this rank is under way already")
            synchronize()
            self._capture = captures[rank()] = Capture(torch.cuda.current_stream().cuda_stream)

        def capture_end(self) -> None:
            if captures.pop(rank(), None) is not self._capture or self._capture is None:
                raise EmulatorError("the end of a capture that this graph did not begin")

        def replay(self) -> None:
            if self._capture is None:
                raise RuntimeError("replay of a CUDA graph that was not captured")
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
