"""Dynamic quantization of rows to 8 bits with scales, for ops with scaled operands.

It consists of torch operations, so that `torch.compile` (Inductor) fuses them, also with the computation of
the rows. An eager call on a GPU is one kernel of this library with the same results
(`backends.triton_kernels.row_quantization`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.scales.mx_scales import atoms_of
from ..backends.scales.scale_layouts import along_rows
from ..backends.scales.scaling import FLOAT8
from ..backends.triton_kernels.row_quantization import by_one_kernel, has_kernel
from ..dispatch.calls import is_plain
from ..epilogues.definition import LEAST_SCALE


class Quantized(NamedTuple):
    """Result of `quantize_rows`; the rows are `values * scale`.

    Attributes:
        values: `[..., K]`, `torch.float8_e4m3fn` or `torch.float8_e5m2`, contiguous.
        scale: float32, `[..., 1]`, or `[..., ceil(K / block)]`, one per block of a row (`[..., 1]` if K is at
            most `block`). As a matrix of all M rows the latter has strides 1 and `ceil(M / 4) * 4`, as
            torch's products and TMA read it.
    """

    values: Tensor
    scale: Tensor


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    block: int | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """Rounds each row to 8 bits, with the scale that maps its largest magnitude to the type's largest value.

    Use it for operands of the ops: ``values, scale = quantize_rows(x)``, then pass ``scale_x=scale`` (for a
    weight ``scale_w=``). The error of an element is at most the larger of 2^-4 of the element (e5m2: 2^-3)
    and 2^-10 of its scale (e5m2: 2^-17).

    A row of zeros has zeros and the smallest scale, 2^-60; so have rows whose elements are all below about
    2^-70. If a row contains a NaN or an infinity, all of its `values * scale` is NaN, and so is every product
    with it. With `block`, this holds for each block of a row.

    Args:
        x: `[..., K]`; float32, bfloat16 or float16. Gradients do not pass.
        dtype: `torch.float8_e4m3fn` (largest value 448) or `torch.float8_e5m2` (57344).
        block: Number of elements of a row that share a scale: 128 for weights with blocks of 128 x 128, 32
            for MX types. The last block of a row may be shorter. None: one scale per row.
        power_of_two: Round scales up to powers of two, which `torch.float8_e8m0fnu` represents exactly.

    Returns:
        `Quantized`: values `[..., K]`, and scales.

    Raises:
        TypeError: A dtype is not supported.
        ValueError: `block` is not positive, or x has no dimension.
    """
    if dtype not in FLOAT8:
        raise TypeError(f"quantize_rows: dtype must be one of {', '.join(map(str, FLOAT8))}, got {dtype}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize_rows: x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.ndim < 1 or (block is not None and block < 1):
        raise ValueError(
            f"quantize_rows: x must be [..., K] and block positive, got {list(x.shape)} and block={block}"
        )
    if block is not None and x.shape[-1] <= block:
        block = None
    if is_plain(x, (), as_op=False) and has_kernel(x, block):
        return Quantized(*by_one_kernel(x, dtype, block, LEAST_SCALE, power_of_two))
    return Quantized(*by_torch(x, dtype, block, power_of_two))


def by_torch(x: Tensor, dtype: torch.dtype, block: int | None, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Returns values and scales, computed by torch operations.

    Few reciprocals and many products replace quotients; the conversion to 8 bits rounds away the difference.
    A shorter last block is computed separately: for rows that are padded and then cut, Inductor's CPU code
    leaves the end unwritten (torch 2.13).
    """
    unit, width = 1 / torch.finfo(dtype).max, x.shape[-1]
    wide = x.detach().float()
    parts = [wide.unsqueeze(-2)]
    if block is not None:
        full_blocks = width - width % block
        parts = [wide[..., :full_blocks].unflatten(-1, (-1, block))]
        if full_blocks < width:
            parts.append(wide[..., full_blocks:].unsqueeze(-2))
    most = _joined([part.abs().amax(-1) for part in parts]) if width else wide.new_zeros(*x.shape[:-1], 1)
    scale = (most * unit).clamp(min=LEAST_SCALE)
    if power_of_two:
        scale = _up_to_power_of_two(scale)
    factors = scale.reciprocal().unsqueeze(-1).split([part.shape[-2] for part in parts], -2)
    quotients = [(part * factor).flatten(-2) for part, factor in zip(parts, factors, strict=True)]
    values = _joined(quotients).to(dtype).contiguous()
    if block is not None:
        matrix = scale.reshape(-1, scale.shape[-1])
        scale = along_rows(matrix)[: matrix.shape[0]].reshape(scale.shape)
    return values, scale


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns the parts, concatenated along the last dimension."""
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def swizzle_scales(scale: Tensor) -> Tensor:
    """Returns scales of blocks of 32 in the layout of Blackwell's tensor cores.

    The layout is torch's `SwizzleType.SWIZZLE_32_4_4`. Use ``values, scale = quantize_rows(x, block=32,
    power_of_two=True)``, then pass ``scale_x=swizzle_scales(scale)`` with the values.

    Args:
        scale: `[rows, ceil(K / 32)]`, powers of two from 2^-127 to 2^127, or NaN; other values are rounded.

    Returns:
        `torch.float8_e8m0fnu`, one-dimensional: atoms of 128 rows and 128 of K, 512 bytes each, row by row,
        padded with the smallest scale.

    Raises:
        ValueError: scale does not have two dimensions.
    """
    if scale.ndim != 2:
        raise ValueError(f"swizzle_scales: scale must be [rows, ceil(K / 32)], got {list(scale.shape)}")
    return atoms_of(scale.to(torch.float8_e8m0fnu)).view(-1)


def _up_to_power_of_two(scale: Tensor) -> Tensor:
    """Returns normal float32 values rounded up to powers of two; NaN and infinity are unchanged."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isfinite(), bits.view(torch.float32), scale)
