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
from ...spec import OpSpec
from ...tuning.settings import settings
from .product_types import ProductTypes
from .scale_layouts import LAYOUTS, PaddedScaleRows
from .tma_operands import aligned_vector, widened

if TYPE_CHECKING:
    from ..base import Problem
    from ..op_call import CallOperands

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Dtypes of operands with scales, and their names in kernel configurations."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of results of operands with scales: bfloat16 (the default), float16, float32. Fused kernels support
those of 16 bits."""

DEPTH = 16
"""Unit of K in `torch._scaled_mm`, and on GPUs also of N."""


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


def why_not_exchanged(spec: OpSpec, types: ProductTypes) -> str | None:
    """Returns the reason an op does not send operands with these scales; None if it does.

    Args:
        spec: Definition of the op.
        types: Types of the product.
    """
    if not spec.reshards_k or types.blocks is not None:
        return None
    names = " or ".join(f"block={name!r}" for name in NAMED_BLOCKS)
    return (
        "x is sent in parts of K, each with its rank's scales, so a sum over K has no scale; pass scales of "
        f"blocks ({names}), or 16-bit operands without scales"
    )


class Scaled(NamedTuple):
    """Operand with scales, in place of a tensor in the methods of backends that use torch.

    Attributes:
        values: `[rows, K]`, of a dtype of `FLOAT8`.
        scale: Scales in the public layout.
        types: Types of products.
    """

    values: Tensor
    scale: Tensor
    types: ProductTypes

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of products."""
        return self.types.result

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of the values."""
        return self.values.shape

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a new uninitialised tensor of `dtype`; None: that of products."""
        return self.values.new_empty(*shape, dtype=dtype or self.dtype)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Scaled:
        """Returns the rows and scales of all ranks. Collective.

        Args:
            gather: Collective function that gathers the rows of a matrix, of uint8 or of the scales' dtype.
        """
        rows = gather(self.values.view(torch.uint8)).view(self.values.dtype)
        if self.types.blocks:
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
        layout = self.types.scales
        assert isinstance(layout, PaddedScaleRows), "torch has no products of other scales that are sent"
        values = exchange(self.values.view(torch.uint8), depth).view(self.values.dtype)
        scale = exchange(self.scale.contiguous(), layout.along(depth))
        return self._replace(values=values, scale=scale)

    def times(self, weight: Scaled, addend: Tensor | None, out: Tensor | None) -> Tensor:
        """Returns `self @ weight.T + addend`, a new tensor, or `out` if it is passed."""
        columns = len(weight.values)
        if not self.values.numel() or not columns:  # torch's products of some dtypes refuse empty operands
            result = self.new_empty(len(self.values), columns).zero_()
        else:
            result = self._product(weight)[:, :columns]
        if addend is not None:
            result = result + addend
        return result if out is None else out.copy_(result)

    def _product(self, weight: Scaled) -> Tensor:
        """Returns the product with a weight by torch's scaled product, N padded as cuBLAS requires."""
        values, scale_w = weight.values, weight.scale
        if values.is_cuda and (short := -len(values) % DEPTH):  # on GPUs N must be a multiple of 16
            values = _with_rows(values, short)
            if self.types.blocks is None:
                scale_w = torch.cat([aligned_vector(scale_w, len(weight.values)), scale_w.new_zeros(short)])
        fast = bool(dict(settings().fields).get("fast_accum", False))
        scale_a, scale_b = LAYOUTS[self.types.blocks].for_torch(self.values, values, self.scale, scale_w)
        return scaled_mm_by_torch(self.values, values, scale_a, scale_b, self.dtype, fast)


def scaled_mm_by_torch(
    x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Returns the product `[M, N]` by `torch._scaled_mm`; for scales of blocks by `F.scaled_mm`.

    K is padded to a multiple of 16 with zeros, in copies.

    Args:
        x: `[M, K]`, contiguous.
        weight: `[N, K]`, contiguous.
        scale_a: Scales of x (`ScaleLayout.for_torch`).
        scale_b: Scales of the weight.
        dtype: Dtype of the product.
        fast: torch's `use_fast_accum`.
    """
    if x.shape[1] % DEPTH:
        x, weight = widened(x), widened(weight)
    if scale_a.ndim < 2 or scale_a.shape[1] == 1:
        return torch._scaled_mm(x, weight.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    kinds = F.ScalingType
    rows = len(x)
    if short := len(scale_a) - rows:
        x = _with_rows(x, short)
    return F.scaled_mm(
        x, weight.t(), scale_a, kinds.BlockWise1x128, scale_b, kinds.BlockWise128x128,
        output_dtype=dtype, use_fast_accum=fast,
    )[:rows]  # fmt: skip


def _with_rows(values: Tensor, count: int) -> Tensor:
    """Returns a copy of `values` with `count` rows of zeros appended.

    The copy is made of bytes: torch does not concatenate all 8-bit dtypes.
    """
    padding = values.new_zeros(count, values.shape[1])
    return torch.cat([part.view(torch.uint8) for part in (values, padding)]).view(values.dtype)


Operand = Callable[[Tensor, Tensor, ProductTypes], Any]
"""Function of (matrix, scale, types) that returns the operand of a backend's method."""


def dequantised(matrix: Tensor, scale: Tensor, types: ProductTypes) -> Tensor:
    """Returns `matrix * scale` in float32; see `ScaleLayout.dequantised`."""
    return LAYOUTS[types.blocks].dequantised(matrix, scale)


def with_scales(
    method: Callable[[CallOperands], Any],
    types: ProductTypes,
    operand: Operand,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[CallOperands], Any]:
    """Returns a function of `CallOperands` with scales that calls a backend's method.

    The method takes no scales: they are part of x and of the weights. Biases are converted to the dtype of
    the method's products, results to `types.result`.

    Args:
        method: Function of `CallOperands`, bound to shards and group.
        types: Types of the product.
        operand: Function that makes the method's operand from a matrix and its scales.
        gather: Collective function that gathers the rows of a matrix, for methods that gather converted
            values while the caller needs the 8-bit values. None: the caller does not need them.
    """
    dtype = types.result

    def run(operands: CallOperands) -> Any:
        x, weight, bias, scale_x, scale_w, _ = operands
        scaled_x = operand(x, scale_x, types)
        wide = scaled_x.new_empty(0).dtype
        if not isinstance(weight, (list, tuple)):
            bias = None if bias is None else bias.to(wide)
            of_weight = operand(weight, scale_w, types)
            return method(operands._replace(x=scaled_x, weight=of_weight, bias=bias)).to(dtype)
        weights = [operand(*one, types) for one in zip(weight, scale_w, strict=True)]
        biases = [one.to(wide) for one in bias or ()]
        gathered, outs = method(operands._replace(x=scaled_x, weight=weights, bias=biases))
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
    if problem.promises.has_wide_partials:
        return "torch rounds products of 8-bit operands to 16 bits, also with partials='float32'"
    for dtype in dict.fromkeys(problem.weight_dtypes):
        types = problem.types._replace(weight=dtype)
        if reason := why_no_product(problem.device_type, types, capability):
            return reason
    return None


@cache
def why_no_product(device: str, types: ProductTypes, capability: tuple[int, int] | None = None) -> str | None:
    """Returns the reason `scaled_mm_by_torch` does not support these dtypes; None if it does.

    Cached by the arguments, for the process. On other devices than CUDA a small product is tried. On CUDA a
    trial would disturb a capture, so these rules apply:

    - Scales of rows need Hopper or Blackwell; scales of blocks need Hopper and CUDA 12.9, and blocks of 128.
    - x and weight must not both be float8_e5m2.
    - The product is bfloat16.

    Args:
        device: Type of device: "cpu" or "cuda".
        types: Types of the product.
        capability: Compute capability of the CUDA device; None: the current device.
    """
    blocks, dtypes = types.blocks, (types.x, types.weight)
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
        if dtypes == (torch.float8_e5m2, torch.float8_e5m2):
            return f"{name} does not multiply e5m2 with e5m2"
        if types.result != torch.bfloat16:
            return f"{name} with scales of {kind} gives bfloat16, not {types.result}"
        return None
    depth = 2 * BLOCK if blocks else DEPTH
    try:
        a, b = (torch.zeros(DEPTH, depth).to(dtype) for dtype in dtypes)
        scales = LAYOUTS[blocks].unit((DEPTH, depth), (DEPTH, depth), a.device)
        scaled_mm_by_torch(a, b, *LAYOUTS[blocks].for_torch(a, b, *scales), types.result)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"this torch's {name} says on {device}: {str(error).splitlines()[0]}"
    return None


def _toolkit() -> tuple[int, ...]:
    """Returns the (major, minor) CUDA version that torch was built with; without CUDA, for `plan`, 12.9."""
    return tuple(int(part) for part in (torch.version.cuda or "12.9").split(".")[:2])
