"""`cudaMalloc` and related functions, for scripts that call driver or runtime through `cuda.bindings`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cute_emulator.host.device import ALIGNMENT
from cute_emulator.machine.memory import host_bytes

Range = tuple[int, int]
"""Address and bytes."""


class DeviceMemory:
    """Allocations, and copies and fills in stream order.

    Args:
        adopt: Callback for every storage that becomes device memory.
        in_order: Executes an operation after the launches before it, or stores it for a graph's replays.
        host_waits: Makes the host wait for the device.
        touched: Callback for a stream's accesses (what, stream, addresses and bytes read, addresses and bytes
            written, whether the host waits for it).
        by_engine: Submits a copy between device addresses to a copy engine, in stream order (stream, target,
            source, bytes), or returns False.
    """

    def __init__(
        self,
        adopt: Callable[[torch.UntypedStorage], None],
        in_order: Callable[[Callable[[], object]], None],
        host_waits: Callable[[], None],
        by_engine: Callable[[int, int, int, int], bool] = lambda *_: False,
        touched: Callable[[str, int, list[Range], list[Range], bool], object] = lambda *_: None,
    ) -> None:
        self._touched = touched
        self._adopt = adopt
        self._by_engine = by_engine
        self._in_order, self._host_waits = in_order, host_waits
        self._blocks: dict[int, torch.Tensor] = {}

    def allocate(self, size: int) -> int:
        """Returns the address of new memory, poisoned."""
        room = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        block = torch.from_numpy(room[begin : begin + size])
        self._adopt(block.untyped_storage())
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def register(self, address: Any, size: int, _flags: int) -> None:
        """Lets kernels access memory of the host, which stays the caller's."""
        block = torch.from_numpy(host_bytes(int(address), size))
        self._adopt(block.untyped_storage())
        self._blocks[block.data_ptr()] = block

    def free(self, address: Any) -> None:
        """Frees memory of `allocate`, or ends `register`, after all work of the device, as CUDA does."""
        self._host_waits()
        self._blocks.pop(int(address), None)

    def fill(self, address: Any, value: int, count: int, width: int, stream: Any = 0) -> None:
        """Sets `count` elements of `width` bytes."""
        pattern = (int(value) & (1 << 8 * width) - 1).to_bytes(width, "little") * int(count)

        def fill() -> None:
            ctypes.memmove(int(address), pattern, len(pattern))
            self._touched("a memset", int(stream), [], [(int(address), len(pattern))], False)

        self._in_order(fill)

    def copy(self, to: Any, source: Any, size: int, stream: Any = None) -> None:
        """Copies bytes between any of host and device; the host waits if no stream is passed."""
        target, begin, nbytes = _address(to), _address(source), int(size)

        def copy() -> None:
            ctypes.memmove(target, begin, nbytes)
            waits = stream is None
            self._touched("a memcpy", int(stream or 0), [(begin, nbytes)], [(target, nbytes)], waits)

        self._in_order(copy)

    def copy_in_stream(self, to: Any, source: Any, size: int, stream: Any = None) -> None:
        """Copies device memory concurrently with running kernels, if a copy engine supports the copy."""
        if not self._by_engine(int(stream or 0), int(to), int(source), int(size)):
            self.copy(to, source, size, stream or 0)


def _address(where: Any) -> int:
    return where.ctypes.data if isinstance(where, np.ndarray) else int(where)


def driver_functions(memory: DeviceMemory, pointer: type) -> dict[str, Callable[..., Any]]:
    """Returns the replacements for `cuda.bindings.driver`; `pointer` is its CUdeviceptr."""
    table: dict[str, Callable[..., Any]] = {
        "cuMemAlloc": lambda size: pointer(memory.allocate(size)),
        "cuMemFree": memory.free,
    }
    for tail, bits in itertools.product(("", "Async"), (8, 16, 32)):
        table[f"cuMemsetD{bits}{tail}"] = lambda to, value, count, stream=0, width=bits // 8: memory.fill(
            to, value, count, width, stream or 0
        )
    for kind in ("", "DtoD", "HtoD", "DtoH"):
        table[f"cuMemcpy{kind}"] = memory.copy
        table[f"cuMemcpy{kind}Async"] = lambda to, source, size, stream=0: memory.copy(
            to, source, size, stream or 0
        )
    table["cuMemcpyDtoDAsync"] = memory.copy_in_stream
    return table


def runtime_functions(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Returns the replacements for `cuda.bindings.runtime`."""
    table: dict[str, Callable[..., Any]] = {"cudaMalloc": memory.allocate, "cudaFree": memory.free}
    table |= {"cudaHostRegister": memory.register, "cudaHostUnregister": memory.free}
    for tail in ("", "Async"):
        table[f"cudaMemset{tail}"] = lambda to, value, size, stream=0: memory.fill(
            to, value, size, 1, stream or 0
        )
    table["cudaMemcpy"] = lambda to, source, size, *_: memory.copy(to, source, size)
    table["cudaMemcpyAsync"] = lambda to, source, size, kind=None, stream=0: memory.copy(
        to, source, size, stream or 0
    )
    return table
