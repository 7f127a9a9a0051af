"""Launch of the Triton kernel that applies an epilogue after an op (`epilogues.triton_source`).

It is one pass over memory, where torch's operations make fp32 copies and take several. The kernel is compiled
at the first call with an epilogue, a width and dtypes. During the capture of a CUDA graph only kernels that
have run before are launched; otherwise torch's operations are captured.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...epilogues import BLOCK, Epilogue
from ...epilogues.library import TORCH_OPERATIONS
from ...epilogues.triton_source import is_uniform_in_8_bits, kernel_of
from ...runtime.order import is_capturing
from .launchable import is_launchable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of sums and inputs that the kernel reads."""


class LoopStep(NamedTuple):
    """Work of a loop step, as measured fastest on an H200.

    Attributes:
        columns: Most columns.
        elements: Elements of a thread.
    """

    columns: int
    elements: int

    def of_width(self, width: int) -> tuple[int, int]:
        """Returns (columns, warps) for rows of a width."""
        columns = min(self.columns, max(BLOCK, 1 << (width - 1).bit_length()))
        return columns, min(MOST_WARPS, columns // (32 * self.elements) or 1)


MOST_WARPS = 16
ELEMENTS = LoopStep(4096, 16)
COMPLETE_ROWS = LoopStep(8192, 8)
"""A second loop reads again what the first one read, but not rows of one step."""

_compiled: dict[Any, Any] = {}
"""Kernels that have run, by what Triton compiles them for. A launch of one of them is without Triton's own
look-up, which takes about 20 us."""


@cache
def has_kernel(epilogue: Epilogue) -> bool:
    """Returns whether the kernel applies an epilogue; not if it is one of torch's operations."""
    return len(TORCH_OPERATIONS.get(epilogue.key, ("", ""))) > 1 and not is_uniform_in_8_bits(epilogue)


class Read(NamedTuple):
    """Operands of the kernel, matrices with their strides from row to row.

    Attributes:
        sums: `[rows, columns]`, one or two.
        inputs: Tensor for each input.
        strides: Of the sums, then of each input with a value for each element.
        bands: Whether the sums of a pair are in bands of one tensor.
    """

    sums: tuple[Tensor, ...]
    inputs: list[Tensor]
    strides: list[int]
    bands: bool

    @property
    def extents(self) -> tuple[int, int]:
        """Returns (rows, columns) of the result."""
        rows, width = self.sums[0].shape
        return rows, width // 2 if self.bands else width


def readable(epilogue: Epilogue, sums: Any, inputs: Sequence[Tensor]) -> Read | None:
    """Returns what a kernel reads; None if torch must compute.

    Args:
        epilogue: Epilogue of complete sums.
        sums: `[rows, columns]`, or a tuple of the two of a pair.
        inputs: Tensor for each input.
    """
    parts = sums if isinstance(sums, tuple) else (sums,)
    if not (parts[0].is_cuda and has_kernel(epilogue)):
        return None
    for part in parts:
        if part.ndim != 2 or not part.numel() or part.stride(1) != 1 or part.dtype not in DTYPES:
            return None
    if any(tensor.dtype not in DTYPES for tensor in inputs) or not is_launchable(parts[0].device):
        return None
    read = Read(parts, [], [part.stride(0) for part in parts], epilogue.pairs and len(parts) == 1)
    for (_, kind), tensor in zip(epilogue.inputs, inputs, strict=True):
        if kind != "element":
            read.inputs.append(tensor.contiguous())
            continue
        flat = tensor.reshape(read.extents)
        read.inputs.append(flat if flat.stride(1) == 1 else flat.contiguous())
        read.strides.append(read.inputs[-1].stride(0))
    return read


def launch(epilogue: Epilogue, read: Read, written: Sequence[Tensor]) -> bool:
    """Applies an epilogue by one kernel; False if it must not be compiled now, and was not.

    Args:
        epilogue: Epilogue of complete sums.
        read: Result of `readable`.
        written: Tensor for each of the op's results; scales of blocks are `[rows, blocks]` with contiguous
            columns, the others contiguous.
    """
    device, (rows, width) = read.sums[0].device, read.extents
    of_scales = [written[1].stride(1)] if epilogue.block else []
    tensors = *read.sums, *read.inputs, *written
    key = epilogue.key, read.bands, device, width, *read.strides, *map(_type_of, tensors)
    columns, warps = (ELEMENTS if epilogue.then is None else COMPLETE_ROWS).of_width(width)
    arguments = *tensors, *of_scales, width, *read.strides, columns
    compiled = _compiled.get(key)
    if compiled is None and is_capturing(device):
        return False
    if compiled is not None and device.index == torch.cuda.current_device():
        compiled[rows, 1, 1](*arguments)
        return True
    with torch.cuda.device(device):
        if compiled is None:
            kernel = _kernel(epilogue, read.bands)
            _compiled[key] = kernel[(rows,)](*arguments, num_warps=warps, enable_fp_fusion=False)
        else:
            compiled[rows, 1, 1](*arguments)
    return True


def _type_of(tensor: Tensor) -> tuple[torch.dtype, bool]:
    """Returns a tensor's dtype, and whether Triton may assume that its address is a multiple of 16."""
    return tensor.dtype, tensor.data_ptr() % 16 == 0


@cache
def _kernel(epilogue: Epilogue, bands: bool) -> Any:
    """Returns the kernel of an epilogue; Triton reads its source from the cache of lines."""
    source, name = kernel_of(epilogue, bands), f"<overlap_gemm epilogue {epilogue.key} {bands}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    module: dict[str, Any] = {"__name__": f"overlap_gemm.epilogues.{epilogue.name}"}
    exec(compile(source, name, "exec"), module)
    return module["apply_epilogue"]
