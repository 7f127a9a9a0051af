"""`torch.nn.functional.scaled_mm` with an op of this library as its first argument.

    row = torch.nn.functional.ScalingType.RowWise
    local_rows = scaled_mm(gemm_reduce_scatter, a, b.t(), scale_a, row, scale_b, row)

equals `F.scaled_mm(a, b.t(), scale_a, row, scale_b, row)` of every rank's slices of K, summed over the ranks;
each rank keeps its rows.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..backends.scales.scaling import BLOCK, OUT_DTYPES, Block
from ..spec import op_named
from ..spec.sharding import ceil_div
from ..tuning.settings import configured

RECIPES = ("TensorWise", "RowWise")
"""Names of the supported members of torch's `ScalingType`, for each operand independently."""

BLOCKWISE = ("BlockWise1x128", "BlockWise128x128")
"""Supported members for blocks, of (mat_a, mat_b)."""

MX_TYPES, SWIZZLED = ("BlockWise1x32", "BlockWise1x32"), "SWIZZLE_32_4_4"
"""Supported members for MX types, of (mat_a, mat_b), and the required swizzle of their scales."""

UNSWIZZLED = "NO_SWIZZLE"


def scaled_mm(
    op: Callable[..., Any],
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | Sequence[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | Sequence[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    **options: Any,
) -> Any:
    """Runs an op on operands in the format of `torch.nn.functional.scaled_mm`.

    Args:
        op: One of the four ops.
        mat_a: x of the op, `[M, K]`, row-major.
        mat_b: Transposed weight of the op, `[K, N]`, column-major.
        scale_a: float32: one element (TensorWise), `[M, 1]` (RowWise), or `[M, ceil(K / 128)]`
            (BlockWise1x128); or a list of it. float8_e8m0fnu of any shape (BlockWise1x32).
        scale_recipe_a: Member of torch's `ScalingType`, or a list of one.
        scale_b: float32: one element (TensorWise), `[1, N]` (RowWise), or `[ceil(K / 128), ceil(N / 128)]`
            (BlockWise128x128, with BlockWise1x128 for mat_a); or a list of it. The last may have torch's
            padding of rows to a multiple of 4. float8_e8m0fnu of any shape (BlockWise1x32).
        scale_recipe_b: Member of torch's `ScalingType`, or a list of one.
        swizzle_a: None, or torch's `SwizzleType.NO_SWIZZLE`, or a list of one; `SWIZZLE_32_4_4` with
            BlockWise1x32.
        swizzle_b: None, or torch's `SwizzleType.NO_SWIZZLE`, or a list of one; `SWIZZLE_32_4_4` with
            BlockWise1x32.
        bias: `[N]`, of `output_dtype`; added once, after the sum if there is one.
        output_dtype: `torch.bfloat16`, `float16` or `float32`.
        contraction_dim: Must be empty: K is the contracted dimension.
        use_fast_accum: Use `configured(fast_accum=True)`.
        **options: Other arguments of the op: `group`, `backend`, `dim`, `rows`, ...

    Returns:
        Result of the op.

    Raises:
        ValueError: A recipe, swizzle or dimension is not supported, or the scales do not fit the recipe.
        TypeError: A type is not supported. (None as `output_dtype` is not; in torch it is the operands'
            type.)
    """
    name = op_named(getattr(op, "__name__", op)).name
    recipes = _member(scale_recipe_a), _member(scale_recipe_b)
    blocks, of_mx_types = recipes in (BLOCKWISE, MX_TYPES), recipes == MX_TYPES
    for side, recipe, swizzle in (("a", scale_recipe_a, swizzle_a), ("b", scale_recipe_b, swizzle_b)):
        if (member := _member(recipe)) not in RECIPES and not blocks:
            raise ValueError(
                f"{name}: scale_recipe_{side} must be ScalingType.{' or '.join(RECIPES)}, or the pair "
                f"{' and '.join(BLOCKWISE)}, or twice {MX_TYPES[0]}, got {member}"
            )
        if of_mx_types and (member := _member(swizzle)) != SWIZZLED:
            raise ValueError(f"{name}: swizzle_{side} must be {SWIZZLED} with {MX_TYPES[0]}, got {member}")
        if not of_mx_types and swizzle is not None and (member := _member(swizzle)) != UNSWIZZLED:
            raise ValueError(f"{name}: swizzle_{side} must be None or {UNSWIZZLED}, got {member}")
    if len(contraction_dim):
        raise ValueError(f"{name}: contraction_dim must be empty, got {list(contraction_dim)}")
    if output_dtype not in OUT_DTYPES:
        known = ", ".join(map(str, OUT_DTYPES))
        raise TypeError(f"{name}: output_dtype must be one of {known}, got {output_dtype}")
    scales = {"a": _single(scale_a), "b": _single(scale_b)}
    if of_mx_types:
        scales = {side: scale.reshape(-1) for side, scale in scales.items()}
    elif blocks:
        scales = _of_blocks(name, mat_a, mat_b, scales)
    expected = {"a": [*mat_a.shape[:-1], 1], "b": [1, mat_b.shape[-1]]}
    for side, recipe in () if blocks else (("a", scale_recipe_a), ("b", scale_recipe_b)):
        by_row, shape = _member(recipe) == RECIPES[1], list(scales[side].shape)
        if by_row and shape != expected[side]:
            raise ValueError(f"{name}: scale_{side} must be {expected[side]} (RowWise), got {shape}")
        if not by_row and scales[side].numel() != 1:
            raise ValueError(f"{name}: scale_{side} must have one element (TensorWise), got {shape}")
    block: Block = "mx" if of_mx_types else BLOCK if blocks else None
    with configured(fast_accum=True) if use_fast_accum else nullcontext():
        return op(
            mat_a, mat_b.t(), scale_x=scales["a"], scale_w=scales["b"], bias=bias, out_dtype=output_dtype,
            block=block, **options,
        )  # fmt: skip


def _of_blocks(name: str, mat_a: Tensor, mat_b: Tensor, scales: dict[str, Any]) -> dict[str, Any]:
    """Returns the scales of blocks in the layout of the ops."""
    along, columns = ceil_div(mat_a.shape[-1], BLOCK), ceil_div(mat_b.shape[-1], BLOCK)
    shapes = {side: list(scale.shape) for side, scale in scales.items()}
    if shapes["a"] != [*mat_a.shape[:-1], along]:
        raise ValueError(f"{name}: scale_a must be {[*mat_a.shape[:-1], along]}, got {shapes['a']}")
    if shapes["b"] not in ([along, columns], [ceil_div(along, 4) * 4, columns]):
        raise ValueError(
            f"{name}: scale_b must be {[along, columns]}, or of {ceil_div(along, 4) * 4} rows, "
            f"got {shapes['b']}"
        )
    return {"a": scales["a"], "b": scales["b"][:along].t()}


def _single(value: Any) -> Any:
    """Returns a value, or the only element of a list."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"scaled_mm: scales must have one level, got {len(value)}")
        return value[0]
    return value


def _member(value: Any) -> str:
    """Returns the name of a member of torch's enumerations, which older releases lack."""
    return str(getattr(_single(value), "name", value))
