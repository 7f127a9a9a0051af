"""Device ``"cuda"`` in CPU memory, for scripts that were written for a GPU.

Torch has no option for this, so a `TorchFunctionMode` implements it. A storage is either ordinary or *marked*
as device memory; marked tensors report the device ``cuda``. Copies between the two kinds are real copies, as
on a GPU. Results of operations on marked tensors are marked. Memory that is allocated uninitialised is
poisoned. Marked storages begin at multiples of 256 bytes, as those of cudaMalloc.

Pinned host memory is ordinary memory that kernels may access by its address, as on a GPU. No operation waits
for kernels before the host reads it. Each operation is a work of the current stream, or of the host
(`host.timeline`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from cute_emulator.host.device import ALIGNMENT
from cute_emulator.host.graphs import Capture
from cute_emulator.host.timeline import Timeline
from cute_emulator.host.torch import half_products, library_ops, scaled_mm
from cute_emulator.host.torch.accesses import Accesses, spans

if TYPE_CHECKING:
    from cute_emulator.host.emulator import Emulator

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
"""Names of functions that access no data of their arguments."""
_WHOLE = {"tolist", "numpy", "__array__"}
"""Functions that read a tensor without an operation of torch's dispatcher."""
_MARK = "_cute_emulator_device_memory"
_PINNED = "_cute_emulator_pinned_memory"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def is_marked(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is device memory; for a wrapper, such as a DTensor, whether its content is."""
    return any(hasattr(_storage(inner), _MARK) for inner in _tensors(tensor))


def set_mark(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor's entire storage as device memory; returns the tensor."""
    setattr(_storage(tensor), _MARK, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is host memory that kernels may access."""
    return hasattr(_storage(tensor), _PINNED)


def serves_cuda() -> bool:
    """Returns whether a script runs for which "cuda" is CPU memory."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, CudaOnCpu) for mode in modes)


def plays_host_memory(tensor: object) -> bool:
    """Returns whether a script runs in which a tensor is an ordinary CPU tensor."""
    return isinstance(tensor, torch.Tensor) and serves_cuda() and not is_marked(tensor)


class CudaOnCpu(TorchFunctionMode):
    """Function mode that implements ``"cuda"``, for the thread that enters it.

    Args:
        emulator: Emulator of the memory and the streams.
        rank: Device of this thread.
        synchronize: Function that runs this thread's launches; called before an operation accesses device
            memory.
    """

    def __init__(self, emulator: Emulator, rank: int, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._emulator, self._rank, self._synchronize = emulator, rank, synchronize
        self._noting: Accesses | None = None

    def backward(self, function: Callable[..., Any], node: Any, *gradients: Any) -> Any:
        """Executes a node of autograd's graph that is written in Python.

        Torch's nodes run below the mode. Gradients that they pass are therefore marked here, if a result of
        the node is device memory. The node's gradients are complete before torch's nodes read them.
        """
        with self:
            for gradient in _tensors(gradients):
                self.mark(gradient)
            result = function(node, *gradients)
        self._synchronize()
        return result

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a tensor's storage as device memory that kernels may access; returns the tensor."""
        if not is_marked(tensor):
            self._align(tensor)
            self._emulator.adopt(_storage(tensor), self._rank)
        return set_mark(tensor)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a new host tensor's storage accessible to kernels; returns the tensor."""
        self._align(tensor)
        self._emulator.timelines.concurrent()
        self._emulator.adopt(_storage(tensor), self._rank, pinned=True)
        setattr(_storage(tensor), _PINNED, True)
        return tensor

    def _align(self, tensor: torch.Tensor) -> None:
        """Moves a new tensor's storage to an address with the alignment of a device's allocator."""
        storage = _storage(tensor)
        room = np.empty(storage.nbytes() + ALIGNMENT, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        room = room[begin : begin + storage.nbytes()]
        self._emulator.timelines.keep(room)
        moved = torch.from_numpy(room).untyped_storage()
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
            return self._rank if is_marked(args[0]) else -1
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
        capture = self._emulator.captures.get(self._rank)
        if capture is not None and on_device and getattr(func, "__name__", "") not in _METADATA:
            return self._captured(capture, func, args, kwargs, inputs)
        return self._execute(func, args, kwargs, inputs, on_device)

    def _execute(
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
            noted = around.enter_context(self._noted(on_device or any(map(is_pinned, inputs))))
            if products:
                around.enter_context(half_products.HalfProducts())
            if registered:
                around.enter_context(library_ops.called_by(self, func, _any_marked))
            result = func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})
        if on_device:
            if registered:
                self._synchronize()  # a kernel of a registered op may not have written the marked memory yet
            for output in _tensors(result):
                if _storage(output)._cdata not in owned:
                    if func in _UNINITIALISED and output.dtype is not torch.bool:
                        _storage(output).fill_(0xFF)
                    elif noted is not None:
                        noted.accessed.append((output, True))
                    self.mark(output)
        if noted is not None:
            self._judge(noted, func, args, kwargs, inputs, result)
        return result

    # --- the order of operations

    @contextlib.contextmanager
    def _noted(self, matters: bool) -> Iterator[Accesses | None]:
        """Records the accesses of an operation inside, unless it is only being captured."""
        if not matters or self._emulator.timelines.get(self._rank) is None:
            yield None
            return
        outer, capturing = self._noting, self._rank in self._emulator.captures
        with Accesses(lambda tensor: is_marked(tensor) or is_pinned(tensor)) as noted:
            self._noting = noted
            if outer is not None:
                outer.muted += 1
            try:
                yield None if capturing else noted
            finally:
                self._noting = outer
                if outer is not None:
                    outer.muted -= 1

    def _judge(
        self, noted: Accesses, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], result: Any
    ) -> None:
        """Records an operation as a work of the current stream, or, with pinned memory only, of the host."""
        timeline, name = self._emulator.timelines.get(self._rank), getattr(func, "__name__", str(func))
        if timeline is None:
            return
        if name in _WHOLE:
            noted.accessed += [(tensor, False) for tensor in inputs]
        if not noted.accessed:
            return
        on_device = any(is_marked(tensor) for tensor, _ in noted.accessed)
        if on_device:
            copies = name in ("copy_", "to", "cuda", "cpu")
            work = timeline.issue(f"torch's {name}")
        else:
            work = timeline.by_host(f"the host's {name}")
        for tensor, write in noted.accessed:
            timeline.touch_at(work, spans(tensor), write)
        if on_device:
            if copies:
                self._copied(timeline, noted, name, args, kwargs, result)
            elif noted.host_waits or not any(map(is_marked, _tensors(result))):
                timeline.host_waits(timeline.handle)
        self._emulator.raise_findings()

    def _copied(
        self, timeline: Timeline, noted: Accesses, name: str, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Records a copy between device and host: the host waits for it unless it is non-blocking."""
        ends = [is_marked(tensor) for tensor in (*_tensors(args[:2]), *_tensors(result))]
        if all(ends):
            return
        at = {"copy_": 2, "cuda": 2, "cpu": 99, "to": 2}[name]
        flags = [value for value in args[at - (name == "cuda") :] if isinstance(value, bool)]
        non_blocking = bool(kwargs.get("non_blocking", flags[0] if flags else False))
        target = result if name != "copy_" else args[0]
        if not non_blocking or not (is_marked(target) or is_pinned(target)):
            timeline.host_waits(timeline.handle)
            return
        for tensor, _ in noted.accessed:
            if is_pinned(tensor):  # the allocator of pinned memory waits for copies
                timeline.recorded(_storage(tensor).data_ptr(), timeline.handle)

    def _captured(
        self,
        capture: Capture,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Stores an operation for replays.

        It is executed once for its result; the contents of its inputs are restored.
        """
        storages = {_storage(t)._cdata: _storage(t) for t in inputs if is_marked(t)}
        before = [(storage, storage.clone()) for storage in storages.values()]
        result = self._execute(func, args, kwargs, inputs, on_device=True)
        for storage, contents in before:
            storage.copy_(contents)
        outputs = [t if _storage(t)._cdata not in storages else None for t in _tensors(result)]

        def again() -> None:
            with torch.no_grad():
                for mine, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if mine is not None:
                        mine.copy_(new)

        timeline = self._emulator.timelines.get(self._rank)
        stream = None if timeline is None else timeline.handle

        def in_stream() -> None:
            if timeline is not None:
                timeline.on = stream
            again()
            if timeline is not None:
                timeline.on = None

        capture.keep(in_stream)
        return result

    def _device(self) -> torch.device:
        return torch.device("cuda", self._rank)

    def _target(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Returns whether a call names a device for its result: True for CUDA, False for the CPU.

        None if it names no device.
        """
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
        with self._noted(on_device or is_marked(source) or is_pinned(source)) as noted:
            if func is torch.Tensor.to:
                moved = func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})
            else:
                moved = source
            if is_marked(source) != on_device and _storage(moved)._cdata == _storage(source)._cdata:
                moved = moved.clone()
        is_new = _storage(moved)._cdata != _storage(source)._cdata
        if on_device:
            self.mark(moved)
        elif is_new and is_marked(source) and kwargs.get("non_blocking"):
            self.pin(moved)  # as torch does
        if noted is not None and is_new:
            noted.accessed.append((moved, True))
            self._judge(noted, func, args, kwargs, [source], moved)
        return moved


def _any_marked(tree: Any) -> bool:
    return any(map(is_marked, _tensors(tree)))


def _default_device() -> dict[str, torch.device]:
    """Returns the argument of `torch.set_default_device` or ``with torch.device(..):``.

    Torch adds it too late.
    """
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
    """Yields the tensors that have memory: instead of wrappers, their contents."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            yield leaf
