"""Fused kernels in an emulator: the executor of an emulated rank, registered while one is open.

`overlap_gemm` names this module to `cute_emulator.clients`, which imports it when an emulator opens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from cute_emulator import Emulator
from cute_emulator.clients import per_process

from ..device.failure import RECORD_WORDS
from ..runtime.executor import register
from ..runtime.order import LaunchOrder, Stream

SECOND_STREAM = 1 << 16
"""Number of an emulated rank's second stream alongside its stream 0."""

per_process("overlap_gemm.backends.reach", _known=dict)
per_process("overlap_gemm.runtime.bootstrap", _world=lambda: None, _owns_process_group=bool)
per_process("overlap_gemm.runtime.group", _known=dict, _known_by_id=dict, _is_alone=bool)
per_process("overlap_gemm.runtime.peers", _lock=threading.Lock, _peers=dict, orphaned=list)


def opened(emulator: Emulator) -> None:
    """Fused calls with CPU tensors run in `emulator` from now on."""
    register(CuteEmulation(emulator))


def closed() -> None:
    """They run nowhere any more."""
    register(None)


@dataclass(frozen=True, eq=False)
class CuteEmulation:
    """An open emulator (`runtime.executor.Emulation`)."""

    emulator: Emulator

    def executor(self, rank: int | None = None) -> EmulatorExecutor:
        """See `runtime.executor.Emulation.executor`."""
        emulator = self.emulator
        rank = emulator.calling_rank() if rank is None else rank
        streams = EmulatedStreams(emulator, rank)
        word = emulator.empty((1,), torch.int32, rank, "in call").zero_()
        record = emulator.empty((RECORD_WORDS,), torch.int32, name="failure record").zero_()
        return EmulatorExecutor(emulator, rank, streams, LaunchOrder(streams, word), record)


@dataclass(frozen=True)
class EmulatedStream:
    """A stream of one rank of an emulator."""

    emulator: Emulator
    rank: int
    cuda_stream: int

    def wait_stream(self, stream: EmulatedStream) -> None:
        """See `Stream.wait_stream`."""
        self.emulator.wait_stream(self.rank, self.cuda_stream, stream.cuda_stream)


@dataclass
class EmulatedStreams:
    """Of one rank of an emulator, which captures nothing.

    Attributes:
        emulator: it.
        rank: whose.
        handle: the stream that launches go to; a test sets it.
    """

    emulator: Emulator
    rank: int
    handle: int = 0

    def current(self) -> EmulatedStream:
        """See `Streams.current`."""
        return EmulatedStream(self.emulator, self.rank, self.handle)

    def is_capturing(self) -> bool:
        """See `Streams.is_capturing`."""
        return False

    def capture_of(self, stream: Stream) -> int:
        """See `Streams.capture_of`."""
        return 0


@dataclass(frozen=True)
class EmulatorExecutor:
    """One rank of an open emulator; with several ranks its launches wait for `Emulator.run`."""

    emulator: Emulator
    rank: int
    streams: EmulatedStreams
    order: LaunchOrder
    record: torch.Tensor
    device: torch.device = torch.device("cpu")

    @property
    def arch(self) -> str:
        """The emulated architecture."""
        return self.emulator.device.arch

    @property
    def flavour(self) -> str:
        """Its kernels carry their PTX, which names Python lines where the DSL was told to keep them."""
        return "emulated" + " with lines" * (os.environ.get("CUTE_DSL_LINEINFO") == "1")

    @property
    def is_open(self) -> bool:
        """Whether the emulator is."""
        return self.emulator is Emulator.current()

    @property
    def num_sms(self) -> int:
        """SMs the emulated device claims."""
        return self.emulator.devices[self.rank].num_sms

    @property
    def is_whole_device(self) -> bool:
        """See `Executor.is_whole_device`."""
        return True

    def max_clusters(self, size: int) -> int:
        """See `Executor.max_clusters`."""
        return self.num_sms // size

    @contextmanager
    def active(self, *used: torch.Tensor | None) -> Iterator[int]:
        """See `Executor.active`; the emulator itself keeps what a launch was given."""
        with self.emulator.rank(self.rank):
            yield self.streams.current().cuda_stream

    @contextmanager
    def fork(self) -> Iterator[int]:
        """See `Executor.fork`."""
        current = self.streams.current()
        second = replace(current, cuda_stream=SECOND_STREAM + current.cuda_stream)
        second.wait_stream(current)
        yield second.cuda_stream
        current.wait_stream(second)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """See `Executor.copy`."""
        self.emulator.copy(self.rank, stream, target, source, nbytes)
