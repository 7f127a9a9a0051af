"""Replacements of torch's functions for any device: torch.accelerator, generators, torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device

from cute_emulator.host.replace import replaced
from cute_emulator.host.torch.torch_mode import CudaOnCpu

if TYPE_CHECKING:
    from cute_emulator.host.torch.cuda_device import CudaDevices


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields every replacement as a context manager; its exit restores the original."""
    for name, value in _accelerator(devices).items():
        if hasattr(torch.accelerator, name):
            yield replaced(torch.accelerator, name, value)
    yield replaced(torch, "Generator", _generator_class(devices))
    yield replaced(torch, "compile", _eager)
    yield _default_device_kept()
    yield replaced(_device.DeviceContext, "__torch_function__", _for_scripts)


def _accelerator(devices: CudaDevices) -> dict[str, Callable[..., Any]]:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    return {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": lambda: devices.count,
        "current_device_index": lambda: devices.current(),
        "current_device_idx": lambda: devices.current(),
        "device_index": lambda *_: contextlib.nullcontext(),
        "set_device_index": nothing,
        "set_device_idx": nothing,
        "current_stream": lambda *_: torch.cuda.current_stream(),
        "set_stream": lambda stream: torch.cuda.set_stream(stream),
        "synchronize": lambda *_: devices.host_waits(),
        "empty_cache": nothing,
    }


def _generator_class(devices: CudaDevices) -> type:
    """Returns a replacement of `torch.Generator`.

    A generator for "cuda" draws as the CPU's does and reports the device "cuda".
    """
    real = torch.Generator

    class OfAnyDevice(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=OfAnyDevice):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            where = torch.device(device)
            if where.type != "cuda":
                return real(where)
            made = real.__new__(cls, "cpu")
            index = devices.current() if where.index is None else where.index
            vars(made)["place"] = torch.device("cuda", index)
            return made

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:
            place: torch.device = vars(self)["place"]
            return place

    return Generator


def _eager(model: Any = None, **_: Any) -> Any:
    """Replaces `torch.compile` by eager execution, because a compiler would generate code for a GPU."""
    return (lambda function: function) if model is None else model


_add_device = _device.DeviceContext.__torch_function__


def _for_scripts(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Applies the default device only below `CudaOnCpu` on the mode stack, where a script's calls pass.

    Otherwise it would also place internal tensors of an operation's implementation on "cuda".
    """
    if any(isinstance(below, CudaOnCpu) for below in torch.overrides._get_current_function_mode_stack()):
        return _add_device(mode, function, types, args, kwargs)
    return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_device_kept() -> Iterator[None]:
    """Restores the default device at the end of a script that called `torch.set_default_device`."""
    before = _device.CURRENT_DEVICE
    try:
        yield
    finally:
        if before != _device.CURRENT_DEVICE:
            torch.set_default_device(before)
