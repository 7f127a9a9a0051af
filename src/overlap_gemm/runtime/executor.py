"""Where a rank's kernels run: a CUDA device, or the emulator.

The fused backend and the virtual ranks know a device only through this surface.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..emulator import Emulator

ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability -> architecture our kernels are compiled for."""


class Executor(Protocol):
    """Runs the kernels of one rank."""

    @property
    def arch(self) -> str:
        """What to compile for."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""

    @property
    def num_sms(self) -> int:
        """SMs this rank's persistent grids may fill; all its CTAs must fit at once."""

    @property
    def on_disk(self) -> bool:
        """Whether compiled kernels may be kept on disk."""

    def max_clusters(self, size: int) -> int:
        """Clusters of `size` CTAs that are resident at once, one CTA per SM."""

    def active(self, *used: torch.Tensor | None) -> AbstractContextManager[int]:
        """Makes this executor the target of kernel launches; gives the stream handle to pass to them.

        Args:
            *used: the caller's tensors that the launches read or write, kept from being reused before.
        """

    def fork(self) -> AbstractContextManager[int]:
        """A second stream for kernels that run beside those launched in the block, inside `active`.

        Gives its handle. It begins where the current stream is when the block is entered, and the current
        stream goes on behind both when the block is left.
        """

    def host_words(self, count: int) -> torch.Tensor:
        """Zeroed int32 ``[count]`` in host memory that kernels write and the host reads at any time."""


@dataclass(frozen=True)
class CudaExecutor:
    """A CUDA device; launches go to torch's current stream, or to ``stream`` if one is given."""

    arch: str
    device: torch.device
    num_sms: int
    stream: torch.cuda.Stream | None = None
    on_disk: bool = True

    def max_clusters(self, size: int) -> int:
        """See `Executor.max_clusters`; a share of a device is not asked, but divided."""
        if self.stream is not None or size == 1:
            return self.num_sms // size
        return _resident_clusters(self.device.index or 0, size)

    @contextmanager
    def active(self, *used: torch.Tensor | None) -> Iterator[int]:
        """See `Executor.active`."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the operands are made there
            for tensor in used:
                if tensor is not None:
                    tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            yield torch.cuda.current_stream(self.device).cuda_stream

    @contextmanager
    def fork(self) -> Iterator[int]:
        """See `Executor.fork`; by events, so that a CUDA graph captures both branches."""
        current, second = torch.cuda.current_stream(self.device), _second_stream(self.device)
        second.wait_stream(current)
        try:
            yield second.cuda_stream
        finally:
            current.wait_stream(second)

    def host_words(self, count: int) -> torch.Tensor:
        """See `Executor.host_words`: pinned, mapped into the device's address space."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)


@dataclass(frozen=True)
class EmulatorExecutor:
    """One rank of an open emulator; with several ranks its launches wait for `Emulator.run`."""

    emulator: Emulator
    rank: int = 0
    device: torch.device = torch.device("cpu")
    on_disk: bool = False

    @property
    def arch(self) -> str:
        """The emulated architecture."""
        return self.emulator.device.arch

    @property
    def num_sms(self) -> int:
        """SMs the emulated device claims."""
        return self.emulator.device.num_sms

    def max_clusters(self, size: int) -> int:
        """See `Executor.max_clusters`."""
        return self.num_sms // size

    @contextmanager
    def active(self, *used: torch.Tensor | None) -> Iterator[int]:
        """See `Executor.active`; the emulator itself keeps what a launch was given."""
        with self.emulator.rank(self.rank):
            yield 0

    @contextmanager
    def fork(self) -> Iterator[int]:
        """See `Executor.fork`; the emulator's streams wait for nothing, so more orders than a GPU's occur."""
        yield 1

    def host_words(self, count: int) -> torch.Tensor:
        """See `Executor.host_words`."""
        words = self.emulator.empty((count,), torch.int32)
        return words.zero_()


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
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
    arch = ARCH_OF_CAPABILITY[properties.major, properties.minor]
    return CudaExecutor(arch, torch.device("cuda", index), properties.multi_processor_count)


@cache  # the DSL compiles and loads a probe kernel to find out
def _resident_clusters(index: int, size: int) -> int:
    from cutlass.utils import HardwareInfo

    return int(HardwareInfo(index).get_max_active_clusters(size))


@cache
def why_no_cuda(index: int) -> str | None:
    """Why fused kernels cannot run on CUDA device ``index``, None if they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(index)
    if capability not in ARCH_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        return (
            f"device {index} has compute capability {capability[0]}.{capability[1]}; "
            f"kernels exist for {known}"
        )
    return None


def open_emulator() -> Emulator | None:
    """The emulator this process has open, if any; without importing it, for it cannot be open then."""
    module = sys.modules.get("overlap_gemm.emulator")
    return None if module is None else module.Emulator.current()
