"""Launch of the Triton kernel that quantizes rows (`kernel.quantize_rows`), and the conditions for it.

`torch.compile` is no alternative. Inductor compiles for seconds at the first eager call, again for each new
shape. Compiled for dynamic shapes, its kernel takes twice the time (docs/design/fp8.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...spec.sharding import ceil_div
from ..scales.scale_layouts import CUBLAS_ROWS
from .launchable import is_launchable

HELD = 16384
"""Limit of elements that a program keeps in registers: 16 warps of 32 elements a thread."""

TILE = 4096
"""Elements of a program if a row or block has fewer: it then takes several."""

ALONG = 128
"""Least elements of a row in a program if scales are of blocks: it takes several short blocks."""

OF_A_WARP = 1024
"""Elements of a warp: 32 a thread, which are four loads of 16 bytes for 16-bit inputs."""

LONG = (1, 4096), 8
"""(Rows, columns) of a loop step, and warps, for contiguous rows of more than `HELD` elements."""

STRIDED = (32, 512), 16
"""(Rows, columns) of a loop step, and warps, for rows that are not contiguous, as in a transposed matrix.

A step then loads full sectors along the columns of x and stores full sectors along the rows of the result.
"""


def has_kernel(x: Tensor, block: int | None) -> bool:
    """Returns whether a kernel can quantize `x`; False: torch's operations do it.

    Args:
        x: `[..., K]`, of any strides. It must be on a GPU of sm_90 or later, and not empty.
        block: Elements of K that share a scale: a power of two up to `HELD`; None: a scale for each row.
    """
    return (
        x.is_cuda
        and x.numel() > 0
        and (block is None or (block <= HELD and block & (block - 1) == 0))
        and is_launchable(x.device)
    )


def by_one_kernel(
    x: Tensor, dtype: torch.dtype, block: int | None, least: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantizes rows by one kernel on the current stream, for `api.quantization.quantize_rows`.

    Args:
        x: `[..., K]`, float32, bfloat16 or float16, for which `has_kernel` is True.
        dtype: 8-bit floating-point dtype of the values.
        block: Elements that share a scale, less than K; None: a scale for each row.
        least: Smallest scale.
        power_of_two: Whether scales are rounded up to powers of two.

    Returns:
        New tensors: contiguous values of the shape of x, and float32 scales. These are `[..., 1]`, or
        `[..., ceil(K / block)]` with contiguous columns, as from `scaling.along_rows`.
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
    is_contiguous_row = x_column == 1 or width == 1
    arguments = flat, values, scales, rows, width, x_row, 1 if is_contiguous_row else x_column
    how = 1 / torch.finfo(dtype).max, least, power_of_two
    from ...kernel import quantize_rows as kernels

    with torch.cuda.device(x.device):
        if block is None and (width > HELD or not is_contiguous_row):
            (height, along), warps = LONG if is_contiguous_row else STRIDED
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
