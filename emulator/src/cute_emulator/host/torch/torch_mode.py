"""``device="cuda"`` served by CPU memory, for scripts that were written for a GPU.

Torch has no switch for this, so a `TorchFunctionMode` keeps the fiction: a storage is either ordinary or
*marked* as device memory; marked tensors say ``cuda`` when asked for their device; copies between the two
kinds are real copies, as on a GPU; results of operations on marked tensors are marked. Memory that is
allocated uninitialised is poisoned. Marked storages begin at multiples of 256 bytes, as cudaMalloc's do.
Pinned host memory is ordinary memory that kernels may touch by its address, as on a GPU; no operation waits
for them before the host reads it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from cute_emulator.host.device import ALIGNMENT
from cute_emulator.host.graphs import Capture
from cute_emulator.host.torch import half_products, library_ops, scaled_mm

_CUDA = re.compile(r"cuda(:\d+)?$")
_CPU = torch.device("cpu")
_MOVES = {torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.to}
_UNINITIALISED = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
_SCALED_MM = getattr(torch, "_scaled_mm", None)
_SCALED_GROUPED_MM = getattr(torch, "_scaled_grouped_mm_v2", None)
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_METADATA = {
    "__get__", "__dlpack__", "__dlpack_device__", "data_ptr", "size", "stride", "dim", "numel", "__len__",
    "element_size", "storage_offset", "untyped_storage", "is_contiguous", "dim_order", "view", "permute",
    "transpose", "t", "unsqueeze", "squeeze", "expand", "detach", "as_strided", "empty_like", "new_empty",
    "_is_view",
}  # fmt: skip
"""Names of functions that do not touch a tensor's data, or not that of their arguments."""
_MARK = "_cute_emulator_device_memory"
_PINNED = "_cute_emulator_pinned_memory"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor plays device memory; of a wrapper, such as a DTensor, whether what it wraps does."""
    return any(hasattr(_storage(inner), _MARK) for inner in _tensors(tensor))


def set_mark(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor's whole storage play device memory; returns the tensor."""
    setattr(_storage(tensor), _MARK, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is host memory that kernels may touch."""
    return hasattr(_storage(tensor), _PINNED)


def serves_cuda() -> bool:
    """Whether a script runs, for which "cuda" is CPU memory."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, CudaOnCpu) for mode in modes)


def plays_host_memory(tensor: object) -> bool:
    """Whether a script runs in which a tensor is an ordinary CPU tensor."""
    return isinstance(tensor, torch.Tensor) and serves_cuda() and not is_marked(tensor)


class CudaOnCpu(TorchFunctionMode):
    """The fiction, for the thread that enters it.

    Args:
        adopt: Told of every storage that becomes device memory or pinned host memory.
        current_device: Index of this thread's device.
        synchronize: Waits for this thread's launches; called before an operation touches device memory.
        capture: The CUDA graph that this thread captures, if any.
    """

    def __init__(
        self,
        adopt: Callable[[torch.UntypedStorage], None],
        current_device: Callable[[], int],
        synchronize: Callable[[], None],
        capture: Callable[[], Capture | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._capture = capture
        self._synchronize = synchronize
        self._adopt = adopt
        self._current_device = current_device

    def backward(self, function: Callable[..., Any], node: Any, *gradients: Any) -> Any:
        """Carries out a node of autograd's graph that is written in Python.

        The gradients that torch's own nodes hand it are device memory if one of its results is; and those
        nodes, which see no mode, find its own written.
        """
        with self:
            for gradient in _tensors(gradients):
                self.mark(gradient)
            result = function(node, *gradients)
        self._synchronize()
        return result

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a tensor's storage device memory that kernels may touch; returns the tensor."""
        if not is_marked(tensor):
            self._align(tensor)
            self._adopt(_storage(tensor))
        return set_mark(tensor)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a new host tensor's storage memory that kernels may touch; returns the tensor."""
        self._align(tensor)
        self._adopt(_storage(tensor))
        setattr(_storage(tensor), _PINNED, True)
        return tensor

    def _align(self, tensor: torch.Tensor) -> None:
        """Moves a new tensor's storage to where a device's allocator would put one."""
        storage = _storage(tensor)
        if not storage.data_ptr() % ALIGNMENT:
            return
        room = np.empty(storage.nbytes() + ALIGNMENT, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        moved = torch.from_numpy(room[begin : begin + storage.nbytes()]).untyped_storage()
        moved.copy_(storage)
        with torch.no_grad():
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                moved, tensor.storage_offset(), tensor.size(), tensor.stride()
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            return self._device() if is_marked(args[0]) else _CPU
        if func == _IS_CUDA:
            return is_marked(args[0])
        if func is torch.Tensor.get_device:
            return self._current_device() if is_marked(args[0]) else -1
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0] if is_pinned(args[0]) else self.pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        if "device" not in kwargs and func in _device_constructors():
            kwargs |= _default_device()

        inputs = list(_tensors((args, kwargs)))
        target = self._target(func, args, kwargs)
        from_device = any(map(is_marked, inputs))
        if from_device and getattr(func, "__name__", "") not in _METADATA:
            self._synchronize()
        on_device = from_device if target is None else target
        if func in _MOVES:
            return self._move(func, args, kwargs, on_device)
        capture = self._capture()
        if capture is not None and on_device and getattr(func, "__name__", "") not in _METADATA:
            return self._captured(capture, func, args, kwargs, inputs)
        return self._carry_out(func, args, kwargs, inputs, on_device)

    def _carry_out(
        self, func: Callable[..., Any], args: Any, kwargs: Any, inputs: list[torch.Tensor], on_device: bool
    ) -> Any:
        owned = {_storage(t)._cdata for t in inputs}
        if func is _SCALED_MM and scaled_mm.is_block_scaled(*args, **kwargs):
            func = scaled_mm.block_scaled
        elif func is _SCALED_GROUPED_MM and scaled_mm.is_group_scaled(*args, **kwargs):
            func = scaled_mm.group_scaled
        products = on_device and getattr(func, "__name__", "") in half_products.NAMES
        registered = on_device and isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        with contextlib.ExitStack() as around:
            if products:
                around.enter_context(half_products.HalfProducts())
            if registered:
                around.enter_context(library_ops.called_by(self, func, _any_marked))
            result = func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})
        if on_device:
            if registered:
                self._synchronize()  # a kernel of a registered op may still have to write what is marked here
            for output in _tensors(result):
                if _storage(output)._cdata not in owned:
                    if func in _UNINITIALISED and output.dtype is not torch.bool:
                        _storage(output).fill_(0xFF)
                    self.mark(output)
        return result

    def _captured(
        self,
        capture: Capture,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Keeps an operation for replays. It is carried out once for what it returns; its inputs stay."""
        storages = {_storage(t)._cdata: _storage(t) for t in inputs if is_marked(t)}
        before = [(storage, storage.clone()) for storage in storages.values()]
        result = self._carry_out(func, args, kwargs, inputs, on_device=True)
        for storage, contents in before:
            storage.copy_(contents)
        outputs = [t if _storage(t)._cdata not in storages else None for t in _tensors(result)]

        def again() -> None:
            with torch.no_grad():
                for mine, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if mine is not None:
                        mine.copy_(new)

        capture.keep(again)
        return result

    def _device(self) -> torch.device:
        return torch.device("cuda", self._current_device())

    def _target(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether a call names a device for its result: True for CUDA, False for the CPU, None for none."""
        if func is torch.Tensor.cuda:
            return True
        if func is torch.Tensor.cpu:
            return False
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return is_marked(args[1])
        for value in (kwargs.get("device"), *args):
            if _is_cuda_name(value):
                return True
            if isinstance(value, torch.device) or value == "cpu":
                return False
        return None

    def _move(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: bool
    ) -> torch.Tensor:
        source = args[0]
        if func is torch.Tensor.to:
            moved = func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})
        else:
            moved = source
        if is_marked(source) != on_device and _storage(moved)._cdata == _storage(source)._cdata:
            moved = moved.clone()
        return self.mark(moved) if on_device else moved


def _any_marked(tree: Any) -> bool:
    return any(map(is_marked, _tensors(tree)))


def _default_device() -> dict[str, torch.device]:
    """What `torch.set_default_device` or ``with torch.device(..):`` adds; torch itself would too late."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return {"device": mode.device}
    return {}


def _is_cuda_name(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and _CUDA.match(value) is not None


def _to_cpu(value: Any) -> Any:
    return _CPU if _is_cuda_name(value) else value


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Those with memory of their own: instead of wrappers, what they wrap."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            yield leaf
