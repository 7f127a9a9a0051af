"""Executors, which run a rank's kernels: a CUDA device, or a registered alternative such as the emulator.

The fused backend and the virtual ranks use a device only through this interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ..config.arch import ARCHS, arch_of_capability
from ..device.failure import RECORD_WORDS
from .memory.records import new_record
from .order import CudaStreams, LaunchOrder


class Executor(Protocol):
    """Runs the kernels of one rank."""

    @property
    def arch(self) -> str:
        """Returns the architecture to compile for, for example "sm_90a"."""

    @property
    def device(self) -> torch.device:
        """Returns the device of the tensors."""

    @property
    def is_open(self) -> bool:
        """Returns whether kernels can still be launched; an emulator can be closed."""

    @property
    def num_sms(self) -> int:
        """Returns the number of SMs for this rank's persistent grids; all their CTAs must be co-resident."""

    @property
    def is_full_device(self) -> bool:
        """Returns whether the rank has a full device, so that cooperative launches can check the grid."""

    @property
    def order(self) -> LaunchOrder:
        """Returns the order of all fused launches of the device."""

    @property
    def flavour(self) -> str:
        """Returns a key that separates its compiled kernels from a CUDA device's; "" if they are the same."""

    def max_clusters(self, size: int) -> int:
        """Returns the number of clusters of `size` CTAs that are resident at once, one CTA per SM."""

    def active(self, *used: Any) -> AbstractContextManager[int]:
        """Makes this executor the target of kernel launches; yields the stream handle for them.

        Args:
            *used: Tensors of the caller that the launches read or write, sequences of them, or None; their
                memory is not reused before the launches have ended.
        """

    def fork(self, stream: int) -> AbstractContextManager[int]:
        """Yields the handle of a second stream for kernels that run concurrently with the block's launches.

        Used within `active`. The second stream starts after the current stream's work at the entry of the
        block. At the exit the current stream waits for both.

        Args:
            stream: Handle of the current stream, from `active`.
        """

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queues a copy by a copy engine, which uses no SM; copies of one stream run in order.

        Args:
            stream: Stream handle from `active` or `fork`.
            target: Address in this rank's or a peer's memory.
            source: Address.
            nbytes: Multiple of 16; or 8, for a flag.
        """

    @property
    def record(self) -> torch.Tensor:
        """Returns the failure record, int32 ``[RECORD_WORDS]`` in host memory (`device.failure`).

        A kernel that fails stores the reason there. All kernels share it, so that the next fused call,
        whichever it is, reports the failure.
        """


class Emulation(Protocol):
    """Provider of executors for CPU tensors while it is open."""

    @property
    def emulator(self) -> Any:
        """Returns the open emulator."""

    def executor(self, rank: int | None = None) -> Executor:
        """Returns a new executor for a rank; None: for the calling rank."""


emulation: Emulation | None = None
"""Open emulation, registered by `integrations.cute_emulator`. Every call reads it, so it is a variable."""


def register(provider: Emulation | None) -> None:
    """Sets the provider of executors for CPU tensors; None: there is none."""
    global emulation
    emulation = provider


@dataclass(frozen=True)
class CudaExecutor:
    """A CUDA device, or one of several equal shares of it.

    Launches use torch's current stream, or ``stream`` if it is not None.
    """

    arch: str
    device: torch.device
    num_sms: int
    order: LaunchOrder
    record: torch.Tensor
    stream: torch.cuda.Stream | None = None
    shares: int = 1
    flavour: str = ""
    is_open: bool = True

    @property
    def is_full_device(self) -> bool:
        """Returns True, except for virtual ranks, which share a device."""
        return self.stream is None

    def max_clusters(self, size: int) -> int:
        """Returns the number of clusters of `size` CTAs that are resident at once in this share."""
        return _resident_clusters(self.device.index or 0, size) // self.shares

    def active(self, *used: Any) -> AbstractContextManager[int]:
        """Yields the handle of torch's current stream, or of ``stream``."""
        if self.stream is None:
            return nullcontext(torch._C._cuda_getCurrentRawStream(self.device.index))
        return self._on_stream(used)

    @contextmanager
    def _on_stream(self, used: Sequence[Any]) -> Iterator[int]:
        """Yields ``stream`` after torch's current one, and keeps ``used`` alive on it."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the operands are computed on it
        for tensor in _tensors(used):
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield self.stream.cuda_stream

    @contextmanager
    def fork(self, stream: int) -> Iterator[int]:
        """Yields a second stream, forked and joined by events, so that graphs capture both branches."""
        current, second = _current_stream(self.device, stream), _second_stream(self.device, self.stream)
        second.wait_for(current)
        try:
            yield second.stream.cuda_stream
        finally:
            current.wait_for(second)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queues a copy by a copy engine."""
        copy, kind = _copy_of_runtime()
        (error,) = copy(target, source, nbytes, kind, stream)
        if int(error):
            raise RuntimeError(f"cudaMemcpyAsync of {nbytes} bytes: {error!r}")


def _tensors(used: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested sequences, which may contain None."""
    for one in used:
        if isinstance(one, torch.Tensor):
            yield one
        elif one is not None:
            yield from _tensors(one)


class MarkedStream(NamedTuple):
    """A stream with an event for all waits for its work: a new event in every call takes longer than its use.

    If another thread records the event between a record and its wait, the wait includes later work of the
    same stream.
    """

    stream: torch.cuda.Stream
    event: torch.cuda.Event

    def wait_for(self, other: MarkedStream) -> None:
        """Makes later work of this stream wait for the work of `other` so far."""
        other.event.record(other.stream)
        other.event.wait(self.stream)


@lru_cache(maxsize=64)
def _current_stream(device: torch.device, handle: int) -> MarkedStream:
    """Returns torch's current stream of a device, whose handle is `handle`."""
    return MarkedStream(torch.cuda.current_stream(device), torch.cuda.Event())


@cache
def _second_stream(device: torch.device, first: torch.cuda.Stream | None) -> MarkedStream:
    """Returns the second stream of a device, or of a virtual rank's first stream."""
    return MarkedStream(torch.cuda.Stream(device), torch.cuda.Event())


@cache
def _copy_of_runtime() -> tuple[Any, Any]:
    """Returns `cudaMemcpyAsync` and the kind of copies within and between devices."""
    from cuda.bindings import runtime

    return runtime.cudaMemcpyAsync, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice


@cache
def cuda_executor(index: int) -> CudaExecutor:
    """Returns the executor of CUDA device ``index``.

    Raises:
        ValueError: No kernel of this library supports the device's architecture.
    """
    if reason := why_no_cuda(index):
        raise ValueError(reason)
    properties = torch.cuda.get_device_properties(index)
    arch = arch_of_capability((properties.major, properties.minor))
    assert arch is not None, "why_no_cuda has checked the architecture"
    device = torch.device("cuda", index)
    order, record = cuda_order(device), cuda_record()
    return CudaExecutor(arch.name, device, properties.multi_processor_count, order, record)


def cuda_record() -> torch.Tensor:
    """Returns a zeroed `Executor.record`, int32 ``[RECORD_WORDS]``, for devices and the watcher's process."""
    from cuda.bindings import runtime

    page = new_record()
    record = torch.frombuffer(page, dtype=torch.int32, count=RECORD_WORDS)
    flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped  # all contexts, same address
    (error,) = runtime.cudaHostRegister(record.data_ptr(), len(page), flags)
    if int(error):
        raise RuntimeError(f"cudaHostRegister of a failure record: {error!r}")
    return record


def cuda_order(device: torch.device) -> LaunchOrder:
    """Returns a new order of launches with its word in the device's memory."""
    word = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # a kernel on another stream may be the first to read it
    return LaunchOrder(CudaStreams(device), word)


@cache  # the DSL compiles and loads a probe kernel to find out
def _resident_clusters(index: int, size: int) -> int:
    """Returns the number of clusters of `size` CTAs, one CTA per SM, that the device holds at once.

    It can be less than SMs / size: MIG partitions the device, and its parts need not be multiples of
    clusters.
    """
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(index):
        torch.zeros(1, device="cuda")  # a live context
        return int(HardwareInfo(index).get_max_active_clusters(size))


@cache
def why_no_cuda(index: int) -> str | None:
    """Returns why fused kernels cannot run on CUDA device ``index``, or None if they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(index)
    if arch_of_capability(capability) is None:
        known = ", ".join("{}.{}".format(*arch.capability) for arch in ARCHS.values() if arch.capability)
        return (
            f"device {index} has compute capability {capability[0]}.{capability[1]}; "
            f"kernels exist for {known}"
        )
    return None
