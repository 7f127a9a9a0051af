"""Results of epilogues in 8 bits, on tensors, and the scales of their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...epilogues import BLOCK
from ...epilogues.library import scale_e4m3
from ...spec.sharding import ceil_div


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values in a dtype; those beyond +-the largest of an 8-bit one become that, as in kernels."""
    if dtype.itemsize == 1:  # torch 2.13 saturates on CPUs by itself; nothing promises it elsewhere
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype)


def by_blocks(values: Tensor, block: int) -> list[Tensor]:
    """Returns values in 8 bits, divided by the scales of their rows' blocks, and these scales."""
    parts = values.unflatten(-1, (values.shape[-1] // block, block))
    scale = scale_e4m3(parts.abs().amax(-1))
    quotients = (parts * scale.reciprocal().unsqueeze(-1)).flatten(-2)
    _, scales = new_scales(values, scale.shape[:-1].numel(), values.shape[-1])
    return [rounded(quotients, torch.float8_e4m3fn), scales.copy_(scale.flatten(0, -2)).view(scale.shape)]


def new_scales(x: Tensor, rows: Any, columns: Any) -> tuple[Tensor, Tensor]:
    """Returns new scales of an 8-bit result's blocks as kernels store them, and as ops return them.

    They are one tensor: `[columns / 128, rows rounded up to 4]`, and its transpose `[rows, columns / 128]`,
    which torch's products and TMA read without a copy (`scaling.along_rows`).

    Args:
        x: Tensor on the device.
        rows: Rows of the result.
        columns: Columns of the result.
    """
    stored = x.new_empty(ceil_div(columns, BLOCK), ceil_div(rows, 4) * 4, dtype=torch.float32)
    return stored, stored.t()[:rows]
