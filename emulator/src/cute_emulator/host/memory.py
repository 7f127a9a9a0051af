"""Host memory that kernels may access: extents of tensors, and one symmetric heap per rank."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.memory import Named

ALIGNMENT = 512
"""Bytes; the alignment of NVSHMEM's symmetric heap."""

GUARD = 512
"""Bytes between two allocations that belong to none, so that an overrun is detected."""

_PROT_NONE = 0
# Python 3.11's mmap has no name for it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def extent(tensor: Any) -> tuple[int, int]:
    """Returns (address, bytes) of the range that the elements of a tensor or an array span."""
    it = named(tensor, "")
    if math.prod(it.shape) == 0:
        return it.address, 0
    last = sum((n - 1) * s for n, s in zip(it.shape, it.strides, strict=True))
    return it.address, -(-(last + 1) * it.bits // 8)


def named(tensor: Any, name: str) -> Named:
    """Returns a torch tensor, a NumPy array or a DSL runtime tensor as `Named`, for findings.

    Raises:
        ValueError: A NumPy array is not writable, or a stride is negative or no multiple of the element's
            size.
    """
    if isinstance(tensor, Named):
        return tensor
    if isinstance(tensor, torch.Tensor):
        bits = tensor.element_size() * 8
        return Named(name, tensor.data_ptr(), bits, tuple(tensor.shape), tensor.stride())
    if isinstance(tensor, np.ndarray):
        size = tensor.itemsize
        if not tensor.flags.writeable or any(step < 0 or step % size for step in tensor.strides):
            raise ValueError(
                f"{name}: an array must be writable, its strides positive and whole elements of {size} "
                f"bytes; writable: {tensor.flags.writeable}, strides: {tensor.strides}"
            )
        steps = tuple(step // size for step in tensor.strides)
        return Named(name, tensor.ctypes.data, 8 * size, tensor.shape, steps)
    width: int = tensor.element_type.width
    return Named(name, tensor.data_ptr, width, _flat(tensor.shape), _flat(tensor.stride))


def _flat(tree: Any) -> tuple[int, ...]:
    if isinstance(tree, (tuple, list)):
        return tuple(leaf for branch in tree for leaf in _flat(branch))
    return (int(tree),)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a dense tensor with 0xFF bytes (NaN in every float type, -1 in signed integers); returns it."""
    tensor.view(-1).view(torch.uint8).fill_(0xFF)
    return tensor


@dataclass(frozen=True)
class Symmetric:
    """Allocation at the same offset on every rank.

    Attributes:
        tensors: Tensor of each rank, poisoned.
        multicast: Address of all tensors together, for `multimem` instructions and bulk stores only.
        nbytes: Bytes of one rank's tensor.
    """

    tensors: tuple[torch.Tensor, ...]
    multicast: int
    nbytes: int

    def __getitem__(self, rank: int) -> torch.Tensor:
        return self.tensors[rank]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Returns the base address of each rank's tensor."""
        return tuple(t.data_ptr() for t in self.tensors)


@dataclass
class SymmetricHeap:
    """Equal address ranges, one for each rank and one for multicast; unused parts consume no memory.

    Attributes:
        ranks: Number of ranks.
        size: Bytes of one rank's range.
    """

    ranks: int
    size: int
    _maps: list[mmap.mmap] = field(default_factory=list)
    _views: list[torch.Tensor] = field(default_factory=list)
    _multicast: int = 0
    _used: int = 0

    def _reserve(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        for _ in range(self.ranks):
            region = mmap.mmap(-1, self.size, flags=flags)
            self._maps.append(region)
            self._views.append(torch.frombuffer(region, dtype=torch.uint8))
        base = _libc.mmap(None, self.size, _PROT_NONE, flags, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise EmulatorError(f"no {self.size} bytes of address space for the multicast range")
        self._multicast = base

    @property
    def bases(self) -> tuple[int, ...]:
        """Returns the base address of each rank's range."""
        if not self._maps:
            self._reserve()
        return tuple(view.data_ptr() for view in self._views)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Symmetric:
        """Allocates the same part of every rank's range; no part is freed before `close`.

        Raises:
            EmulatorError: The heap is full.
        """
        bases = self.bases
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._used
        self._used = -(-(start + nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        if self._used > self.size:
            raise EmulatorError(
                f"the symmetric heap of {self.size} bytes per rank is full: {nbytes} bytes requested, "
                f"{start} in use; open the emulator with a larger heap_bytes"
            )
        tensors = tuple(
            poison_(view[start : start + nbytes].view(dtype)).view(shape)
            for view in self._views[: len(bases)]
        )
        return Symmetric(tensors, self._multicast + start, nbytes)

    def close(self) -> None:
        """Releases the multicast range; a rank's range is released with its last tensor."""
        if self._multicast:
            _libc.munmap(self._multicast, self.size)
        self._multicast = 0
        self._views.clear()
        self._maps.clear()
