"""TVM-FFI functions: their wrapper demands tensors of a CUDA device, so CPU tensors pose as such."""

from __future__ import annotations

import ctypes
from typing import Any

_CUDA = 2  # kDLCUDA
_DEVICE_OFFSET = 8  # DLManagedTensor begins with DLTensor: void* data, then DLDevice {i32 type, i32 index}
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _OnDevice:
    """A DLPack exporter whose capsule names CUDA device 0 for memory of the CPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        address = _get_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + _DEVICE_OFFSET).value = _CUDA
        return capsule


def on_device(tensor: Any) -> Any:
    """The `tvm_ffi.Tensor` of a CPU tensor's memory, on "CUDA device 0"."""
    import tvm_ffi  # type: ignore[import-not-found]

    return tvm_ffi.from_dlpack(_OnDevice(tensor))
