"""Products of 8-bit operands whose rows have scales, `(x * scale_x) @ (weight * scale_w).T`, in torch.

Scales of rows are float32 vectors: for x an element per row, for the weight one per row (a column of the
product), or a single element. Scales of blocks are matrices: with b = 128 or 32 for x `[M, ceil(K / b)]`, for
the weight `[ceil(N / b), ceil(K / b)]`. Scales of MX types (`mx_scales`) are a vector of 8-bit elements. The
kind is passed (`Blocks`), never inferred from shapes, which are ambiguous if a rank's K is one block. A
rank's scales belong to its local operands, and so to its partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.scale_blocks import MX, PROMOTED, Blocks, in_words
from ...exchange.geometry import SCALE_BYTES, SHARD_ALIGN
from ...spec.sharding import ceil_div
from ...tuning.settings import settings
from . import mx_scales as mx
from .block_scales import num_bytes
from .tma_operands import ROW_BYTES, aligned_vector, padded, widened

if TYPE_CHECKING:
    from ..base import Problem

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Dtypes of scaled operands, and their names in kernel configurations."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of their products; the first is the default."""

DEPTH = 16
"""`torch._scaled_mm` requires K to be a multiple of this, and on GPUs N, too."""


CUBLAS_ROWS = ROW_BYTES // 4
"""Scales of blocks that cuBLAS reads together: leading extents are multiples of this."""

BLOCK = PROMOTED[0][2]
"""Elements of K, and rows of a weight, that share a scale in most checkpoints."""

SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
"""Dtypes of scales; the second one holds powers of two, which float32 represents exactly."""


Block = int | Literal["mx"] | None
"""Public names of blocks: rows of a weight, and elements of K, that share a scale; MX types; None: rows."""

NAMED_BLOCKS: dict[Block, Blocks] = {**{kind[2]: kind for kind in PROMOTED}, "mx": MX}


def blocks_named(block: Block, dtype: torch.dtype) -> Blocks | None:
    """Returns the blocks that have this public name, for operands of this dtype.

    Raises:
        ValueError: The dtype has no blocks of this name.
    """
    names = (None, *(NAMED_BLOCKS if dtype in FLOAT8 else ()))
    if block not in names:
        raise ValueError(f"block must be one of {', '.join(map(str, names))} of {dtype}, got {block}")
    return None if block is None else NAMED_BLOCKS[block]


def blocks_along(depth: int, blocks: Blocks) -> int:
    """Returns the number of blocks of `PROMOTED` along K, at least one."""
    return max(ceil_div(depth, blocks[2]), 1)


def unit_scales(
    x: tuple[int, int], weight: tuple[int, int], blocks: Blocks | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns scales of ones for operands of these shapes, in the layout that callers pass."""
    if blocks == MX:
        of_x, of_weight = (torch.ones(mx.num_scales(*shape), device=device) for shape in (x, weight))
        return of_x.to(mx.SCALE), of_weight.to(mx.SCALE)
    height, along = (blocks[1], blocks_along(x[1], blocks)) if blocks else (1, 1)
    shapes = (x[0], along), (ceil_div(weight[0], height), along)
    of_x, of_weight = (torch.ones(shape, device=device) for shape in shapes)
    return of_x, of_weight


def dequantised(
    matrix: Tensor, scale: Tensor, _: torch.dtype = torch.float32, blocks: Blocks | None = None
) -> Tensor:
    """Returns `[rows, K]` in float32, for any dtype of products: exact but for one rounding per element."""
    if blocks is None:
        return matrix.float() * scale[:, None]
    rows, depth = matrix.shape
    if blocks == MX:
        wide = mx.rows_of(scale, rows, depth).float()
    else:
        wide = scale if len(scale) == rows else scale.repeat_interleave(blocks[1], 0)[:rows]
    return matrix.float() * wide.repeat_interleave(blocks[2], 1)[:, :depth]


def shard_bytes(rows: int, depth: int, blocks: Blocks | None) -> tuple[int, int]:
    """Returns the bytes of a row of a gathered full shard, and the bytes from its rows to the next shard."""
    after = rows * SCALE_BYTES if blocks is None else num_bytes(blocks, rows, depth)
    return depth, ceil_div(after, SHARD_ALIGN) * SHARD_ALIGN


def scales_of_shard(scale: Tensor, rows: int) -> Tensor:
    """Returns the scales of `rows` rows as fused kernels send them: whole 16 bytes, aligned to 16 bytes.

    The result is `scale` or a copy; a single element is copied `rows` times.
    """
    size = padded(rows, scale.itemsize)
    if size == rows:
        return aligned_vector(scale, size)
    sent = scale.new_zeros(size)
    sent[:rows] = scale
    return sent


class Scaled(NamedTuple):
    """Rows with their scales, in place of a matrix in products by torch (`torchs_product`).

    Attributes:
        values: `[rows, K]`, a dtype of `FLOAT8`.
        scale: Scales of rows, blocks or MX types, as described in this module.
        out_dtype: Dtype of the products.
        blocks: Blocks that share a scale; None: rows.
    """

    values: Tensor
    scale: Tensor
    out_dtype: torch.dtype
    blocks: Blocks | None = None

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of the values."""
        return self.values.shape

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns an uninitialised tensor for products, of `dtype` or else `out_dtype`."""
        return self.values.new_empty(*shape, dtype=dtype or self.out_dtype)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Scaled:
        """Returns all ranks' rows and scales; `gather` gathers a matrix of bytes or float32."""
        rows = gather(self.values.view(torch.uint8)).view(self.values.dtype)
        if self.blocks:
            return self._replace(values=rows, scale=gather(self.scale.contiguous()))
        scale = gather(aligned_vector(self.scale, len(self.values))[:, None])
        return self._replace(values=rows, scale=scale[:, 0])

    def times(self, weight: Scaled, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Returns `self @ weight.T + bias`, stored in `out` if passed."""
        columns = len(weight.values)
        if not self.values.numel() or not columns:  # torch's products of some dtypes refuse empty operands
            result = self.new_empty(len(self.values), columns).zero_()
        else:
            result = self._product(weight)[:, :columns]
        if bias is not None:
            result = result + bias
        return result if out is None else out.copy_(result)

    def _product(self, weight: Scaled) -> Tensor:
        values, scale_w = weight.values, weight.scale
        if values.is_cuda and (short := -len(values) % DEPTH):  # on GPUs N must be a multiple of 16
            values = _with_rows(values, short)
            if self.blocks is None:
                scale_w = torch.cat([aligned_vector(scale_w, len(weight.values)), scale_w.new_zeros(short)])
        fast = bool(dict(settings().fields).get("fast_accum", False))
        scales = as_torch_has_them(self.values, values, self.scale, scale_w, self.blocks)
        return torchs_product(self.values, values, scales, self.out_dtype, fast)


def along_rows(scale: Tensor) -> Tensor:
    """Returns scales of blocks `[rows, blocks]` with contiguous columns, for TMA and cuBLAS.

    The result is `scale` or a copy. Its strides are 1 and a multiple of 4; rows are padded to that multiple.
    """
    by_block, short = scale.t(), -scale.shape[0] % CUBLAS_ROWS
    return (F.pad(by_block, (0, short)) if short else by_block.contiguous()).t()


def as_torch_has_them(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the scales of x `[M, K]` and weight `[N, K]` as torch's product takes them.

    Scales of rows (vectors or columns): `[M, 1]` and `[1, N]`, or one element each. Scales of blocks of 128:
    `[M', ceil(K / 128)]` and `[4 * ceil(K / 512), ceil(N / 128)]`, both with contiguous columns (torch 2.13,
    ScaledBlas.cpp). M' is the next multiple of 4 of M. If K is one block, scales of rows.
    """
    if blocks and scale_x.shape[1] > 1:
        return along_rows(scale_x), along_rows(scale_w.t())
    if blocks:
        scale_w = scale_w.repeat_interleave(blocks[1], 0)[: len(weight)]
    if scale_x.numel() == scale_w.numel() == 1:
        return scale_x.reshape(()), scale_w.reshape(())
    return (
        aligned_vector(scale_x.reshape(-1), len(x))[:, None],
        aligned_vector(scale_w.reshape(-1), len(weight))[None],
    )


def torchs_product(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Returns the product `[M, N]` by `torch._scaled_mm` or, for blocks, by `F.scaled_mm`.

    Args:
        x: `[M, K]`, contiguous.
        weight: `[N, K]`, contiguous.
        scales: Scales from `as_torch_has_them`.
        out_dtype: Dtype of the product.
        fast: torch's `use_fast_accum`.
    """
    scale_a, scale_b = scales
    if x.shape[1] % DEPTH:
        x, weight = widened(x), widened(weight)
    if scale_a.ndim < 2 or scale_a.shape[1] == 1:
        return torch._scaled_mm(x, weight.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    kinds = F.ScalingType
    rows = len(x)
    if short := len(scale_a) - rows:
        x = _with_rows(x, short)
    return F.scaled_mm(
        x, weight.t(), scale_a, kinds.BlockWise1x128, scale_b, kinds.BlockWise128x128,
        output_dtype=out_dtype, use_fast_accum=fast,
    )[:rows]  # fmt: skip


def _with_rows(values: Tensor, count: int) -> Tensor:
    """Returns `values` with `count` rows of zeros appended, for dtypes that torch does not concatenate."""
    padding = values.new_zeros(count, values.shape[1])
    return torch.cat([part.view(torch.uint8) for part in (values, padding)]).view(values.dtype)


Operand = Callable[[Tensor, Tensor, torch.dtype, Blocks | None], Any]
"""Function that makes the operand of a backend's methods from a matrix and its scales."""


def with_scales(
    method: Callable[..., Any],
    dtype: torch.dtype,
    operand: Operand,
    blocks: Blocks | None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """Returns a backend's method, which takes no scales, as one of `(x, weight, bias, scale_x, scale_w)`.

    Args:
        method: Method of a `Backend`, bound to shards and group.
        dtype: Dtype of the result, and of biases.
        operand: Function that makes the method's operand from a matrix and its scales.
        blocks: Blocks that share a scale; None: rows.
        gather: Function that gathers every rank's rows of a matrix; None if the gathered operand is not
            needed.
    """

    def run(x: Tensor, weight: Any, bias: Any, scale_x: Tensor, scale_w: Any) -> Any:
        scaled_x = operand(x, scale_x, dtype, blocks)
        wide = scaled_x.new_empty(0).dtype
        if not isinstance(weight, (list, tuple)):
            bias = None if bias is None else bias.to(wide)
            return method(scaled_x, operand(weight, scale_w, dtype, blocks), bias).to(dtype)
        weights = [operand(*one, dtype, blocks) for one in zip(weight, scale_w, strict=True)]
        gathered, outs = method(scaled_x, weights, [one.to(wide) for one in bias])
        rows = x
        if isinstance(gathered, Scaled):
            rows = gathered.values
        elif gather is not None:  # the method has gathered the converted operand
            rows = gather(x.view(torch.uint8)).view(x.dtype)
        return rows, [out.to(dtype) for out in outs]

    return run


def why_no_scaled_mm(problem: Problem) -> str | None:
    """Returns the reason torch does not multiply a problem's operands; None if it does."""
    assert problem.weight_dtype is not None and problem.out_dtype is not None
    types = problem.dtype, problem.weight_dtype, problem.out_dtype
    return why_no_product(problem.device_type, *types, problem.blocks)


@cache
def why_no_product(
    device: str,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    blocks: Blocks | None = None,
) -> str | None:
    """Returns the reason `torchs_product` does not multiply these dtypes on a device type, or None."""
    name, kind = ("F.scaled_mm", "blocks") if blocks else ("torch._scaled_mm", "rows")
    if blocks and not hasattr(getattr(F, "ScalingType", None), "BlockWise128x128"):
        return f"torch {torch.__version__} has no F.scaled_mm with scales of blocks"
    if blocks not in (None, PROMOTED[0]):
        return f"{name} has scales of {in_words(PROMOTED[0])}, not of {in_words(blocks)}"
    if device == "cuda":  # by torch's documentation and source; a call would disturb a capture
        capability, toolkit = torch.cuda.get_device_capability(), _toolkit()
        if capability < (9, 0):
            return f"{name} with scales of {kind} needs a Hopper {'' if blocks else 'or Blackwell '}GPU"
        if blocks and (capability >= (10, 0) or toolkit < (12, 9)):
            return (
                f"{name} with scales of blocks needs a Hopper GPU and CUDA 12.9, not sm_{capability[0]}x "
                f"and {'.'.join(map(str, toolkit))}"
            )
        if x_dtype == weight_dtype == torch.float8_e5m2:
            return f"{name} does not multiply e5m2 with e5m2"
        if out_dtype != torch.bfloat16:
            return f"{name} with scales of {kind} gives bfloat16, not {out_dtype}"
        return None
    depth = 2 * BLOCK if blocks else DEPTH
    try:
        a, b = (torch.zeros(DEPTH, depth).to(dtype) for dtype in (x_dtype, weight_dtype))
        scales = unit_scales((DEPTH, depth), (DEPTH, depth), blocks, a.device)
        torchs_product(a, b, as_torch_has_them(a, b, *scales, blocks), out_dtype)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"this torch's {name} says on {device}: {str(error).splitlines()[0]}"
    return None


def _toolkit() -> tuple[int, ...]:
    """Returns the CUDA version that torch was built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
