"""`torch.nn.functional.scaled_mm`, word for word, with an op of ours in front.

    row = torch.nn.functional.ScalingType.RowWise
    own = scaled_mm(gemm_reduce_scatter, a, b.t(), scale_a, row, scale_b, row)

is `F.scaled_mm(a, b.t(), scale_a, row, scale_b, row)` of every rank's slices of K, summed over the ranks,
of which each keeps its rows.
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
"""Names of the members of torch's `ScalingType` that the ops take, of each operand by itself."""

BLOCKWISE = ("BlockWise1x128", "BlockWise128x128")
"""Those of blocks, of both operands."""

MX_TYPES, SWIZZLED = ("BlockWise1x32", "BlockWise1x32"), "SWIZZLE_32_4_4"
"""Those of MX types, of both operands, and how their scales lie."""

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
    """Carries out an op on operands as `torch.nn.functional.scaled_mm` takes them.

    Args:
        op: One of the four ops.
        mat_a: The op's x `[M, K]`, row-major.
        mat_b: The transpose of its weight, `[K, N]`, column-major.
        scale_a: float32; one element if `scale_recipe_a` is TensorWise, `[M, 1]` if RowWise,
            `[M, ceil(K / 128)]` if BlockWise1x128; or a list of it.
        scale_recipe_a: Of torch's `ScalingType`, or a list of one.
        scale_b: float32; one element, or `[1, N]`, or if BlockWise128x128, as `scale_recipe_a` is of blocks
            then, `[ceil(K / 128), ceil(N / 128)]`, with torch's rows up to a multiple of 4 or without; or a
            list of it. Both of float8_e8m0fnu, of any shape, if BlockWise1x32.
        scale_recipe_b: As `scale_recipe_a`.
        swizzle_a: None, or torch's `SwizzleType.NO_SWIZZLE`, or a list of one; if BlockWise1x32
            `SWIZZLE_32_4_4`.
        swizzle_b: The same.
        bias: `[N]`, of `output_dtype`; added once, after the sum where there is one.
        output_dtype: `torch.bfloat16`, `float16` or `float32`.
        contraction_dim: Empty, as nothing else is K.
        use_fast_accum: As `configured(fast_accum=True)`.
        **options: The op's others: `group`, `backend`, `dim`, `rows`, ...

    Returns:
        The op's result.

    Raises:
        ValueError: A recipe, a swizzle or dimensions that the ops do not take, or scales that are not as the
            recipe says.
        TypeError: Likewise of types; None of `output_dtype`, which to torch is the operands' type.
    """
    name = op_named(getattr(op, "__name__", op)).name
    recipes = _member(scale_recipe_a), _member(scale_recipe_b)
    blocks, of_mx_types = recipes in (BLOCKWISE, MX_TYPES), recipes == MX_TYPES
    for side, recipe, swizzle in (("a", scale_recipe_a, swizzle_a), ("b", scale_recipe_b, swizzle_b)):
        if (said := _member(recipe)) not in RECIPES and not blocks:
            raise ValueError(
                f"{name}: scale_recipe_{side} must be ScalingType.{' or '.join(RECIPES)}, got {said}; or the "
                f"two are {' and '.join(BLOCKWISE)}, or both {MX_TYPES[0]}"
            )
        if of_mx_types and (said := _member(swizzle)) != SWIZZLED:
            raise ValueError(f"{name}: swizzle_{side} must be {SWIZZLED} with {MX_TYPES[0]}, got {said}")
        if not of_mx_types and swizzle is not None and (said := _member(swizzle)) != UNSWIZZLED:
            raise ValueError(f"{name}: swizzle_{side} must be None or {UNSWIZZLED}, got {said}")
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
    wanted = {"a": [*mat_a.shape[:-1], 1], "b": [1, mat_b.shape[-1]]}
    for side, recipe in () if blocks else (("a", scale_recipe_a), ("b", scale_recipe_b)):
        by_row, shape = _member(recipe) == RECIPES[1], list(scales[side].shape)
        if by_row and shape != wanted[side]:
            raise ValueError(f"{name}: scale_{side} must be {wanted[side]} (RowWise), got {shape}")
        if not by_row and scales[side].numel() != 1:
            raise ValueError(f"{name}: scale_{side} must have one element (TensorWise), got {shape}")
    block: Block = "mx" if of_mx_types else BLOCK if blocks else None
    with configured(fast_accum=True) if use_fast_accum else nullcontext():
        return op(
            mat_a, mat_b.t(), scale_x=scales["a"], scale_w=scales["b"], bias=bias, out_dtype=output_dtype,
            block=block, **options,
        )  # fmt: skip


def _of_blocks(name: str, mat_a: Tensor, mat_b: Tensor, scales: dict[str, Any]) -> dict[str, Any]:
    """Torch's scales of blocks as the ops have them."""
    along, columns = ceil_div(mat_a.shape[-1], BLOCK), ceil_div(mat_b.shape[-1], BLOCK)
    given = {side: list(scale.shape) for side, scale in scales.items()}
    if given["a"] != [*mat_a.shape[:-1], along]:
        raise ValueError(f"{name}: scale_a must be {[*mat_a.shape[:-1], along]}, got {given['a']}")
    if given["b"] not in ([along, columns], [ceil_div(along, 4) * 4, columns]):
        raise ValueError(
            f"{name}: scale_b must be {[along, columns]}, or of {ceil_div(along, 4) * 4} rows, "
            f"got {given['b']}"
        )
    return {"a": scales["a"], "b": scales["b"][:along].t()}


def _single(given: Any) -> Any:
    """A value, of which torch takes lists, too."""
    if isinstance(given, (list, tuple)):
        if len(given) != 1:
            raise ValueError(f"one level of scales is carried out, got {len(given)}")
        return given[0]
    return given


def _member(given: Any) -> str:
    """The name of a member of torch's enumerations, which older releases lack."""
    return str(getattr(_single(given), "name", given))
