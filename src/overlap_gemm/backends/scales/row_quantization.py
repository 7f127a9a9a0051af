"""Quantization of rows by one kernel (`kernel.quantize_rows`): its conditions and its launch.

The kernel is this library's, not one that `torch.compile` makes at the first eager call. Inductor takes
seconds to compile, again for each shape; compiled for any shape its kernel takes twice the time
(docs/design/fp8.md).
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...spec.sharding import ceil_div
from .scaling import CUBLAS_ROWS

HELD = 16384
"""Most elements that a program holds: 32 for a thread of 16 warps. With more, one program fills an SM."""

TILE = 4096
"""Elements of a program that holds shorter rows, or blocks of rows."""

ALONG = 128
"""Least elements of a row that a program takes together, for any block."""

OF_A_WARP = 1024
"""Elements of a warp: four vectors of 16 bytes for each thread, if elements have 16 bits."""

LONG = (1, 4096), 8
"""Tile and warps for rows that are too long to be held."""

STRIDED = (32, 512), 16
"""Tile and warps for rows that are not contiguous, as in a transposed matrix: full sectors both ways."""


def has_kernel(x: Tensor, block: int | None) -> bool:
    """Returns whether one kernel quantizes `x` `[..., K]`, with a scale per block or (None) per row."""
    return (
        x.is_cuda
        and x.numel() > 0
        and (block is None or (block <= HELD and block & (block - 1) == 0))
        and _kernels(x.device) is not None
    )


def by_one_kernel(
    x: Tensor, dtype: torch.dtype, block: int | None, least: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Returns values and scales, as `api.quantization.quantize_rows` returns them.

    Args:
        x: `[..., K]`, float32, bfloat16 or float16, on a GPU; see `has_kernel`.
        dtype: 8-bit dtype of the values.
        block: Elements that share a scale, less than K; None: a scale for each row.
        least: Smallest scale.
        power_of_two: Whether scales are rounded to powers of two.
    """
    flat = x.detach().reshape(-1, x.shape[-1])
    rows, width = flat.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    if block is None:
        scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    else:  # as `scaling.along_rows` has them
        shape = ceil_div(width, block), ceil_div(rows, CUBLAS_ROWS) * CUBLAS_ROWS
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)[:, :rows].t()
    x_row, x_column = flat.stride()
    is_whole = x_column == 1 or width == 1
    arguments = flat, values, scales, rows, width, x_row, 1 if is_whole else x_column
    how = 1 / torch.finfo(dtype).max, least, power_of_two
    kernels = _kernels(x.device)
    with torch.cuda.device(x.device):
        if block is None and (width > HELD or not is_whole):
            (height, along), warps = LONG if is_whole else STRIDED
            kernels.of_long_rows[(ceil_div(rows, height),)](*arguments, *how, height, along, num_warps=warps)
        else:
            length = block or 1 << (width - 1).bit_length()
            blocks = max(ALONG // length, 1) if block else 1
            height = max(TILE // (blocks * length), 1)
            grid = (ceil_div(rows, height) * ceil_div(width, blocks * length),)
            warps = height * blocks * length // OF_A_WARP
            kernels.of_tiles[grid](
                *arguments, scales.stride(1), *how, height, blocks, length, num_warps=warps
            )
    return values, scales.reshape(*x.shape[:-1], scales.shape[1])


@cache
def _kernels(device: torch.device) -> Any:
    """Returns the module of the kernels; None without Triton or without 8-bit conversions in one rounding."""
    if torch.cuda.get_device_capability(device) < (9, 0) or find_spec("triton") is None:
        return None
    try:
        from triton.runtime import driver

        from ...kernel import quantize_rows

        driver.active.get_current_target()  # creates Triton's launcher, which needs a C compiler
    except Exception as error:
        warnings.warn(
            f"quantize_rows: torch's operations, which take ten times as long as Triton's kernel, since "
            f"Triton does not work here: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return quantize_rows
