"""8-bit rows with scales of rows that have none: what stands in front of an op that takes them.

Torch's own operations, so that a compiler sees what is done: `torch.compile` (Inductor) fuses them, with what
computed the rows where that is compiled, too. Called eagerly on a GPU it is one kernel of ours, with the same
results (`backends.scales.row_quantization`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.scales.mx_scales import atoms_of
from ..backends.scales.row_quantization import by_one_kernel, has_kernel
from ..backends.scales.scaling import FLOAT8, along_rows
from ..dispatch.calls import is_plain

LEAST_SCALE = 2.0**-60
"""No scale is smaller: the product of two is a normal float32, and rows of zeros are no special case."""


class Quantized(NamedTuple):
    """What `quantize_rows` made of rows: they are `values * scale`.

    Attributes:
        values: `[..., K]`, one of `torch.float8_e4m3fn` and `torch.float8_e5m2`, contiguous.
        scale: float32, `[..., 1]`, or `[..., ceil(K / block)]`, one for each block of a row. The latter lie
            along the rows, as torch's products and TMA read them: as a matrix of all M rows in their order
            they have strides 1 and M, rounded up to a multiple of 4.
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
    """Rounds each row to 8 bits, with the scale that makes its largest magnitude the type's largest value.

    The dynamic scaling of an operand of the ops: ``values, scale = quantize_rows(x)``, then ``scale_x=scale``
    (of a weight ``scale_w=``) alongside. An element comes back to within 2^-4 of itself (e5m2: 2^-3), or
    within 2^-10 (2^-17) of its scale, whichever is more.

    A row of zeros is zeros, its scale the least there is, 2^-60; so are elements below 2^-70 or so. Of a row
    that holds a NaN or an infinity `values * scale` is NaN throughout, and so is every product with the row.

    Args:
        x: `[..., K]`; float32, bfloat16 or float16. No gradient passes.
        dtype: `torch.float8_e4m3fn` (largest value 448) or `torch.float8_e5m2` (57344).
        block: Elements of a row that share a scale: 128 for weights of 128 x 128 blocks, 32 of MX types.
            The last block of a row may be shorter. None: one scale for the row.
        power_of_two: Round scales up to powers of two, which `torch.float8_e8m0fnu` holds exactly.

    Returns:
        `Quantized`: values `[..., K]`, and scales.

    Raises:
        TypeError: A dtype that is not one of these.
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
    """Values and scales.

    Products with reciprocals, of which there are few, in place of quotients; what is rounded up by that, the
    conversion rounds down again. A last block that is shorter is by itself: of rows that are filled up, and
    cut again, Inductor's code for CPUs leaves the end unwritten (torch 2.13).
    """
    unit, width = 1 / torch.finfo(dtype).max, x.shape[-1]
    wide = x.detach().float()
    parts = [wide.unsqueeze(-2)]
    if block is not None:
        whole = width - width % block
        parts = [wide[..., :whole].unflatten(-1, (-1, block))]
        if whole < width:
            parts.append(wide[..., whole:].unsqueeze(-2))
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
    """Along the last dimension."""
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def swizzle_scales(scale: Tensor) -> Tensor:
    """Scales of blocks of 32 as Blackwell's tensor cores read them (torch's `SwizzleType.SWIZZLE_32_4_4`).

    ``values, scale = quantize_rows(x, block=32, power_of_two=True)``, then ``scale_x=swizzle_scales(scale)``
    with the values.

    Args:
        scale: `[rows, ceil(K / 32)]`, of powers of two from 2^-127 to 2^127, or NaN; others are rounded.

    Returns:
        `torch.float8_e8m0fnu`, one-dimensional: atoms of 128 rows and 128 of K, 512 bytes each, those of the
        same rows after each other; filled up with the least scale.

    Raises:
        ValueError: scale has not two dimensions.
    """
    if scale.ndim != 2:
        raise ValueError(f"swizzle_scales: scale must be [rows, ceil(K / 32)], got {list(scale.shape)}")
    return atoms_of(scale.to(torch.float8_e8m0fnu)).view(-1)


def _up_to_power_of_two(scale: Tensor) -> Tensor:
    """The next power of two of normal float32 values, themselves if they are one; NaN and infinity stay."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isfinite(), bits.view(torch.float32), scale)
