"""Scales of 8-bit operands, and their products by torch: `(x * scale_x) @ (weight * scale_w).T`.

| scales | of x `[M, K]` | of a weight `[N, K]` |
|---|---|---|
| rows, float32 | `[M]` | `[N]`, or one element |
| blocks of b = 128 or 32, float32 | `[M, ceil(K / b)]` | `[ceil(N / b), ceil(K / b)]` |
| MX types, e8m0 | vector (`mx_scales`) | vector |

The kind is an argument (`Blocks`). Shapes do not determine it: K of a rank can be a single block. Scales
belong to the local operands, so they apply to this rank's partial sums.
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
from ...spec import OpSpec
from ...spec.sharding import ceil_div
from ...tuning.settings import settings
from . import mx_scales as mx
from .block_scales import num_bytes
from .tma_operands import ROW_BYTES, aligned_vector, padded, widened

if TYPE_CHECKING:
    from ..base import Problem

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Dtypes of operands with scales, and their names in kernel configurations."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of results of operands with scales: bfloat16 (the default), float16, float32. Fused kernels support
those of 16 bits."""

DEPTH = 16
"""Unit of K in `torch._scaled_mm`, and on GPUs also of N."""


CUBLAS_ROWS = ROW_BYTES // 4
"""Unit of the leading extents of scales of blocks: cuBLAS loads four float32 elements."""

BLOCK = PROMOTED[0][2]
"""Extent of the blocks of most checkpoints, along K and along the rows of a weight."""

SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
"""Dtypes of scales: float32 and float8_e8m0fnu. The latter has powers of two only, which float32 represents
exactly, so scales of rows and blocks are converted to float32."""


Block = int | Literal["mx"] | None
"""Public name of blocks: extent along K and along the rows of a weight, or "mx"; None: scales of rows."""

NAMED_BLOCKS: dict[Block, Blocks] = {**{kind[2]: kind for kind in PROMOTED}, "mx": MX}


def blocks_named(block: Block, dtype: torch.dtype) -> Blocks | None:
    """Returns the blocks of a public name; None for scales of rows.

    Args:
        block: Public name.
        dtype: Dtype of x.

    Raises:
        ValueError: Operands of this dtype have no blocks of this name.
    """
    names = (None, *(NAMED_BLOCKS if dtype in FLOAT8 else ()))
    if block not in names:
        raise ValueError(f"block must be one of {', '.join(map(str, names))} of {dtype}, got {block}")
    return None if block is None else NAMED_BLOCKS[block]


def why_not_exchanged(spec: OpSpec, blocks: Blocks | None) -> str | None:
    """Returns the reason an op does not send operands with these scales; None if it does.

    Args:
        spec: Definition of the op.
        blocks: Blocks that share a scale; None: rows.
    """
    if not spec.reshards_k or blocks is not None:
        return None
    names = " or ".join(f"block={name!r}" for name in NAMED_BLOCKS)
    return (
        "x is sent in parts of K, each with its rank's scales, so a sum over K has no scale; pass scales of "
        f"blocks ({names}), or 16-bit operands without scales"
    )


def blocks_along(depth: int, blocks: Blocks) -> int:
    """Returns the number of blocks of `PROMOTED` along K, at least 1."""
    return max(ceil_div(depth, blocks[2]), 1)


def unit_scales(
    x: tuple[int, int], weight: tuple[int, int], blocks: Blocks | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns new scales of value 1 in the public layout; scales of rows are columns, `[M, 1]` and `[N, 1]`.

    Args:
        x: Shape of x; its K may be a part of the weight's.
        weight: Shape of the weight.
        blocks: Blocks that share a scale; None: rows.
        device: Device of the scales.
    """
    if blocks == MX:
        of_x, of_weight = (torch.ones(mx.num_scales(*shape), device=device) for shape in (x, weight))
        return of_x.to(mx.SCALE), of_weight.to(mx.SCALE)
    height = blocks[1] if blocks else 1
    along = [blocks_along(depth, blocks) if blocks else 1 for _, depth in (x, weight)]
    shapes = (x[0], along[0]), (ceil_div(weight[0], height), along[1])
    of_x, of_weight = (torch.ones(shape, device=device) for shape in shapes)
    return of_x, of_weight


def dequantised(
    matrix: Tensor, scale: Tensor, _: torch.dtype = torch.float32, blocks: Blocks | None = None
) -> Tensor:
    """Returns `matrix * scale` in float32, `[rows, K]`, each element rounded once.

    Args:
        matrix: 8-bit operand `[rows, K]`.
        scale: Scales in the public layout.
        _: Dtype of the result of a product, unused: the conversion is the same for all.
        blocks: Blocks that share a scale; None: rows.
    """
    if blocks is None:
        return matrix.float() * scale[:, None]
    rows, depth = matrix.shape
    if blocks == MX:
        wide = mx.rows_of(scale, rows, depth).float()
    else:
        wide = scale if len(scale) == rows else scale.repeat_interleave(blocks[1], 0)[:rows]
    return matrix.float() * wide.repeat_interleave(blocks[2], 1)[:, :depth]


def shard_bytes(rows: int, depth: int, blocks: Blocks | None) -> tuple[int, int]:
    """Returns (bytes of a row, bytes for the scales) of a full shard in a gather buffer.

    The second is a multiple of `SHARD_ALIGN`. Its place: `gather_plans.BufferLayout`.

    Args:
        rows: Rows of a full shard.
        depth: K in memory, padding included.
        blocks: Blocks that share a scale; None: rows.
    """
    after = rows * SCALE_BYTES if blocks is None else num_bytes(blocks, rows, depth)
    return depth, ceil_div(after, SHARD_ALIGN) * SHARD_ALIGN


def vector_bytes(rows: int) -> int:
    """Returns the bytes of the scales of `rows` rows as kernels send them (`scales_of_shard`)."""
    return padded(rows, SCALE_BYTES) * SCALE_BYTES


def scales_of_shard(scale: Tensor, rows: int) -> Tensor:
    """Returns the scales of `rows` rows as kernels send them: address and size are multiples of 16 bytes.

    Args:
        scale: `[rows]`, or `[1]`, which is repeated. It is returned unchanged if it obeys the rule.
        rows: Rows of the local shard.
    """
    size = padded(rows, scale.itemsize)
    if size == rows:
        return aligned_vector(scale, size)
    sent = scale.new_zeros(size)
    sent[:rows] = scale
    return sent


class Scaled(NamedTuple):
    """Operand with scales, in place of a tensor in the methods of backends that use torch.

    Attributes:
        values: `[rows, K]`, of a dtype of `FLOAT8`.
        scale: Scales in the public layout.
        out_dtype: Dtype of products.
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
        """Returns a new uninitialised tensor of `dtype`; None: of `out_dtype`."""
        return self.values.new_empty(*shape, dtype=dtype or self.out_dtype)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Scaled:
        """Returns the rows and scales of all ranks. Collective.

        Args:
            gather: Collective function that gathers the rows of a matrix, of uint8 or of the scales' dtype.
        """
        rows = gather(self.values.view(torch.uint8)).view(self.values.dtype)
        if self.blocks:
            return self._replace(values=rows, scale=gather(self.scale.contiguous()))
        scale = gather(aligned_vector(self.scale, len(self.values))[:, None])
        return self._replace(values=rows, scale=scale[:, 0])

    def exchanged(self, exchange: Callable[[Tensor, int], Tensor], depth: int) -> Scaled:
        """Returns this rank's rows and their scales of blocks, of every rank's columns. Collective.

        Values are sent as bytes. Blocks divide ceil(K / P), so that the scales are divided as the columns.

        Args:
            exchange: Collective function of a matrix and its number of columns over all ranks, as
                `collectives.columns_to_rows`.
            depth: K over all ranks.
        """
        assert self.blocks in PROMOTED, "torch has no products with scales of rows that are sent, or of MX"
        values = exchange(self.values.view(torch.uint8), depth).view(self.values.dtype)
        scale = exchange(self.scale.contiguous(), blocks_along(depth, self.blocks))
        return self._replace(values=values, scale=scale)

    def times(self, weight: Scaled, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Returns `self @ weight.T + bias`, a new tensor, or `out` if it is passed."""
        columns = len(weight.values)
        if not self.values.numel() or not columns:  # torch's products of some dtypes refuse empty operands
            result = self.new_empty(len(self.values), columns).zero_()
        else:
            result = self._product(weight)[:, :columns]
        if bias is not None:
            result = result + bias
        return result if out is None else out.copy_(result)

    def _product(self, weight: Scaled) -> Tensor:
        """Returns the product with a weight by torch's scaled product, N padded as cuBLAS requires."""
        values, scale_w = weight.values, weight.scale
        if values.is_cuda and (short := -len(values) % DEPTH):  # on GPUs N must be a multiple of 16
            values = _with_rows(values, short)
            if self.blocks is None:
                scale_w = torch.cat([aligned_vector(scale_w, len(weight.values)), scale_w.new_zeros(short)])
        fast = bool(dict(settings().fields).get("fast_accum", False))
        scales = torch_layout(self.values, values, self.scale, scale_w, self.blocks)
        return scaled_mm_by_torch(self.values, values, scales, self.out_dtype, fast)


def along_rows(scale: Tensor) -> Tensor:
    """Returns scales of blocks `[rows, blocks]` with contiguous columns, of a multiple of 4 rows.

    cuBLAS and TMA require the strides (1, multiple of 4). Scales that have them are not copied; others are
    padded with zeros.
    """
    by_block, short = scale.t(), -scale.shape[0] % CUBLAS_ROWS
    return (F.pad(by_block, (0, short)) if short else by_block.contiguous()).t()


def torch_layout(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the scales of x `[M, K]` and of a weight `[N, K]` as `scaled_mm_by_torch` takes them.

    - rows: `[M, 1]` and `[1, N]`, or no dimensions if both have one element; inputs are vectors or columns
    - blocks of 128: `[4 * ceil(M / 4), ceil(K / 128)]` and `[4 * ceil(K / 512), ceil(N / 128)]`, both with
      contiguous columns (torch 2.13, ScaledBlas.cpp)
    - blocks, if K is a single block: as for rows
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


def scaled_mm_by_torch(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Returns the product `[M, N]` by `torch._scaled_mm`; for scales of blocks by `F.scaled_mm`.

    K is padded to a multiple of 16 with zeros, in copies.

    Args:
        x: `[M, K]`, contiguous.
        weight: `[N, K]`, contiguous.
        scales: Scales of x and weight from `torch_layout`.
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
    """Returns a copy of `values` with `count` rows of zeros appended.

    The copy is made of bytes: torch does not concatenate all 8-bit dtypes.
    """
    padding = values.new_zeros(count, values.shape[1])
    return torch.cat([part.view(torch.uint8) for part in (values, padding)]).view(values.dtype)


Operand = Callable[[Tensor, Tensor, torch.dtype, Blocks | None], Any]
"""Function of (matrix, scale, dtype of the result, blocks) that returns the operand of a backend's method."""


def with_scales(
    method: Callable[..., Any],
    dtype: torch.dtype,
    operand: Operand,
    blocks: Blocks | None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """Returns a function of `(x, weight, bias, scale_x, scale_w)` that calls a backend's method.

    The method takes no scales: they are part of its operands. Biases are converted to the dtype of the
    method's products, results to `dtype`.

    Args:
        method: Function of `(x, weight, bias)`, bound to shards and group.
        dtype: Dtype of the results.
        operand: Function that makes the method's operand from a matrix and its scales.
        blocks: Blocks that share a scale; None: rows.
        gather: Collective function that gathers the rows of a matrix, for methods that gather converted
            values while the caller needs the 8-bit values. None: the caller does not need them.
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


def why_no_scaled_mm(problem: Problem, capability: tuple[int, int] | None = None) -> str | None:
    """Returns the reason `scaled_mm_by_torch` does not support a problem with scales; None if it does.

    Args:
        problem: Problem whose operands have scales.
        capability: As in `why_no_product`.
    """
    assert problem.weight_dtypes and problem.out_dtype is not None
    for dtype in dict.fromkeys(problem.weight_dtypes):
        types = problem.dtype, dtype, problem.out_dtype
        if reason := why_no_product(problem.device_type, *types, problem.blocks, capability):
            return reason
    return None


@cache
def why_no_product(
    device: str,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    blocks: Blocks | None = None,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Returns the reason `scaled_mm_by_torch` does not support these dtypes; None if it does.

    Cached by the arguments, for the process. On other devices than CUDA a small product is tried. On CUDA a
    trial would disturb a capture, so these rules apply:

    - Scales of rows need Hopper or Blackwell; scales of blocks need Hopper and CUDA 12.9, and blocks of 128.
    - x and weight must not both be float8_e5m2.
    - The product is bfloat16.

    Args:
        device: Type of device: "cpu" or "cuda".
        x_dtype: Dtype of x.
        weight_dtype: Dtype of the weight.
        out_dtype: Dtype of the product.
        blocks: Blocks that share a scale; None: rows.
        capability: Compute capability of the CUDA device; None: the current device.
    """
    name, kind = ("F.scaled_mm", "blocks") if blocks else ("torch._scaled_mm", "rows")
    if blocks and not hasattr(getattr(F, "ScalingType", None), "BlockWise128x128"):
        return f"torch {torch.__version__} has no F.scaled_mm with scales of blocks"
    if blocks not in (None, PROMOTED[0]):
        return f"{name} has scales of {in_words(PROMOTED[0])}, not of {in_words(blocks)}"
    if device == "cuda":  # by rules of torch's documentation and source; a trial would disturb a capture
        capability, toolkit = capability or torch.cuda.get_device_capability(), _toolkit()
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
        scaled_mm_by_torch(a, b, torch_layout(a, b, *scales, blocks), out_dtype)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"this torch's {name} says on {device}: {str(error).splitlines()[0]}"
    return None


def _toolkit() -> tuple[int, ...]:
    """Returns the (major, minor) CUDA version that torch was built with; without CUDA, for `plan`, 12.9."""
    return tuple(int(part) for part in (torch.version.cuda or "12.9").split(".")[:2])
