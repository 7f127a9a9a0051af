"""Operators of `torch.library` with a kernel for CUDA: for device memory, the CUDA kernel runs.

For torch's dispatcher, device memory is memory of the CPU. So an operator that is called with device memory
is assigned a kernel for CPU tensors, for the duration of a run. That kernel forwards calls with device memory
to the CUDA kernel, with "cuda" served inside (`torch_mode`). It forwards other calls to the original CPU
kernel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_TORCHS_OWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "symm_mem", "inductor", "higher_order"}
"""Namespaces of torch's operators, which have kernels for the CPU."""

_bridges: dict[str, torch.library.Library | None] = {}
_calls = threading.local()


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Allows bridges of operators inside; removes them at the end."""
    try:
        yield
    finally:
        for library in _bridges.values():
            if library is not None:
                library._destroy()
        _bridges.clear()


@contextlib.contextmanager
def called_by(mode: Any, op: Any, on_device: Callable[[Any], bool]) -> Iterator[None]:
    """Calls `op` inside for `mode`.

    Args:
        mode: `torch_mode.CudaOnCpu` of the call; its kernels run within it.
        op: An `OpOverload` or an `OpOverloadPacket`.
        on_device: Function that returns whether any tensor of some arguments is device memory.
    """
    overloads = [op] if isinstance(op, torch._ops.OpOverload) else [getattr(op, n) for n in op.overloads()]
    for overload in overloads:
        if overload.namespace not in _TORCHS_OWN and overload.name() not in _bridges:
            _bridges[overload.name()] = _bridge(overload, on_device)
    before = getattr(_calls, "mode", None)
    _calls.mode = mode
    try:
        yield
    finally:
        _calls.mode = before


def _bridge(op: Any, on_device: Callable[[Any], bool]) -> torch.library.Library | None:
    """Returns the library that calls `op`'s CUDA kernel for device memory.

    None if there is no such kernel.
    """
    has = {key: torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _KEYS}
    if not (has["CUDA"] or has["CompositeExplicitAutograd"]):
        return None
    host = None
    if has["CPU"] or has["CompositeExplicitAutograd"]:
        host = torch.library.get_kernel(op, "CPU")
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        mode = getattr(_calls, "mode", None)
        if mode is not None and on_device((args, kwargs)):
            with mode:
                return op.redispatch(cuda, *args, **kwargs)
        if host is None:
            raise NotImplementedError(f"{op.name()} has a kernel for CUDA only, got CPU tensors")
        return host.call_boxed(keys, *args, **kwargs)

    library = torch.library.Library(op.namespace, "IMPL")
    library.impl(op.name().partition("::")[2], kernel, "CPU", with_keyset=True, allow_override=True)
    return library


_KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd")
