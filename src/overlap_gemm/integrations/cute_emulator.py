"""Fused kernels in the emulator: executors of emulated ranks, registered while an emulator is open.

`overlap_gemm` registers the name of this module in `cute_emulator.clients`, which imports it when an emulator
opens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_emulator import Emulator
from cute_emulator.clients import per_process

from ..device.failure import RECORD_WORDS
from ..runtime.executor import register
from ..runtime.order import LaunchOrder, Stream

SECOND_STREAM = 1 << 16
"""Number of an emulated rank's second stream, in addition to stream 0."""

per_process("overlap_gemm.backends.peer_access", _known=dict)
per_process("overlap_gemm.runtime.bootstrap", _world=lambda: None, _owns_process_group=bool)
per_process("overlap_gemm.runtime.group", _groups=dict, _groups_by_id=dict, _is_single_process=bool)
per_process("overlap_gemm.runtime.peers", _lock=threading.Lock, _peers=dict, orphaned=list)


def opened(emulator: Emulator) -> None:
    """Registers `emulator` for fused calls with CPU tensors."""
    register(CuteEmulation(emulator))


def closed() -> None:
    """Unregisters the emulator."""
    register(None)


@dataclass(frozen=True, eq=False)
class CuteEmulation:
    """An open emulator (`runtime.executor.Emulation`)."""

    emulator: Emulator

    def executor(self, rank: int | None = None) -> EmulatorExecutor:
        """Returns a new executor for a rank; None: for the calling rank."""
        emulator = self.emulator
        rank = emulator.calling_rank() if rank is None else rank
        streams = EmulatedStreams(emulator, rank)
        word = emulator.empty((1,), torch.int32, rank, "in call").zero_()
        record = emulator.empty((RECORD_WORDS,), torch.int32, name="failure record").zero_()
        return EmulatorExecutor(emulator, rank, streams, LaunchOrder(streams, word), record)


@dataclass(frozen=True)
class EmulatedStream:
    """A stream of one emulated rank."""

    emulator: Emulator
    rank: int
    cuda_stream: int

    def wait_stream(self, stream: EmulatedStream) -> None:
        """Makes later launches on this stream wait for the launches on `stream` so far."""
        self.emulator.wait_stream(self.rank, self.cuda_stream, stream.cuda_stream)


@dataclass
class EmulatedStreams:
    """Streams of one emulated rank; captures are not supported.

    Attributes:
        emulator: Emulator of the rank.
        rank: Number of the rank.
        handle: Stream of the next launches; tests set it.
    """

    emulator: Emulator
    rank: int
    handle: int = 0

    def current(self) -> EmulatedStream:
        """Returns the stream of the next launches."""
        return EmulatedStream(self.emulator, self.rank, self.handle)

    def is_capturing(self) -> bool:
        """Returns False."""
        return False

    def capture_of(self, stream: Stream) -> int:
        """Returns 0: no capture."""
        return 0


@dataclass(frozen=True)
class EmulatorExecutor:
    """Executor of one rank of an open emulator; with several ranks its launches wait for `Emulator.run`."""

    emulator: Emulator
    rank: int
    streams: EmulatedStreams
    order: LaunchOrder
    record: torch.Tensor
    device: torch.device = torch.device("cpu")

    @property
    def arch(self) -> str:
        """Returns the emulated architecture."""
        return self.emulator.device.arch

    @property
    def flavour(self) -> str:
        """Returns the cache key of emulated kernels.

        They contain their PTX, with Python lines if CUTE_DSL_LINEINFO is set.
        """
        return "emulated" + " with lines" * (os.environ.get("CUTE_DSL_LINEINFO") == "1")

    @property
    def is_open(self) -> bool:
        """Returns whether the emulator is open."""
        return self.emulator is Emulator.current()

    @property
    def num_sms(self) -> int:
        """Returns the number of SMs of the emulated device."""
        return self.emulator.devices[self.rank].num_sms

    @property
    def is_full_device(self) -> bool:
        """Returns True."""
        return True

    def max_clusters(self, size: int) -> int:
        """Returns the number of clusters of `size` CTAs that are resident at once."""
        return self.num_sms // size

    @contextmanager
    def active(self, *used: Any) -> Iterator[int]:
        """Yields the handle of the current stream; the emulator keeps the tensors of a launch itself."""
        with self.emulator.rank(self.rank):
            yield self.streams.current().cuda_stream

    @contextmanager
    def fork(self, stream: int) -> Iterator[int]:
        """Yields the handle of a second stream that runs concurrently."""
        current = EmulatedStream(self.emulator, self.rank, stream)
        second = replace(current, cuda_stream=SECOND_STREAM + stream)
        second.wait_stream(current)
        yield second.cuda_stream
        current.wait_stream(second)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queues a copy on a stream."""
        self.emulator.copy(self.rank, stream, target, source, nbytes)
