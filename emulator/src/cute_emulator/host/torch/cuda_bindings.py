"""Stand-ins for cuda.bindings' driver and runtime calls, and for cuda.core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from cute_emulator.host.replace import replaced
from cute_emulator.host.torch import device_memory

if TYPE_CHECKING:
    from cute_emulator.host.torch.cuda_device import CudaDevices

Calls = dict[str, Callable[..., Any]]
DRIVER_VERSION = 13000


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Every replacement, to be entered; leaving them restores what was there."""
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime

    shared = _Shared(devices)
    for module, success, calls in (
        (driver, driver.CUresult.CUDA_SUCCESS, _driver_calls(devices, shared, driver)),
        (runtime, runtime.cudaError_t.cudaSuccess, _runtime_calls(devices, shared, runtime)),
    ):
        for name, call in calls.items():
            yield replaced(module, name, _with_status(success, call))
    yield from _core(devices)


def _with_status(success: Any, call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def with_status(*args: Any) -> tuple[Any, ...]:
        result = call(*args)
        return (success,) if result is None else (success, result)

    return with_status


class _Shared:
    """Calls that driver and runtime both have, by other names."""

    def __init__(self, devices: CudaDevices) -> None:
        self._devices = devices
        self._times: dict[int, float] = {}

    def accept(self, *_: Any) -> None:
        """There is nothing to do."""

    def synchronize(self, *_: Any) -> None:
        """Of a device, a stream or an event: all that the rank has launched has run."""
        self._devices.synchronize()

    def attribute(self, number: Any, _device: Any) -> int:
        """Of the device."""
        return self._devices.attribute(int(number))

    def record(self, event: Any, *_: Any) -> None:
        """Notes when the launches before an event have run."""
        self._devices.synchronize()
        self._times[int(event)] = time.perf_counter()

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds from one event to another."""
        return max((self._times[int(end)] - self._times[int(start)]) * 1e3, 1e-6)


def _driver_calls(devices: CudaDevices, shared: _Shared, driver: Any) -> Calls:
    return {
        "cuInit": shared.accept,
        "cuDriverGetVersion": lambda: DRIVER_VERSION,
        "cuDeviceGetCount": lambda: devices.count,
        "cuDeviceGet": driver.CUdevice,
        "cuDeviceGetAttribute": shared.attribute,
        "cuCtxGetCurrent": lambda: driver.CUcontext(1),
        "cuCtxGetDevice": lambda: driver.CUdevice(devices.current()),
        "cuCtxSetCurrent": shared.accept,
        "cuDevicePrimaryCtxRetain": lambda _: driver.CUcontext(1),
        "cuDevicePrimaryCtxRelease": shared.accept,
        "cuCtxSynchronize": shared.synchronize,
        "cuStreamCreate": lambda *_: driver.CUstream(next(devices.handles)),
        "cuStreamDestroy": shared.accept,
        "cuStreamSynchronize": shared.synchronize,
        "cuEventCreate": lambda *_: driver.CUevent(next(devices.handles)),
        "cuEventRecord": shared.record,
        "cuEventSynchronize": shared.synchronize,
        "cuEventElapsedTime": shared.elapsed,
        "cuEventDestroy": shared.accept,
        **device_memory.driver_functions(devices.memory, driver.CUdeviceptr),
    }


def _runtime_calls(devices: CudaDevices, shared: _Shared, runtime: Any) -> Calls:
    return {
        "cudaGetDevice": devices.current,
        "cudaSetDevice": shared.accept,
        "cudaGetDeviceCount": lambda: devices.count,
        "cudaDeviceGetAttribute": shared.attribute,
        "cudaDriverGetVersion": lambda: DRIVER_VERSION,
        "cudaDeviceSynchronize": shared.synchronize,
        "cudaStreamCreate": lambda: runtime.cudaStream_t(next(devices.handles)),
        "cudaStreamDestroy": shared.accept,
        "cudaStreamSynchronize": shared.synchronize,
        "cudaEventCreate": lambda *_: runtime.cudaEvent_t(next(devices.handles)),
        "cudaEventRecord": shared.record,
        "cudaEventSynchronize": shared.synchronize,
        "cudaEventElapsedTime": shared.elapsed,
        "cudaEventDestroy": shared.accept,
        "cudaLibraryUnload": shared.accept,
        **device_memory.runtime_functions(devices.memory),
    }


def _core(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    try:
        import cuda.core
    except ImportError:  # the DSL brings cuda.bindings alone
        return

    class Device:
        """`cuda.core.Device`."""

        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def set_current(self) -> None:
            return None

        def sync(self) -> None:
            devices.synchronize()

        def create_stream(self, *_: Any, **__: Any) -> Any:
            return torch.cuda.Stream()

        @property
        def compute_capability(self) -> Any:
            major, minor = devices.properties.capability
            return SimpleNamespace(major=major, minor=minor)

    yield replaced(cuda.core, "Device", Device)
    with contextlib.suppress(ImportError):
        import cuda.core.experimental as experimental

        yield replaced(experimental, "Device", Device)
