"""DLPack capsules for memory of the CPU that name CUDA device 0 (dlpack.h)."""

from __future__ import annotations

import ctypes

CUDA = 2
"""kDLCUDA."""
_NAME = b"dltensor"
_DEVICE = 8  # DLManagedTensor begins with DLTensor: void* data, then DLDevice {i32 type, i32 index}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def on_device(capsule: object) -> None:
    """Sets the device of a capsule to CUDA device 0, unless the capsule was consumed."""
    if _is_valid(capsule, _NAME):
        address = _get_pointer(capsule, _NAME) or 0
        (ctypes.c_int32 * 2).from_address(address + _DEVICE)[:] = [CUDA, 0]
