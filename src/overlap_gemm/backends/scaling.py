"""Products of 8-bit operands whose rows have scales, `(x * scale_x) @ (weight * scale_w).T`: who multiplies.

Scales are float32 vectors: of x an element per row, of the weight one per row (so per column of the product),
or a single element. Or they are of blocks, matrices: of x `[M, ceil(K / 128)]`, of the weight
`[ceil(N / 128), ceil(K / 128)]`. A rank's scales are those of its own operands, and belong to its partial
sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.config import BLOCKS
from ..kernels.geometry import SCALE_BYTES
from ..schedules import ceil_div
from ..tuning.settings import settings
from .operands import aligned_vector

if TYPE_CHECKING:
    from .base import Problem

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Types of scaled operands, as kernels call them."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of their products; the first is the default."""

DEPTH = 16
"""K of scaled operands is a multiple of this: rows of 16 bytes, as TMA and `torch._scaled_mm` want them."""


BLOCK = BLOCKS[0][2]
"""Elements of K that share a scale of a block, and rows of a weight."""


def of_blocks(scale_x: Tensor, depth: int) -> bool:
    """Whether scales of x `[..., K]`, and so the weight's, are of blocks, of which K has several."""
    return depth > BLOCK and scale_x.ndim > 1 and scale_x.shape[-1] == -(-depth // BLOCK)


def dequantised(matrix: Tensor, scale: Tensor, _: torch.dtype) -> Tensor:
    """`[rows, K]` in float32, whatever the products' type: exact but for one rounding of each element."""
    if scale.ndim == 1:
        return matrix.float() * scale[:, None]
    rows, depth = matrix.shape
    wide = scale if len(scale) == rows else scale.repeat_interleave(BLOCK, 0)[:rows]
    return matrix.float() * wide.repeat_interleave(BLOCK, 1)[:, :depth]


def scale_bytes(depth: int, blocks: bool) -> int:
    """After each row of `rows_with_scales`: its scale or those of its blocks, a multiple of 16."""
    scales = ceil_div(depth, BLOCK) if blocks else 1
    return ceil_div(4 * scales, SCALE_BYTES) * SCALE_BYTES


def rows_with_scales(x: Tensor, scale: Tensor) -> Tensor:
    """`x` `[rows, K]`, of one row at least, as fused kernels send it: in memory after each row its scales."""
    (rows, depth), blocks = x.shape, scale.ndim == 2
    scales = scale.contiguous() if blocks else aligned_vector(scale, rows)[:, None]
    packed = x.new_empty(max(rows, 1), depth + scale_bytes(depth, blocks)).view(torch.uint8)
    packed[:rows, :depth] = x.view(torch.uint8)
    packed[:rows, depth : depth + scales.shape[1] * scale.itemsize] = scales.view(torch.uint8)
    return packed.view(x.dtype)[:, :depth]


def as_words(rows: Tensor) -> Tensor:
    """All that is there of `rows_with_scales`, as a float32 vector."""
    return rows.as_strided((len(rows) * rows.stride(0),), (1,)).view(torch.float32)


class Scaled(NamedTuple):
    """Rows with their scales, in place of a matrix wherever `torch._scaled_mm` multiplies.

    Attributes:
        values: `[rows, K]`, one of `FLOAT8`.
        scale: See the module.
        out_dtype: Of its products.
    """

    values: Tensor
    scale: Tensor
    out_dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return self.values.shape

    def new_empty(self, *shape: int) -> Tensor:
        """Room for products."""
        return self.values.new_empty(*shape, dtype=self.out_dtype)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Scaled:
        """All ranks' rows and their scales; `gather` does that to a matrix, of bytes or float32."""
        rows = gather(self.values.view(torch.uint8)).view(self.values.dtype)
        scale = gather(aligned_vector(self.scale, len(self.values))[:, None])
        return Scaled(rows, scale[:, 0], self.out_dtype)

    def times(self, weight: Scaled, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """`self @ weight.T + bias`, into `out` if given."""
        columns = len(weight.values)
        if not self.values.numel() or not columns:  # which torch's products of some types refuse
            result = self.new_empty(len(self.values), columns).zero_()
        else:
            result = self._product(weight)[:, :columns]
        if bias is not None:
            result = result + bias
        return result if out is None else out.copy_(result)

    def _product(self, weight: Scaled) -> Tensor:
        values, scale_b = weight.values, weight.scale
        if values.is_cuda and (short := -len(values) % DEPTH):  # whose columns are multiples of 16 there
            padding = values.new_zeros(short, values.shape[1])
            values = torch.cat([part.view(torch.uint8) for part in (values, padding)]).view(values.dtype)
            scale_b = torch.cat([aligned_vector(scale_b, len(weight.values)), scale_b.new_zeros(short)])
        if self.scale.numel() == scale_b.numel() == 1:
            scales = self.scale.view(()), scale_b.view(())
        else:
            scales = (
                aligned_vector(self.scale, len(self.values))[:, None],
                aligned_vector(scale_b, len(values))[None],
            )
        fast = bool(dict(settings().fields).get("fast_accum", False))
        return torch._scaled_mm(
            self.values, values.t(), *scales, out_dtype=self.out_dtype, use_fast_accum=fast
        )


Operand = Callable[[Tensor, Tensor, torch.dtype], Any]
"""What a backend's methods get for a matrix with scales."""


def with_scales(
    method: Callable[..., Any],
    dtype: torch.dtype,
    operand: Operand,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """A backend's method, which knows no scales, as a function of `(x, weight, bias, scale_x, scale_w)`.

    Args:
        method: Of `Backend`, bound to shards and group.
        dtype: Of the result, and of biases.
        operand: Makes what the method takes of a matrix and its scales.
        gather: Every rank's rows of a matrix; where a gathered operand is wanted.
    """

    def run(x: Tensor, weight: Any, bias: Any, scale_x: Tensor, scale_w: Any) -> Any:
        whole = operand(x, scale_x, dtype)
        wide = whole.new_empty(0).dtype
        if not isinstance(weight, (list, tuple)):
            bias = None if bias is None else bias.to(wide)
            return method(whole, operand(weight, scale_w, dtype), bias).to(dtype)
        weights = [operand(*one, dtype) for one in zip(weight, scale_w, strict=True)]
        gathered, outs = method(whole, weights, [one.to(wide) for one in bias])
        rows = x
        if isinstance(gathered, Scaled):
            rows = gathered.values
        elif gather is not None:  # of which the method has made something else
            rows = gather(x.view(torch.uint8)).view(x.dtype)
        return rows, [out.to(dtype) for out in outs]

    return run


def why_no_scaled_mm(problem: Problem) -> str | None:
    """Why `torch._scaled_mm` does not carry out a problem's product, None if it does."""
    assert problem.weight_dtype is not None and problem.out_dtype is not None
    if problem.blocks:
        return "torch._scaled_mm is called with scales of rows, not of blocks"
    return why_no_product(problem.device_type, problem.dtype, problem.weight_dtype, problem.out_dtype)


@cache
def why_no_product(
    device: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype
) -> str | None:
    """Why `torch._scaled_mm` does not multiply rows of these types on a type of device, None if it does."""
    if device == "cuda":  # by what its documentation says; a call would disturb a capture
        if torch.cuda.get_device_capability() < (9, 0):
            return "torch._scaled_mm with scales of rows needs a Hopper or Blackwell GPU"
        if x_dtype == weight_dtype == torch.float8_e5m2:
            return "torch._scaled_mm does not multiply e5m2 with e5m2"
        if out_dtype != torch.bfloat16:
            return f"torch._scaled_mm with scales of rows gives bfloat16, not {out_dtype}"
        return None
    try:
        a, b = (torch.zeros(DEPTH, DEPTH).to(dtype) for dtype in (x_dtype, weight_dtype))
        torch._scaled_mm(a, b.t(), torch.ones(DEPTH, 1), torch.ones(1, DEPTH), out_dtype=out_dtype)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"this torch's torch._scaled_mm says on {device}: {str(error).splitlines()[0]}"
    return None
