"""`cudaMalloc` and its kin, for scripts that call the driver or the runtime through `cuda.bindings`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cute_emulator.host.device import ALIGNMENT


class DeviceMemory:
    """What was allocated, and copies and fills in stream order.

    Args:
        adopt: Told of every storage that becomes device memory.
        in_order: Carries out an operation after the launches before it, or keeps it for a graph's replays.
        beside: Gives a copy of bytes from one device address to another to a copy engine, in the order of its
            stream (stream, target, source, bytes), or returns False.
    """

    def __init__(
        self,
        adopt: Callable[[torch.UntypedStorage], None],
        in_order: Callable[[Callable[[], object]], None],
        beside: Callable[[int, int, int, int], bool] = lambda *_: False,
    ) -> None:
        self._adopt = adopt
        self._beside = beside
        self._in_order = in_order
        self._blocks: dict[int, torch.Tensor] = {}

    def allocate(self, size: int) -> int:
        """The address of new memory, poisoned."""
        room = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        block = torch.from_numpy(room[begin : begin + size])
        self._adopt(block.untyped_storage())
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, address: Any) -> None:
        """Frees what `allocate` gave; kernels that still touch it are reported."""
        self._in_order(lambda: None)
        self._blocks.pop(int(address), None)

    def fill(self, address: Any, value: int, count: int, width: int) -> None:
        """Sets `count` elements of `width` bytes."""
        pattern = (int(value) & (1 << 8 * width) - 1).to_bytes(width, "little") * int(count)
        self._in_order(lambda: ctypes.memmove(int(address), pattern, len(pattern)))

    def copy(self, to: Any, source: Any, size: int) -> None:
        """Copies bytes, between host and device alike."""
        self._in_order(lambda: ctypes.memmove(_address(to), _address(source), int(size)))

    def copy_in_stream(self, to: Any, source: Any, size: int, stream: Any = None) -> None:
        """Copies bytes of device memory beside running kernels, where that makes a difference."""
        if not self._beside(int(stream or 0), int(to), int(source), int(size)):
            self.copy(to, source, size)


def _address(where: Any) -> int:
    return where.ctypes.data if isinstance(where, np.ndarray) else int(where)


def driver_functions(memory: DeviceMemory, pointer: type) -> dict[str, Callable[..., Any]]:
    """Those of `cuda.bindings.driver`; `pointer` is its CUdeviceptr."""
    table: dict[str, Callable[..., Any]] = {
        "cuMemAlloc": lambda size: pointer(memory.allocate(size)),
        "cuMemFree": memory.free,
    }
    for tail, bits in itertools.product(("", "Async"), (8, 16, 32)):
        table[f"cuMemsetD{bits}{tail}"] = lambda to, value, count, *_, width=bits // 8: memory.fill(
            to, value, count, width
        )
    for kind, tail in itertools.product(("", "DtoD", "HtoD", "DtoH"), ("", "Async")):
        table[f"cuMemcpy{kind}{tail}"] = lambda to, source, size, *_: memory.copy(to, source, size)
    table["cuMemcpyDtoDAsync"] = memory.copy_in_stream
    return table


def runtime_functions(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Those of `cuda.bindings.runtime`."""
    table: dict[str, Callable[..., Any]] = {"cudaMalloc": memory.allocate, "cudaFree": memory.free}
    for tail in ("", "Async"):
        table[f"cudaMemset{tail}"] = lambda to, value, size, *_: memory.fill(to, value, size, 1)
        table[f"cudaMemcpy{tail}"] = lambda to, source, size, *_: memory.copy(to, source, size)
    return table
