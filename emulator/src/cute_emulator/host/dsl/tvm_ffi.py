"""TVM-FFI functions: compiled and called as if their CPU tensors were on CUDA device 0.

Their generated wrapper compares the device of each tensor with that of the tensor at compile time. A function
that is loaded from an object file belongs to TVM-FFI, not to the DSL: `LoadedFunction` replaces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from cute_emulator.host.dsl import dlpack
from cute_emulator.host.replace import replaced


class _OnDevice:
    """DLPack exporter whose capsule names CUDA device 0 for memory of the CPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        tensor = self._tensor  # TVM-FFI takes tensors that require a gradient
        capsule = (tensor.detach() if hasattr(tensor, "detach") else tensor).__dlpack__()
        dlpack.on_device(capsule)
        return capsule


class LoadedFunction:
    """TVM-FFI function from an object file, which runs in the open emulator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        return self._function(*args)


def changes(
    pack: Callable[[Any], None], called: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields the changes of tvm_ffi and of the DSL's use of it.

    Args:
        pack: Receiver of each tensor argument; these functions pack in C++, so Python's arguments are passed.
        called: Wrapper of the call of a function.
    """
    import tvm_ffi  # type: ignore[import-not-found]
    from cutlass.base_dsl.export import ExternalBinaryModule
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import tvm_ffi_provider as provider

    from_dlpack = tvm_ffi.from_dlpack
    as_object = _Tensor.__tvm_ffi_object__

    def on_device(tensor: Any, **options: Any) -> Any:
        return from_dlpack(_OnDevice(tensor), **options)

    def packed_object(tensor: Any) -> Any:
        pack(tensor)
        return as_object(tensor)

    def present(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(present, argument))
        if not hasattr(argument, "__dlpack__"):
            return argument
        pack(argument)
        return on_device(argument)

    yield replaced(tvm_ffi, "from_dlpack", on_device)
    yield replaced(_Tensor, "__tvm_ffi_object__", packed_object)
    find = ExternalBinaryModule.__getattr__

    def find_and_wrap(module: Any, name: str) -> Any:
        function = find(module, name)
        return LoadedFunction(function) if module.enable_tvm_ffi else function

    yield replaced(ExternalBinaryModule, "__getattr__", find_and_wrap)
    kinds = provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs
    for kind in (*kinds, LoadedFunction):
        call = called(kind.__call__)

        def presenting(function: Any, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            named = {name: present(argument) for name, argument in kwargs.items()}
            return _call(function, *map(present, args), **named)

        yield replaced(kind, "__call__", presenting)
