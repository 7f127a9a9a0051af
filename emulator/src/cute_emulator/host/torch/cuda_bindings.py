"""Replacements of cuda.bindings' driver and runtime calls, and of cuda.core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from cute_emulator.host.replace import replaced
from cute_emulator.host.torch import device_memory
from cute_emulator.machine.streams import NOWHERE, StreamEvent

if TYPE_CHECKING:
    from cute_emulator.host.torch.cuda_device import CudaDevices

Calls = dict[str, Callable[..., Any]]
DRIVER_VERSION = 13000
NON_BLOCKING = 1
"""Flag of a stream without implicit order with the default stream."""


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields every replacement as a context manager; its exit restores the original."""
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
    """Calls that driver and runtime have under different names."""

    def __init__(self, devices: CudaDevices) -> None:
        self._devices = devices
        self._times: dict[int, float] = {}
        self._places: dict[int, StreamEvent] = {}

    def accept(self, *_: Any) -> None:
        """Does nothing."""

    def synchronize(self, *_: Any) -> None:
        """Waits for the device."""
        self._devices.host_waits()

    def await_stream(self, stream: Any) -> None:
        """Waits for a stream."""
        self._devices.host_waits(int(stream))

    def await_event(self, event: Any) -> None:
        """Waits for an event."""
        self._devices.host_waits(event=self._places.get(int(event), NOWHERE))

    def create(self, stream: Any, flags: Any = 0) -> Any:
        """Registers a stream: it and the default stream wait for each other, unless it is non-blocking."""
        self._devices.emulator.timelines.concurrent()
        timeline = self._devices.timeline()
        if timeline is not None and not int(flags) & NON_BLOCKING:
            timeline.made_blocking(int(stream))
        return stream

    def wait(self, stream: Any, event: Any, *_: Any) -> None:
        """Makes a stream wait for an event."""
        rank, place = self._devices.current(), self._places.get(int(event), NOWHERE)
        self._devices.do(lambda: self._devices.emulator.wait_event(rank, int(stream), place))

    def attribute(self, number: Any, _device: Any) -> int:
        """Returns an attribute of the device."""
        return self._devices.attribute(int(number))

    def record(self, event: Any, stream: Any = 0, *_: Any) -> None:
        """Records the work before an event, and the time at which the launches before it have run."""
        rank = self._devices.current()
        self._places[int(event)] = self._devices.emulator.record_event(rank, int(stream))
        self._devices.synchronize()
        self._times[int(event)] = time.perf_counter()

    def elapsed(self, start: Any, end: Any) -> float:
        """Returns the milliseconds from one event to another."""
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
        "cuStreamCreate": lambda flags=0: shared.create(driver.CUstream(next(devices.handles)), flags),
        "cuStreamDestroy": shared.accept,
        "cuStreamSynchronize": shared.await_stream,
        "cuStreamWaitEvent": shared.wait,
        "cuEventCreate": lambda *_: driver.CUevent(next(devices.handles)),
        "cuEventRecord": shared.record,
        "cuEventSynchronize": shared.await_event,
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
        "cudaStreamCreate": lambda: shared.create(runtime.cudaStream_t(next(devices.handles))),
        "cudaStreamCreateWithFlags": lambda flags=0: shared.create(
            runtime.cudaStream_t(next(devices.handles)), flags
        ),
        "cudaStreamWaitEvent": shared.wait,
        "cudaStreamDestroy": shared.accept,
        "cudaStreamSynchronize": shared.await_stream,
        "cudaEventCreate": lambda *_: runtime.cudaEvent_t(next(devices.handles)),
        "cudaEventRecord": shared.record,
        "cudaEventSynchronize": shared.await_event,
        "cudaEventElapsedTime": shared.elapsed,
        "cudaEventDestroy": shared.accept,
        "cudaLibraryUnload": shared.accept,
        **device_memory.runtime_functions(devices.memory),
    }


def _core(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    try:
        import cuda.core
    except ImportError:  # the DSL installs cuda.bindings only
        return

    class Device:
        """`cuda.core.Device`."""

        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def set_current(self) -> None:
            return None

        def sync(self) -> None:
            devices.host_waits()

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
