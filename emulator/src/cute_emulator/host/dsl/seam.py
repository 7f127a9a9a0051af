"""Seam between CuTe DSL and the emulator: changes of the DSL while an emulator is open.

The DSL's JIT resolves the CUDA runtime functions of its host code from a list of libraries; the seam adds a
library to the list (`elf`). So a function compiled while the seam is open is permanently bound to the
callbacks of `runtime_api`. The rest of the DSL's host path is unchanged: argument packing, shape checks,
tensor-map encoding and the launch configuration. `close` undoes all changes:

- the runtime library's path, in the environment (``CUTE_DSL_LIBS``) and in the settings read from it;
- the target architecture, likewise (``CUTE_DSL_ARCH``); any architecture may be run here;
- `Compiler.compile` keeps the PTX (`capture`);
- the number of devices is one;
- a tensor passed to the DSL is device memory: its pointers are to global memory, like a CUDA tensor's;
- the emulator is called for each tensor argument when it is packed, and after each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from cute_emulator.errors import CooperativeLaunchTooLargeError, EmulatorError
from cute_emulator.host.device import DeviceProperties
from cute_emulator.host.dsl import dlpack, tvm_ffi
from cute_emulator.host.dsl.capture import keep_ptx
from cute_emulator.host.dsl.elf import absolute_symbols, rename_undefined
from cute_emulator.host.dsl.jax_calls import JaxCalls
from cute_emulator.host.dsl.runtime_api import KernelCall, RuntimeApi
from cute_emulator.host.nvshmem import linked_for
from cute_emulator.host.replace import environment, replaced
from cute_emulator.host.torch.torch_mode import plays_host_memory

TESTED_DSL = "4.8.1"
"""Version of nvidia-cutlass-dsl that this seam was tested with."""

LIBRARY_NAME = "libcute_dsl_runtime.so"  # the DSL identifies its runtime by the end of the file name


class Seam:
    """Connection of this process, open or closed; functions bound to it run whenever it is open."""

    def __init__(self) -> None:
        self.api = RuntimeApi()
        self._jax = JaxCalls()
        self._path: Path | None = None
        self._opened: contextlib.ExitStack | None = None

    def open(
        self,
        device: Callable[[], DeviceProperties],
        launch: Callable[[KernelCall], None],
        pack: Callable[[Any], None],
        called: Callable[[], None],
    ) -> None:
        """Connects the DSL.

        Args:
            device: Function that returns the properties of the calling rank's device; its arch becomes the
                default target of compiles.
            launch: Receiver of each kernel call of the host code.
            pack: Receiver of each tensor argument (the DSL's runtime tensor or a torch tensor) of a call,
                before the call.
            called: Callback after a compiled function has returned, and after a compile.

        Raises:
            EmulatorError: An emulator is already open.
        """
        if self._opened is not None:
            raise EmulatorError(
                "an emulator is open already; this process runs one at a time (python -m "
                "cute_emulator opens one: a script that opens its own is started without it)"
            )
        self._opened = contextlib.ExitStack()
        try:
            for change in self._changes(device, pack, called):
                self._opened.enter_context(change)
        except BaseException:
            self.close()
            raise
        self.api.launch, self.api.device = launch, device

    def close(self) -> None:
        """Undoes `open`."""
        if self._opened is not None:
            self._opened.close()
        self._opened, self.api.launch, self.api.device = None, None, None

    def library(self) -> Path:
        """Returns the shared object for the DSL's JIT, made once per process."""
        if self._path is None:
            symbols = {**_real_helpers(), **self.api.symbols()}
            symbols |= {seam_name(name): address for name, address in symbols.items()}
            self._folder = tempfile.TemporaryDirectory(prefix="overlap_gemm_seam_")
            path = Path(self._folder.name) / LIBRARY_NAME
            path.write_bytes(absolute_symbols(symbols, LIBRARY_NAME))
            loaded = ctypes.CDLL(str(path))
            for name, address in symbols.items():
                if ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value != address:
                    raise EmulatorError(
                        "this system's dynamic linker moves absolute symbols; glibc 2.28 or newer is needed"
                    )
            self._path = path
        return self._path

    def _changes(
        self, device: Callable[[], DeviceProperties], pack: Callable[[Any], None], called: Callable[[], None]
    ) -> Iterator[contextlib.AbstractContextManager[None]]:
        library = str(self.library())
        yield environment("CUTE_DSL_LIBS", library)
        yield environment("CUTE_DSL_ARCH", device().arch)
        from cutlass.base_dsl.compiler import Compiler
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.base_dsl.jit_executor import JitExecutor
        from cutlass.cute.runtime import _Tensor
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
        from cutlass.cutlass_dsl.cutlass import CuTeDSL, CuteExperimentalDSL, CutlassBaseDSL

        yield from _binding_to_seam_names()
        function = CudaDialectJitCompiledFunction
        for dialect in (CuTeDSL, CuteExperimentalDSL):
            settings = dialect._get_dsl().envar
            yield replaced(settings, "shared_libs", library)
            yield replaced(settings, "_arch", device().arch)
        for dsl in (BaseDSL, CutlassBaseDSL):
            yield replaced(dsl, "_runtime_can_run_compiled", lambda *_: True)
        yield replaced(function, "num_devices", 1)
        trace = _linking_nvshmem(BaseDSL.generate_mlir)
        yield replaced(BaseDSL, "generate_mlir", self._ending(trace, called))
        yield replaced(Compiler, "compile", self._checked(keep_ptx(Compiler.compile)))
        for made in (function, tvm_ffi.LoadedFunction):
            yield replaced(made, "__init__", _marking_bound(made.__init__))
        yield replaced(function, "__call__", _refusing_unbound(function.__call__))
        load = function._load_cuda_library
        yield replaced(function, "_load_cuda_library", self._ending(load))
        yield replaced(
            JitExecutor, "run_compiled_program", self._ending(JitExecutor.run_compiled_program, called)
        )

        yield replaced(_Tensor, "__init__", _on_device(_Tensor.__init__))
        pack_pointers = _Tensor.__c_pointers__

        @wraps(pack_pointers)
        def c_pointers(tensor: Any) -> Any:
            pack(tensor)
            return pack_pointers(tensor)

        yield replaced(_Tensor, "__c_pointers__", c_pointers)
        yield self._jax.served(pack)
        if importlib.util.find_spec("tvm_ffi") is not None:
            yield from tvm_ffi.changes(pack, lambda call: _refusing_unbound(self._ending(call, called)))

    def _ending(
        self, run: Callable[..., Any], called: Callable[[], None] = lambda: None
    ) -> Callable[..., Any]:
        """Wraps `run`: raises the exception of a callback below it, and then calls `called`."""

        @wraps(run)
        def run_and_notify(*args: Any, **kwargs: Any) -> Any:
            try:
                result = run(*args, **kwargs)
            except Exception:
                self._reraise()  # the cause, where the DSL saw an error code only
                raise
            self._reraise()
            called()
            return result

        return run_and_notify

    def _reraise(self) -> None:
        """Raises the exception of a callback; as the DSL's error if CUDA has an error code for it."""
        try:
            self.api.reraise()
        except CooperativeLaunchTooLargeError as error:
            from cutlass.base_dsl.common import DSLCudaRuntimeError

            raise DSLCudaRuntimeError(error.code, error.name, runtime_detail=str(error)) from error

    def _checked(self, compile_module: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compile_module)
        def compile_and_check(compiler: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = compile_module(compiler, module, *args, **kwargs)
            missing = missing_symbols(compiled, set(self.api.symbols()) | set(_real_helpers()))
            if missing:
                self.api.fail(
                    f"the kernel's host code calls {', '.join(sorted(missing))}, which the emulator lacks "
                    f"(tested with nvidia-cutlass-dsl {TESTED_DSL}, installed: {dsl_version()})"
                )
            return compiled

        return compile_and_check


_BOUND = "_cute_emulator_bound"


def _marking_bound(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_and_mark(function: Any, *args: Any, **kwargs: Any) -> None:
        setattr(function, _BOUND, True)
        init(function, *args, **kwargs)

    return init_and_mark


def _refusing_unbound(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def check_and_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(function, _BOUND):
            raise EmulatorError(
                "this function was compiled outside the emulator, for the device: "
                "call cute.compile inside `with Emulator(...)`"
            )
        return call(function, *args, **kwargs)

    return check_and_call


def _on_device(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of the DSL's tensor: CPU tensors are on device 0, except those of a script."""

    @wraps(init)
    def init_on_device(tensor: Any, *args: Any, **kwargs: Any) -> None:
        init(tensor, *args, **kwargs)
        if args and plays_host_memory(args[0]):
            return
        if not kwargs.get("enable_tvm_ffi"):
            dlpack.on_device(tensor._dlpack_data)

    return init_on_device


def _linking_nvshmem(trace: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trace)
    def trace_and_link(dsl: Any, *args: Any, **kwargs: Any) -> Any:
        with linked_for(dsl.compile_options.gpu_arch or dsl.envar.arch):
            return trace(dsl, *args, **kwargs)

    return trace_and_link


def seam_name(name: str) -> str:
    """Returns the name of equal length by which only the seam's library exports a runtime function."""
    return name.replace("cu", "em", 1) if name.startswith(("_cu", "cuda_dialect_")) else name


def _binding_to_seam_names() -> Iterator[contextlib.AbstractContextManager[None]]:
    """Binds functions made from object files (TVM-FFI's, loaded ones) to the seam, whatever else is loaded.

    Their engine looks up a symbol in the process before it does so in its list of libraries. The process
    contains the DSL's runtime library once a function was compiled for the device of this process.
    """
    from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine as engines
    from cutlass.base_dsl.export import ExternalBinaryModule

    real = engines.BinaryExecutionEngine
    names = {name: seam_name(name) for name in (*SEAM.api.symbols(), *_real_helpers())}

    def bound(image: bytes, *rest: Any) -> Any:
        return real(rename_undefined(bytes(image), names), *rest)

    yield replaced(engines, "BinaryExecutionEngine", bound)
    yield replaced(ExternalBinaryModule.load_provider, "execution_engine_constructor", bound)


def dsl_version() -> str:
    """Returns the version of the installed CuTe DSL."""
    return importlib.metadata.version("nvidia-cutlass-dsl")


def missing_symbols(module: Any, served: set[str]) -> set[str]:
    """Returns the CUDA runtime functions that a compiled host module calls and `served` lacks."""
    called: set[str] = set()

    def visit(operation: Any) -> Any:
        if operation.name == "llvm.call" and "callee" in operation.attributes:
            called.add(operation.attributes["callee"].value)
        return ir.WalkResult.ADVANCE

    from cutlass._mlir import ir

    module.operation.walk(visit)
    return {name for name in called if name.startswith(("_cu", "cuda_dialect_")) and name not in served}


def _real_helpers() -> dict[str, int]:
    """Returns addresses of the DSL's runtime helpers that use no device (error texts of TVM-FFI)."""
    from cutlass.base_dsl import env_manager

    try:
        from cutlass.base_dsl.version_info import CUDA_VERSION

        flavours = [f"cu{CUDA_VERSION.major}"]
    except Exception:  # as the DSL itself does
        flavours = ["cu12", "cu13"]
    folders = ["lib", *(f"{flavour}/lib" for flavour in flavours)]
    libraries = env_manager.find_libs_in_ancestors(env_manager.__file__, {"cute_dsl_runtime"}, folders)
    if not libraries:
        return {}
    library = ctypes.CDLL(str(libraries[0]))
    names = (
        "CuteDSLRT_TVMFFISetRaisedCudaError",
        "CuteDSLRT_TVMFFISetRaisedCudaLaunchError",
        "cuda_dialect_print_on_error",
        "cuda_dialect_assert_success",
        "cuda_dialect_get_error_name",
    )
    return {
        n: ctypes.cast(getattr(library, n), ctypes.c_void_p).value or 0 for n in names if hasattr(library, n)
    }


SEAM = Seam()
"""Connection of this process."""
