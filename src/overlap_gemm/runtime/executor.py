"""Where a rank's kernels run: a CUDA device, or whatever else registers itself, as the emulator does.

The fused backend and the virtual ranks know a device only through this surface.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from ..config.arch import ARCHS, arch_of_capability
from ..device.failure import RECORD_WORDS
from .order import CudaStreams, LaunchOrder


class Executor(Protocol):
    """Runs the kernels of one rank."""

    @property
    def arch(self) -> str:
        """What to compile for."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""

    @property
    def is_open(self) -> bool:
        """Whether launches are still possible; an emulator ends."""

    @property
    def num_sms(self) -> int:
        """SMs this rank's persistent grids may fill; all its CTAs must fit at once."""

    @property
    def is_whole_device(self) -> bool:
        """Whether the SMs are a whole device's, so that a cooperative launch knows whether a grid fits."""

    @property
    def order(self) -> LaunchOrder:
        """In which all fused launches of the device run."""

    @property
    def flavour(self) -> str:
        """What tells its compiled kernels from a CUDA device's of the same configuration; "" for nothing."""

    def max_clusters(self, size: int) -> int:
        """Clusters of `size` CTAs that are resident at once, one CTA per SM."""

    def active(self, *used: torch.Tensor | None) -> AbstractContextManager[int]:
        """Makes this executor the target of kernel launches; gives the stream handle to pass to them.

        Args:
            *used: the caller's tensors that the launches read or write, kept from being reused before.
        """

    def fork(self) -> AbstractContextManager[int]:
        """A second stream for kernels that run alongside those launched in the block, inside `active`.

        Gives its handle. It begins where the current stream is when the block is entered, and the current
        stream goes on after both when the block is left.
        """

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queues a copy by a copy engine, which takes no SM; copies of a stream run one after the other.

        Args:
            stream: its handle; of `active` or `fork`.
            target: address, of this rank's or a peer's memory.
            source: address.
            nbytes: a multiple of 16, or 8: a flag.
        """

    @property
    def record(self) -> torch.Tensor:
        """Int32 ``[RECORD_WORDS]`` in host memory: where a kernel writes why it gave up (`device.failure`).

        One for all kernels, so that whichever fused call comes next says what happened.
        """


class Emulation(Protocol):
    """Where kernels of CPU tensors run, as long as it is open."""

    @property
    def emulator(self) -> Any:
        """What was opened."""

    def executor(self, rank: int | None = None) -> Executor:
        """A new one for a rank; None: for the one that calls."""


emulation: Emulation | None = None
"""The open one, as `integrations.cute_emulator` registered it. Calls read it, so it is no function."""


def register(opened: Emulation | None) -> None:
    """Makes `opened` the place where kernels of CPU tensors run; None: there is none any more."""
    global emulation
    emulation = opened


@dataclass(frozen=True)
class CudaExecutor:
    """A CUDA device, or one of equal shares of it.

    Launches go to torch's current stream, or to ``stream`` if one is given.
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
    def is_whole_device(self) -> bool:
        """See `Executor.is_whole_device`; virtual ranks share one."""
        return self.stream is None

    def max_clusters(self, size: int) -> int:
        """See `Executor.max_clusters`."""
        return _resident_clusters(self.device.index or 0, size) // self.shares

    def active(self, *used: torch.Tensor | None) -> AbstractContextManager[int]:
        """See `Executor.active`."""
        if self.stream is None:
            return nullcontext(torch._C._cuda_getCurrentRawStream(self.device.index))
        return self._own_stream(used)

    @contextmanager
    def _own_stream(self, used: Sequence[torch.Tensor | None]) -> Iterator[int]:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the operands are made there
        for tensor in used:
            if tensor is not None:
                tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield self.stream.cuda_stream

    @contextmanager
    def fork(self) -> Iterator[int]:
        """See `Executor.fork`; by events, so that a CUDA graph captures both branches."""
        current, second = torch.cuda.current_stream(self.device), _second_stream(self.device, self.stream)
        second.wait_stream(current)
        try:
            yield second.cuda_stream
        finally:
            current.wait_stream(second)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """See `Executor.copy`."""
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        (error,) = runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream)
        if int(error):
            raise RuntimeError(f"cudaMemcpyAsync of {nbytes} bytes: {error!r}")


@cache
def _second_stream(device: torch.device, first: torch.cuda.Stream | None) -> torch.cuda.Stream:
    """That of a device, or of a virtual rank's stream."""
    return torch.cuda.Stream(device)


@cache
def cuda_executor(index: int) -> CudaExecutor:
    """The executor of CUDA device ``index``.

    Raises:
        ValueError: No kernel of ours exists for its architecture.
    """
    if reason := why_no_cuda(index):
        raise ValueError(reason)
    properties = torch.cuda.get_device_properties(index)
    arch = arch_of_capability((properties.major, properties.minor))
    assert arch is not None, "why_no_cuda has looked"
    device = torch.device("cuda", index)
    order, record = cuda_order(device), cuda_record()
    return CudaExecutor(arch.name, device, properties.multi_processor_count, order, record)


def cuda_record() -> torch.Tensor:
    """A new `Executor.record`: pinned, so mapped into the devices' address space."""
    return torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True)


def cuda_order(device: torch.device) -> LaunchOrder:
    """A new order of launches, with its word in the device's memory."""
    word = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # a kernel on another stream may be the first to read it
    return LaunchOrder(CudaStreams(device), word)


@cache  # the DSL compiles and loads a probe kernel to find out
def _resident_clusters(index: int, size: int) -> int:
    """Clusters of `size` CTAs, each alone on its SM, that the device holds at once.

    Not simply its SMs: MIG cuts it, and its parts need not make up whole clusters.
    """
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(index):
        torch.zeros(1, device="cuda")  # a live context
        return int(HardwareInfo(index).get_max_active_clusters(size))


@cache
def why_no_cuda(index: int) -> str | None:
    """Why fused kernels cannot run on CUDA device ``index``, None if they can."""
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
