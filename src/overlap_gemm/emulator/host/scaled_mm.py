"""`torch._scaled_mm` of block-scaled operands, which torch has on a GPU only.

Scale factors lie as cuBLAS wants them: tiles of 128 rows by 4 blocks of K, in a tile row r % 32 first, then
r // 32, then the block; tiles of one group of rows follow each other. Blocks of 16 elements of K have e4m3
factors (NVFP4), blocks of 32 have e8m0 ones (MX).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from .. import numeric

_BLOCKS = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}


def is_block_scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Whether a call of `torch._scaled_mm` has a factor for each block of K."""
    return scale_a.dtype in _BLOCKS and scale_a.numel() > 1


def block_scaled(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`a @ b` of scaled operands, accumulated in float64; arguments as `torch._scaled_mm`'s."""
    block = _BLOCKS[scale_a.dtype]
    left, right = (_scaled(x, s, block) for x, s in ((a, scale_a), (b.t(), scale_b)))
    out = torch.from_numpy(left @ right.T)
    if bias is not None:
        out += bias.double()
    return out.to(out_dtype or torch.bfloat16)


def _scaled(x: torch.Tensor, scale: torch.Tensor, block: int) -> np.ndarray:
    """A matrix `[rows, k]` times its factors, float64."""
    if x.dtype == torch.float4_e2m1fn_x2:
        packed = x.view(torch.uint8).numpy()
        codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        values = x.double().numpy()
    rows, blocks = values.shape[0], values.shape[1] // block
    codes = scale.reshape(-1).view(torch.uint8).numpy()
    tiles = codes.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    flat = tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :blocks]
    factors = numeric.ue8m0_to_f32(flat) if block == 32 else numeric.widen(flat, "e4m3")
    return values * np.repeat(factors, block, axis=1)
