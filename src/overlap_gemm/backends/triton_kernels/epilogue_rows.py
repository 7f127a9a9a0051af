"""Launch of the Triton kernel that applies an epilogue after an op (`epilogues.triton_source`).

It is one pass over memory, where torch's operations make fp32 copies and take several. The kernel is compiled
at the first call with an epilogue, a width and dtypes. During the capture of a CUDA graph only kernels that
have run before are launched; otherwise torch's operations are captured.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...epilogues import Epilogue
from ...epilogues.library import TORCH_OPERATIONS
from ...epilogues.triton_source import kernel_of
from ...runtime.order import is_capturing
from .launchable import is_launchable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of sums and inputs that the kernel reads."""

COLUMNS = 4096
"""Most columns of a loop step."""

OF_A_THREAD = 16
"""Elements of a thread in a loop step."""

MOST_WARPS = 8

_known: set[Any] = set()
"""Kernels that have run, with what Triton compiles them for."""


def one_pass(epilogue: Epilogue) -> bool:
    """Returns whether the kernel exists for an epilogue: of single sums, and not torch's own operations."""
    return not (epilogue.pairs or epilogue.block or epilogue.key in TORCH_OPERATIONS)


def launch(
    epilogue: Epilogue, sums: Any, inputs: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[Tensor] | None:
    """Returns the result of an epilogue and its outputs by one kernel, or None if torch must compute them.

    Args:
        epilogue: Epilogue of complete sums.
        sums: `[rows, columns]`; a tuple of pairs has no kernel.
        inputs: Tensor for each input.
        dtypes: Dtype of each tensor that the op returns.
    """
    if not (isinstance(sums, Tensor) and sums.is_cuda and one_pass(epilogue)):
        return None
    if sums.ndim != 2 or not sums.numel() or sums.stride(1) != 1 or sums.dtype not in DTYPES:
        return None
    rows, width = sums.shape
    read, strides = [], [sums.stride(0)]
    for (_, kind), tensor in zip(epilogue.inputs, inputs, strict=True):
        if tensor.dtype not in DTYPES:
            return None
        if kind != "element":
            read.append(tensor.contiguous())
            continue
        flat = tensor.reshape(rows, width)
        read.append(flat if flat.stride(1) == 1 else flat.contiguous())
        strides.append(read[-1].stride(0))
    if not is_launchable(sums.device):
        return None
    aligned = tuple([tensor.data_ptr() % 16 == 0 for tensor in (sums, *read)])
    types = sums.dtype, *[tensor.dtype for tensor in read], *dtypes
    key = epilogue.key, sums.device, width, tuple(strides), types, aligned
    if key not in _known and is_capturing(sums.device):
        return None
    columns = min(COLUMNS, max(128, 1 << (width - 1).bit_length()))
    warps = min(MOST_WARPS, columns // (32 * OF_A_THREAD) or 1)
    written = [
        torch.empty((rows, width) if kind == "element" else (rows,), dtype=dtype, device=sums.device)
        for kind, dtype in zip(("element", *[kind for _, kind in epilogue.returned]), dtypes, strict=True)
    ]
    with torch.cuda.device(sums.device):
        _kernel(epilogue)[(rows,)](
            sums, *read, *written, width, *strides, columns, num_warps=warps, enable_fp_fusion=False
        )
    _known.add(key)
    return written


@cache
def _kernel(epilogue: Epilogue) -> Any:
    """Returns the kernel of an epilogue; Triton reads its source from the cache of lines."""
    source, name = kernel_of(epilogue), f"<overlap_gemm epilogue {epilogue.key}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    module: dict[str, Any] = {"__name__": f"overlap_gemm.epilogues.{epilogue.name}"}
    exec(compile(source, name, "exec"), module)
    return module["apply_epilogue"]
