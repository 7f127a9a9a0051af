"""Torch's products of block-scaled operands, single or grouped, which torch implements on a GPU only.

Scale factors have cuBLAS's layout: tiles of 128 rows by 4 blocks of K. In a tile row r % 32 is outermost,
then r // 32, then the block; tiles of one group of rows are consecutive. Blocks of 16 elements of K have e4m3
factors (NVFP4), blocks of 32 have e8m0 ones (MX). Each group of rows, or of K, has separate tiles, in the
order of groups.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import torch

from cute_emulator.numbers import formats

_BLOCKS = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}


def is_block_scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Returns whether a call of `torch._scaled_mm` has a factor for each block of K."""
    return scale_a.dtype in _BLOCKS and scale_a.numel() > 1


def block_scaled(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns `a @ b` of scaled operands, accumulated in float64; arguments as for `torch._scaled_mm`."""
    block = _BLOCKS[scale_a.dtype]
    left, right = (_scaled(x, s, block) for x, s in ((a, scale_a), (b.t(), scale_b)))
    out = torch.from_numpy(left @ right.T)
    if bias is not None:
        out += bias.double()
    return out.to(out_dtype or torch.bfloat16)


def is_group_scaled(
    a: torch.Tensor, b: torch.Tensor, scale_a: list[torch.Tensor], *_: Any, **__: Any
) -> bool:
    """Returns whether a call of `torch._scaled_grouped_mm_v2` has a factor for each block of K."""
    return scale_a[0].dtype in _BLOCKS


def group_scaled(
    a: torch.Tensor, b: torch.Tensor,
    scale_a: list[torch.Tensor], recipe_a: list[int], swizzle_a: list[int],
    scale_b: list[torch.Tensor], recipe_b: list[int], swizzle_b: list[int],
    offs: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    *_: Any,
) -> torch.Tensor:  # fmt: skip
    """Returns a product for each group, in float64; arguments as for `torch._scaled_grouped_mm_v2`.

    If `b` is `[groups, k, n]`, groups are of rows of `a [rows, k]`, and the result is `[rows, n]`. If `b` is
    `[k, n]`, they are of K, and the result is `[groups, rows, n]`. A second factor of an operand is per
    group.

    Raises:
        NotImplementedError: There is a bias.
    """
    if bias is not None:
        raise NotImplementedError("torch._scaled_grouped_mm_v2 with a bias is not modelled")
    block = _BLOCKS[scale_a[0].dtype]
    per_byte = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    of_rows = b.dim() == 3
    flat = [scale.reshape(-1) for scale in (scale_a[0], scale_b[0])]
    used, outputs = [0, 0], []
    for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if of_rows:
            pair = a[start:end], b[group].t()
        else:
            k = slice(start // per_byte, end // per_byte)
            pair = a[:, k], b[k].t()
        operands = []
        for i, (x, scales) in enumerate(zip(pair, (scale_a, scale_b), strict=True)):
            count = -(-x.shape[0] // 128) * 128 * -(-(x.shape[1] * per_byte) // (4 * block)) * 4
            operand = _scaled(x, flat[i][used[i] : used[i] + count], block)
            used[i] += count
            operands.append(operand * scales[1].reshape(-1)[group].item() if len(scales) > 1 else operand)
        outputs.append(torch.from_numpy(operands[0] @ operands[1].T))
    out = torch.cat(outputs) if of_rows else torch.stack(outputs)
    return out.to(out_dtype or torch.bfloat16)


def _scaled(x: torch.Tensor, scale: torch.Tensor, block: int) -> np.ndarray:
    """Returns a matrix `[rows, k]` times its factors, in float64."""
    if x.dtype == torch.float4_e2m1fn_x2:
        packed = x.view(torch.uint8).numpy()
        codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        values = x.double().numpy()
    rows, blocks = values.shape[0], values.shape[1] // block
    down, across = -(-rows // 128), -(-blocks // 4)
    codes = scale.reshape(-1).view(torch.uint8).numpy().reshape(down, across, 32, 4, 4)
    flat = codes.transpose(0, 3, 2, 1, 4).reshape(128 * down, 4 * across)[:rows, :blocks]
    factors = formats.ue8m0_to_f32(flat) if block == 32 else formats.widen(flat, "e4m3")
    return values * np.repeat(factors, block, axis=1)
