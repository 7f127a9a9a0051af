"""Triton in the emulator: kernels of ``@triton.jit`` are compiled for the emulated device, and run on it.

While an emulator is open, Triton's driver is replaced. Triton itself compiles, down to ptxas. The driver
reports the device, loads a kernel's PTX instead of NVIDIA's machine code, and launches it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from cute_emulator.host.replace import replaced
from cute_emulator.host.torch.torch_mode import plays_host_memory, serves_cuda
from cute_emulator.units.tma_encode import encode_tiled

if TYPE_CHECKING:
    from cute_emulator.host.emulator import Emulator

MAX_THREADS = 1024
COMPILED_SO = frozenset(("mbarrier-init",))
"""Findings caused by Triton's compiler (3.9): without a cluster it emits no fence after `mbarrier.init`."""
_HALVES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
"""Types that Python's float is rounded to; the PTX determines parameters of 32 and 64 bits."""


@contextlib.contextmanager
def served(emulator: Emulator) -> Iterator[None]:
    """Launches Triton's kernels inside the block in an emulator, if Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    import triton.testing
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    ours = _Driver(emulator)
    with contextlib.ExitStack() as changes:
        changes.enter_context(replaced(driver, "_active", ours))
        changes.enter_context(replaced(CompiledKernel, "_init_handles", _with_ptx(CompiledKernel)))
        for name in ("do_bench", "do_bench_cudagraph"):
            changes.enter_context(replaced(triton.testing, name, ours.run_once))
        yield


def _with_ptx(kernel_class: Any) -> Callable[[Any], None]:
    load = kernel_class._init_handles

    def init_handles(kernel: Any) -> None:
        kernel.kernel = _of_this_file(kernel), _registers(kernel.asm["cubin"])
        load(kernel)
        kernel.module = None  # there is nothing to unload, and at exit no driver

    return init_handles


def _of_this_file(kernel: Any) -> str:
    """Returns a kernel's PTX with the path of its file.

    Cached PTX may be of a copy of the kernel in another file.
    """
    ptx: str = kernel.asm["ptx"]
    code = getattr(getattr(getattr(kernel.src, "fn", None), "fn", None), "__code__", None)
    if code is None:
        return ptx
    return re.sub(r'(\.file\s+1 )"[^"]*"', lambda m: f'{m[1]}"{code.co_filename}"', ptx, count=1)


def _registers(cubin: bytes) -> int:
    """Returns the registers of a thread, by the attributes of this kind (EIATTR_REGCOUNT) in machine code."""
    counts = re.findall(rb"\x04\x2f\x08\x00.{4}(.{4})", cubin, re.S)
    return max(int.from_bytes(count, "little") for count in counts)


class _Driver:
    """Replacement of Triton's driver (`triton.backends.driver.GPUDriver`)."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._measuring = False
        self.utils = self

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Returns the launcher of a kernel."""
        return _Launcher(src, metadata)

    # --- the device

    def get_current_target(self) -> Any:
        """Returns Triton's compile target."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.get_current_device(), 32)

    def get_current_device(self) -> int:
        """Returns the compute capability as device number: Triton caches compiled kernels by device."""
        major, minor = self._emulator.device.capability
        return 10 * major + minor

    def set_current_device(self, device: int) -> None:
        """Does nothing: each rank has one device."""

    def get_device_capability(self, _device: int = 0) -> tuple[int, int]:
        """Returns the major and minor compute capability."""
        return self._emulator.device.capability

    def get_current_stream(self, _device: int = 0) -> int:
        """Returns the handle of the current stream."""
        return torch.cuda.current_stream().cuda_stream if serves_cuda() else 0

    def get_active_torch_device(self) -> torch.device:
        """Returns the device of a script's tensors; it is the CPU if the script itself opens the emulator."""
        return torch.device("cuda", torch.cuda.current_device()) if serves_cuda() else torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Returns the module that times kernels and creates streams."""
        return torch.cuda

    def get_device_properties(self, _device: int = 0) -> dict[str, int]:
        """Returns the properties that kernels adapt to; the clock rates are those of an H100."""
        device = self._emulator.device
        return {
            "max_shared_mem": device.attribute(97),
            "max_num_regs": device.attribute(12),
            "multiprocessor_count": device.num_sms,
            "warpSize": 32,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        }

    # --- kernels

    def load_binary(self, name: str, code: tuple[str, int], _shared: int, _device: int) -> tuple[Any, ...]:
        """Returns module, function, registers, spills, and largest number of threads."""
        ptx, registers = code
        return self, (ptx, name), registers, 0, MAX_THREADS

    def unload_module(self, _module: Any) -> None:
        """Does nothing: nothing is loaded."""

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """Calls `Emulator.launch`, unless an autotuner compares configurations."""
        if not self._measuring:
            self._emulator.launch(*args, **kwargs)

    def fill_tma_descriptor_tiled(
        self, address: int, swizzle: int, nbytes: int, kind: int, box: Sequence[int], shape: Sequence[int],
        strides: Sequence[int], padding: int,
    ) -> bytes:  # fmt: skip
        """Returns a tensor map, from extents and strides (in elements), the outermost first."""
        steps = [nbytes * stride for stride in strides[-2::-1]]
        ones = [1] * len(box)
        tensor_map = encode_tiled(
            kind, address, shape[::-1], steps, box[::-1], ones, 0, swizzle, 2, int(padding == 1)
        )
        return tensor_map.encode()

    # --- measurements

    def get_benchmarker(self) -> Callable[..., Any]:
        """Returns the benchmark function of an autotuner, which then uses the first configuration that fits.

        Time is not meaningful here. Each configuration is compiled; those that exceed the device's resources
        fail.
        """

        def compile_only(call: Callable[[], Any], quantiles: Sequence[float] = (), **_: Any) -> list[float]:
            self._measuring = True
            try:
                call()
            finally:
                self._measuring = False
            return [1.0] * len(quantiles)

        return compile_only

    def run_once(self, call: Callable[[], Any], *_: Any, quantiles: Any = None, **__: Any) -> Any:
        """Replaces `triton.testing.do_bench`.

        Runs once and returns a nanosecond for each warp instruction.
        """
        self._emulator.finish()
        before = self._emulator.report.instructions
        call()
        self._emulator.finish()
        time = max(self._emulator.report.instructions - before, 1) * 1e-6
        return time if quantiles is None else [time] * len(quantiles)


class _Launcher:
    """Launcher of one kernel (`triton.backends.nvidia.driver.CudaLauncher`)."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._signature = dict(src.signature)
        self._metadata = metadata

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: tuple[str, str], packed: Any, launch: Any,
        enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        if x * y * z == 0:
            return
        metadata, driver = self._metadata, _active()
        if enter is not None:
            enter(launch)
        scratch = None
        if metadata.global_scratch_size:
            from triton.runtime._allocation import _allocator

            nbytes = x * y * z * metadata.num_ctas * metadata.global_scratch_size
            scratch = _allocator.get()(nbytes, metadata.global_scratch_align, stream)
        if metadata.profile_scratch_size:
            raise NotImplementedError("instrumented and profiled Triton kernels are not supported")
        maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
        values: dict[str, Any] = {}
        reached: list[Any] = []
        for (name, kind), value in zip(self._signature.items(), args, strict=True):
            _flatten(name, kind, value, maps, values, reached)
        ptx, entry = function
        driver.launch(
            ptx, entry, (x * metadata.num_ctas, y, z), (32 * metadata.num_warps, 1, 1),
            values | {"global scratch": scratch, "profile scratch": None},
            cluster=(metadata.num_ctas, 1, 1), shared=metadata.shared, stream=stream,
            cooperative=bool(metadata.launch_cooperative_grid), programmatic=bool(metadata.launch_pdl),
            reaches=reached, ignore=COMPILED_SO,
        )  # fmt: skip
        if leave is not None:
            leave(launch)


def _active() -> Any:
    """Returns the driver of the open emulator; a kernel may have been compiled in an earlier one."""
    from triton.runtime import driver

    return driver.active


def _flatten(
    name: str, kind: Any, value: Any, maps: Iterator[Any], values: dict[str, Any], reached: list[Any]
) -> None:
    """Adds the parameters of one argument of a Triton kernel: none for a constant, several for a tuple."""
    if kind == "constexpr":
        return
    if isinstance(kind, tuple):
        for n, (part, each) in enumerate(zip(kind, value, strict=True)):
            _flatten(f"{name}[{n}]", part, each, maps, values, reached)
    elif kind.startswith("tensordesc"):
        from triton.backends.nvidia.driver import make_tensordesc_arg

        reached.append(_memory(name, value.base))
        parts = make_tensordesc_arg(value, next(maps, None), None)
        for n, part in enumerate(parts):
            values[f"{name}.{n}"] = _memory(name, part) if hasattr(part, "data_ptr") else part
    elif kind[0] == "*":
        values[name] = _memory(name, value)
    else:
        values[name] = _HALVES[kind](value) if kind in _HALVES else value


def _memory(name: str, value: Any) -> Any:
    """Returns the tensor of a pointer, or its address."""
    tensor = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
    if plays_host_memory(tensor):
        raise ValueError(f"Pointer argument {name} cannot be accessed from Triton (cpu tensor?)")
    return value if isinstance(value, torch.Tensor | int | None) else value.data_ptr()
