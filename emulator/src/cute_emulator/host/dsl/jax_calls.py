"""Execution of CuTe DSL kernels called from JAX, which computes with XLA's CPU backend.

JAX has no CUDA device for arrays here, so a program runs on its CPU backend, whose arrays are device memory
of kernels. `cutlass.jax` lowers a call to a custom call that contains its target's name and the compiled
object. Here that target is a function of this process, which XLA's foreign function interface calls with a
`XLA_FFI_CallFrame` (xla/ffi/api/c_api.h, API 0.x). It loads the object as `load_module` does and calls it.
Functions that `jax_tvm_ffi` registers for GPUs are registered for the CPU and called with torch tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cute_emulator.host.replace import replaced

_VOID, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_HEAD = [("struct_size", _SIZE), ("extension", _VOID)]
_INTERNAL_ERROR, _METADATA = 13, 1
_PREFIX = "cutlass_call"  # prefix of the functions in an object that cutlass.jax compiles

# xla/ffi/api/c_api.h, XLA_FFI_DataType
_ITEM_BYTES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16,
    **dict.fromkeys((19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33), 1),
}  # fmt: skip


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": [*_HEAD, *fields]})


_Buffer = _struct("Buffer", ("dtype", _INT), ("data", _VOID), ("rank", ctypes.c_int64), ("dims", _VOID))
_Values = _struct("Values", ("size", ctypes.c_int64), ("types", _VOID), ("values", _VOID))
_Attributes = _struct(
    "Attributes", ("size", ctypes.c_int64), ("types", _VOID), ("names", _VOID), ("values", _VOID)
)
_Frame = _struct(
    "Frame", ("api", _VOID), ("context", _VOID), ("stage", _INT), ("inputs", _Values), ("results", _Values),
    ("attributes", _Attributes),
)  # fmt: skip
_Version = _struct("Version", ("major", _INT), ("minor", _INT))
_Api = _struct("Api", ("version", _Version), ("internal", _VOID), ("create_error", _VOID))
_Error = _struct("Error", ("message", ctypes.c_char_p), ("code", _INT))
_MAKE_ERROR = ctypes.CFUNCTYPE(_VOID, ctypes.POINTER(_Error))
_HANDLER = ctypes.CFUNCTYPE(_VOID, ctypes.POINTER(_Frame))


class _Span(ctypes.Structure):
    _fields_ = (("data", _VOID), ("length", _SIZE))

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.data, self.length)


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("type", _INT), ("next", _VOID), ("metadata", _VOID))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("version", _Version))


def _pointers(address: int, count: int) -> list[int]:
    return list((_VOID * count).from_address(address)) if count else []  # type: ignore[arg-type]


def _attributes(frame: Any) -> dict[str, bytes]:
    """Returns the string attributes of a call."""
    held = frame.attributes
    named = zip(_pointers(held.names, held.size), _pointers(held.values, held.size), strict=True)
    return {bytes(_Span.from_address(n)).decode(): bytes(_Span.from_address(v)) for n, v in named}


def _bytes_of(buffer: Any) -> torch.Tensor:
    """Returns the memory of an array, as bytes."""
    shape = (ctypes.c_int64 * buffer.rank).from_address(buffer.dims)[:] if buffer.rank else ()
    size = math.prod(shape) * _ITEM_BYTES[buffer.dtype]
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(buffer.data), dtype=torch.uint8)


@functools.lru_cache(maxsize=64)
def _loaded(image: bytes) -> Any:
    """Returns the function of an object that `cutlass.jax` compiled."""
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory(prefix="overlap_gemm_jax_") as folder:
        path = Path(folder) / "call.o"
        path.write_bytes(image)
        return getattr(load_module(str(path)), _PREFIX)


def _call(frame: Any, pack: Callable[[Any], None]) -> None:
    """Executes a custom call.

    The function's arguments are the stream and a pointer to each array's (data, shape).
    """
    function = _loaded(_attributes(frame)["module"])
    arguments: list[Any] = [_VOID(0)]
    for values in (frame.inputs, frame.results):
        for address in _pointers(values.values, values.size):
            buffer = _Buffer.from_address(address)
            pack(_bytes_of(buffer))
            arguments.append(ctypes.pointer((_VOID * 2)(buffer.data, buffer.dims)))
    function.run_compiled_program([ctypes.addressof(value) for value in arguments])


def _handler(pack: Callable[[], Callable[[Any], None] | None]) -> Any:
    """Returns the function that XLA calls.

    Args:
        pack: Function that returns the receiver of a call's tensors, or None if no emulator is open.
    """

    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        version = _Api.from_address(frame.api).version
        if frame.extension and _Extension.from_address(frame.extension).type == _METADATA:
            about = _Metadata.from_address(_Extension.from_address(frame.extension).metadata)
            about.version.major, about.version.minor = version.major, version.minor
            return None
        try:
            receiver = pack()
            if receiver is None:
                raise RuntimeError("no emulator is open: call the function inside `with Emulator(...)`")
            _call(frame, receiver)
        except BaseException as error:  # it cannot cross XLA
            text = f"{type(error).__name__}: {error}".encode()
            what = _Error(ctypes.sizeof(_Error), None, text, _INTERNAL_ERROR)
            return int(_MAKE_ERROR(_Api.from_address(frame.api).create_error)(ctypes.byref(what)))
        return None

    return _HANDLER(handle)


class JaxCalls:
    """Serves JAX while an emulator is open; registrations in XLA last for the process."""

    def __init__(self) -> None:
        self._pack: Callable[[Any], None] | None = None
        self._handler = _handler(lambda: self._pack)
        self._registered = False

    @contextlib.contextmanager
    def served(self, pack: Callable[[Any], None]) -> Iterator[None]:
        """Executes calls inside; modules of JAX may be imported before or inside."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, "_pack", pack))

            def jax(module: Any) -> None:
                # Calls are then executed one by one, in the calling thread.
                module.config.update("jax_cpu_enable_async_dispatch", False)

            def cutlass_jax(module: ModuleType) -> None:
                ffi = sys.modules["cutlass.jax.ffi"]
                stack.enter_context(replaced(ffi, "_AUTOMATIC_FFI_REGISTRATION_ENABLED", False))
                if not self._registered:
                    _register(ffi, module, self._handler)
                    self._registered = True

            def jax_tvm_ffi(module: ModuleType) -> None:
                register = _for_the_cpu(module.register_ffi_target)
                stack.enter_context(replaced(module, "register_ffi_target", register))

            kinds: dict[str, Callable[[ModuleType], Any]]
            kinds = {"jax": jax, "cutlass.jax.primitive": cutlass_jax, "jax_tvm_ffi": jax_tvm_ffi}
            finder = _WhenImported(kinds)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
            for name, action in kinds.items():
                if sys.modules.get(name) is not None:  # None: it must not be imported
                    action(sys.modules[name])
            yield


def _register(ffi: Any, primitive: Any, handler: Any) -> None:
    """Registers the lowering of `cutlass_call` for the CPU in JAX, and its targets in XLA."""
    import jax  # type: ignore[import-not-found]
    from jax.interpreters import mlir  # type: ignore[import-not-found]

    for targets in ffi._CUTLASS_CALL_TARGETS.values():
        for name in targets:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    lowering = primitive._cutlass_call_inner_p_lowering
    mlir.register_lowering(primitive.cutlass_call_inner_p, lowering, platform="cpu", inline=False)


def _for_the_cpu(register: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `jax_tvm_ffi.register_ffi_target` so that a function for GPUs is registered for the CPU."""
    import tvm_ffi  # type: ignore[import-not-found]

    @functools.wraps(register)
    def registered(
        name: str, function: Any, arg_spec: Any = None, platform: str = "cpu", **options: Any
    ) -> Any:
        if platform != "gpu":
            return register(name, function, arg_spec, platform, **options)

        def call(*args: Any) -> None:
            function(*[torch.from_dlpack(a) if hasattr(a, "__dlpack__") else a for a in args])

        options |= {"pass_owned_tensor": True, "allow_cuda_graph": False}
        return register(name, tvm_ffi.convert(call), arg_spec, "cpu", **options)

    return registered


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as the module has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], Any]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_notify(module: ModuleType) -> None:
                run(module)
                self._actions[name](module)

            spec.loader.exec_module = run_and_notify  # type: ignore[method-assign]
        return spec
