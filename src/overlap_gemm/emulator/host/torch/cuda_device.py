"""Stand-ins for the CUDA that a script sees: torch.cuda, cuda.bindings, cuda.core, the DSL's queries.

Work is ordered as CUDA orders it, or more strictly: launches of one stream run in order, streams wait for
each other and for events, torch's own operations wait for all launches. Times are the emulation's.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from overlap_gemm.emulator.host.device import L2_BYTES
from overlap_gemm.emulator.host.graphs import classes
from overlap_gemm.emulator.host.replace import replaced
from overlap_gemm.emulator.host.torch import device_memory
from overlap_gemm.emulator.host.torch.device_memory import DeviceMemory

if TYPE_CHECKING:
    from overlap_gemm.emulator.host.emulator import Emulator
    from overlap_gemm.emulator.machine.streams import StreamEvent

MEMORY_BYTES = 96 << 30


class CudaDevices:
    """What torch.cuda and its kin ask of the emulator.

    Args:
        emulator: Open.
        current: Index of the calling thread's device.
        synchronize: Waits until the calling rank's launches have run.
    """

    def __init__(
        self, emulator: Emulator, current: Callable[[], int], synchronize: Callable[[], None]
    ) -> None:
        self.emulator = emulator
        self.captures = emulator.captures
        self.properties = emulator.device
        self.count = emulator.ranks
        self.current = current
        self.synchronize = synchronize
        self.handles = itertools.count(0x10)
        self.memory = DeviceMemory(
            lambda storage: emulator.adopt(storage, current()), self.in_order, self.copy_beside
        )

    def instructions(self) -> int:
        """Warp instructions executed so far: what benchmarks measure."""
        return self.emulator.report.instructions

    def do(self, operation: Callable[[], object]) -> None:
        """Carries an operation out, in a capture at each replay."""
        capture = self.captures.get(self.current())
        if capture is not None:
            capture.keep(operation)
        else:
            operation()

    def in_order(self, operation: Callable[[], object]) -> None:
        """Carries an operation out behind the launches before it; in a capture, in each replay."""
        self.do(self.synchronize)
        self.do(operation)

    def copy_beside(self, stream: int, target: int, source: int, nbytes: int) -> bool:
        """Gives a copy to a copy engine, if the rank has launches that it runs beside and engines take it."""
        rank = self.current()
        whole = nbytes == 4 or (nbytes | target | source) % 16 == 0
        if not whole or not (rank in self.captures or self.emulator.has_pending(rank)):
            return False
        self.do(lambda: self.emulator.copy(rank, stream, target, source, nbytes))
        return True

    def wait_stream(self, stream: int, other: int) -> None:
        """What a stream is given from now on begins behind what another one has."""
        rank = self.current()
        self.do(lambda: self.emulator.wait_stream(rank, stream, other))

    def attribute(self, number: int) -> int:
        """Value of a device attribute, numbered as in `cudaDeviceAttr` and `CUdevice_attribute` alike."""
        if number == 38:  # L2 cache size
            return L2_BYTES
        return self.properties.attribute(number)


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Every replacement, to be entered; leaving them restores what was there."""
    yield from _torch_cuda(devices)
    yield from _bindings(devices)
    yield from _benchmarks(devices)


def _torch_cuda(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    default = _make_stream_class(devices)
    streams = SimpleNamespace(default=default(handle=0), current=None)
    streams.current = streams.default

    @contextlib.contextmanager
    def stream(which: Any) -> Iterator[None]:
        if which is None:
            yield
            return
        before, streams.current = streams.current, which
        try:
            yield
        finally:
            streams.current = before

    class Event:
        """`torch.cuda.Event`: recording notes the time and the place in the stream."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._time: float | None = None
            self._place: StreamEvent | None = None
            self.cuda_event = next(devices.handles)

        def record(self, stream: Any = None) -> None:
            self._time = time.perf_counter()
            rank, handle = devices.current(), (stream or streams.current).cuda_stream

            def mark() -> None:
                self._place = devices.emulator.record_event(rank, handle)

            devices.do(mark)

        def wait(self, stream: Any = None) -> None:
            rank, handle = devices.current(), (stream or streams.current).cuda_stream

            def wait() -> None:
                if self._place is not None:
                    devices.emulator.wait_event(rank, handle, self._place)

            devices.do(wait)

        def synchronize(self) -> None:
            devices.synchronize()
            self._time = self._time or time.perf_counter()

        def query(self) -> bool:
            devices.synchronize()
            return True

        def elapsed_time(self, end: Any) -> float:
            if self._time is None or end._time is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            return max((end._time - self._time) * 1e3, 1e-6)

    cuda_graph, graph = classes(devices.captures, devices.current, devices.synchronize)

    def device_properties(device: Any = None) -> SimpleNamespace:
        major, minor = devices.properties.capability
        index = getattr(device, "index", device)
        return SimpleNamespace(
            uuid=uuid.UUID(int=devices.current() if index is None else index),
            name=f"overlap_gemm emulator {devices.properties.arch}",
            major=major,
            minor=minor,
            total_memory=MEMORY_BYTES,
            multi_processor_count=devices.properties.num_sms,
            L2_cache_size=L2_BYTES,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            shared_memory_per_block_optin=devices.attribute(97),
        )

    profile = torch.profiler.profile
    yield replaced(
        torch.profiler,
        "profile",
        lambda *_, activities=None, **options: profile(
            activities=[torch.profiler.ProfilerActivity.CPU], **options
        ),
    )
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing(),
        "_lazy_init": _nothing(),
        "device_count": lambda: devices.count,
        "current_device": devices.current,
        "set_device": _nothing(),
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_: devices.synchronize(),
        "get_device_capability": lambda *_: devices.properties.capability,
        "get_device_name": lambda *_: device_properties().name,
        "get_device_properties": device_properties,
        "can_device_access_peer": lambda *_: True,
        "empty_cache": _nothing(),
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": _nothing(),
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
        "is_current_stream_capturing": lambda: devices.current() in devices.captures,
        "Stream": default,
        "ExternalStream": lambda handle, *_: default(handle=handle),
        "Event": Event,
        "stream": stream,
        "current_stream": lambda *_: streams.current,
        "default_stream": lambda *_: streams.default,
        "set_stream": lambda which: setattr(streams, "current", which),
        "CUDAGraph": cuda_graph,
        "graph": graph,
    }.items():
        yield replaced(torch.cuda, name, value)
    yield replaced(torch._C, "_cuda_getCurrentRawStream", lambda *_: streams.current.cuda_stream)


def _nothing() -> Callable[..., None]:
    """A function that does nothing, of its own: torch._dynamo tells functions of torch by identity."""
    return lambda *_, **__: None


def _make_stream_class(devices: CudaDevices) -> type:
    class Stream:
        """`torch.cuda.Stream`: a handle; launches carry it."""

        def __init__(
            self, device: Any = None, priority: int = 0, handle: int | None = None, **_: Any
        ) -> None:
            self.cuda_stream = next(devices.handles) if handle is None else handle
            self.device = torch.device("cuda", devices.current())
            self.priority = priority

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

        def __hash__(self) -> int:
            return hash(self.cuda_stream)

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.cuda_stream

        def synchronize(self) -> None:
            devices.synchronize()

        def wait_stream(self, stream: Any) -> None:
            devices.wait_stream(self.cuda_stream, stream.cuda_stream)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or torch.cuda.Event()
            event.record(self)
            return event

        def query(self) -> bool:
            devices.synchronize()
            return True

        def __enter__(self) -> Any:
            self._entered = torch.cuda.stream(self)  # type: ignore[arg-type]
            self._entered.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._entered.__exit__(*error)

    return Stream


def _bindings(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime
    import cuda.core

    times: dict[int, float] = {}

    def record(event: Any, *_: Any) -> None:
        devices.synchronize()
        times[int(event)] = time.perf_counter()

    def elapsed(start: Any, end: Any) -> float:
        return max((times[int(end)] - times[int(start)]) * 1e3, 1e-6)

    def synchronize(*_: Any) -> None:
        devices.synchronize()

    def attribute(number: Any, _device: Any) -> int:
        return devices.attribute(int(number))

    def accept(*_: Any) -> None:
        return None

    driver_functions: dict[str, Callable[..., Any]] = {
        "cuInit": accept,
        "cuDriverGetVersion": lambda: 13000,
        "cuDeviceGetCount": lambda: devices.count,
        "cuDeviceGet": lambda index: driver.CUdevice(index),
        "cuDeviceGetAttribute": attribute,
        "cuCtxGetCurrent": lambda: driver.CUcontext(1),
        "cuCtxGetDevice": lambda: driver.CUdevice(devices.current()),
        "cuCtxSetCurrent": accept,
        "cuDevicePrimaryCtxRetain": lambda _: driver.CUcontext(1),
        "cuDevicePrimaryCtxRelease": accept,
        "cuCtxSynchronize": synchronize,
        "cuStreamCreate": lambda *_: driver.CUstream(next(devices.handles)),
        "cuStreamDestroy": accept,
        "cuStreamSynchronize": synchronize,
        "cuEventCreate": lambda *_: driver.CUevent(next(devices.handles)),
        "cuEventRecord": record,
        "cuEventSynchronize": synchronize,
        "cuEventElapsedTime": elapsed,
        "cuEventDestroy": accept,
        **device_memory.driver_functions(devices.memory, driver.CUdeviceptr),
    }
    runtime_functions: dict[str, Callable[..., Any]] = {
        "cudaGetDevice": lambda: devices.current(),
        "cudaSetDevice": accept,
        "cudaGetDeviceCount": lambda: devices.count,
        "cudaDeviceGetAttribute": attribute,
        "cudaDriverGetVersion": lambda: 13000,
        "cudaDeviceSynchronize": synchronize,
        "cudaStreamCreate": lambda: runtime.cudaStream_t(next(devices.handles)),
        "cudaStreamDestroy": accept,
        "cudaStreamSynchronize": synchronize,
        "cudaEventCreate": lambda *_: runtime.cudaEvent_t(next(devices.handles)),
        "cudaEventRecord": record,
        "cudaEventSynchronize": synchronize,
        "cudaEventElapsedTime": elapsed,
        "cudaEventDestroy": accept,
        "cudaLibraryUnload": accept,
        **device_memory.runtime_functions(devices.memory),
    }
    for module, success, functions in (
        (driver, driver.CUresult.CUDA_SUCCESS, driver_functions),
        (runtime, runtime.cudaError_t.cudaSuccess, runtime_functions),
    ):
        for name, function in functions.items():
            yield replaced(module, name, _with_status(success, function))

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


def _with_status(success: Any, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any) -> tuple[Any, ...]:
        result = function(*args)
        return (success,) if result is None else (success, result)

    return call


def _benchmarks(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    import cutlass.cute.testing
    import cutlass.testing

    def benchmark(
        callable: Callable[..., Any],
        *,
        kernel_arguments: Any = None,
        workspace_generator: Callable[[], Any] | None = None,
        **_: Any,
    ) -> float:
        """Runs the kernel once; takes a nanosecond for each warp instruction, so that choices repeat."""
        arguments = workspace_generator() if workspace_generator is not None else kernel_arguments
        return measure(callable, *arguments.args, **arguments.kwargs)

    def measure(callable: Callable[..., Any], *args: Any, **named: Any) -> float:
        devices.synchronize()
        start = devices.instructions()
        callable(*args, **named)
        devices.synchronize()
        return max(devices.instructions() - start, 1) * 1e-3

    def for_autotune(
        callable: Callable[..., Any],
        *args: Any,
        warmup_iterations: int,
        iterations: int,
        use_cold_l2: bool,
        print_verbose: bool,
        current_stream: Any = None,
        **named: Any,
    ) -> float:
        """What `tune` compares; it leaves out a configuration that fails."""
        return measure(callable, *args, **named)

    for module in (cutlass.testing, cutlass.cute.testing):
        for name, function in (("benchmark", benchmark), ("_benchmark_for_autotune", for_autotune)):
            if hasattr(module, name):
                yield replaced(module, name, function)
