"""Checks of operands: dtypes, shapes and devices, with and without scales.

Extents that depend on the op's arguments and on the ranks are checked in `lowering`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.op_call import CallOperands, OpCall
from ..backends.scales import mx_scales as mx
from ..backends.scales.product_types import ProductTypes
from ..backends.scales.scale_layouts import PaddedScaleRows
from ..backends.scales.scaling import (
    FLOAT8,
    NAMED_BLOCKS,
    OUT_DTYPES,
    SCALE_DTYPES,
    blocks_named,
    why_not_exchanged,
)
from ..config.scale_blocks import MX
from ..spec import OpSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of operands without scales: float32, bfloat16, float16, and float64 for gradient checks, which only
portable backends support. Operands with scales are float8_e4m3fn or float8_e5m2 (`scaling.FLOAT8`)."""


def check_operands(spec: OpSpec, operands: CallOperands) -> None:
    """Checks dtypes, devices, layouts and shapes of operands.

    Args:
        spec: Definition of the op.
        operands: Operands of the caller; as many biases as weights, or none.

    Raises:
        TypeError: An operand is not a strided Tensor, its dtype is not supported (8 bits without scales
            neither), or it has a tangent of forward-mode AD. Or operands differ in device or, without scales,
            in dtype.
        ValueError: A shape does not fit, or the number of biases differs from the number of weights.
    """
    op, x, scales = spec.name, operands.x, operands.scales
    weights, biases = operands.lists(spec)
    if not weights:
        raise ValueError(f"{op}: weight is an empty list; pass at least one weight [N, K]")
    if biases and len(biases) != len(weights):
        raise ValueError(f"{op}: {len(weights)} weights need as many biases or none, got {len(biases)}")
    named = [("x", x), *(("weight", weight) for weight in weights), *(("bias", bias) for bias in biases)]
    if scales:
        named += [("scale_x", scales[0]), *(("scale_w", scale) for scale in _each(scales[1]))]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
        if not torch.compiler.is_compiling() and (tensor.layout != torch.strided or tensor.is_nested):
            kind = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
            raise TypeError(f"{op}: {name} must be a strided tensor, got {kind}")
        if tensor.device != x.device or (tensor.dtype != x.dtype and not scales):
            raise TypeError(
                f"{op}: operands must share dtype and device, got x {x.dtype} on {x.device} and "
                f"{name} {tensor.dtype} on {tensor.device}"
            )
        if not torch.compiler.is_compiling() and _has_tangent(tensor):
            raise TypeError(
                f"{op}: {name} has a tangent, but the op does not support forward-mode AD; use reverse mode"
            )
    if x.dtype not in (FLOAT8 if scales else DTYPES):
        hint = "; 8-bit operands need scale_x and scale_w" if x.dtype in FLOAT8 else ""
        those = "with scales must be one of" if scales else "must be one of"
        known = ", ".join(map(str, FLOAT8 if scales else DTYPES))
        raise TypeError(f"{op}: dtype {those} {known}, got {x.dtype}{hint}")
    if x.ndim < 2:
        raise ValueError(f"{op}: x must be [M, ..., K], got {shape_of(x)}")
    source, tensor = ("the first", weights[0]) if spec.reshards_k and weights[0].ndim else ("x", x)
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != tensor.shape[-1]:
            raise ValueError(
                f"{op}: weight must be [N, K] as in nn.Linear with K={tensor.shape[-1]} of {source} "
                f"{shape_of(tensor)}, "
                f"got {shape_of(weight)}"
            )
    for bias, weight in zip(biases, weights, strict=False):
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{op}: bias must be [{weight.shape[0]}] for weight {shape_of(weight)}, got {shape_of(bias)}"
            )


def check_scaled(spec: OpSpec, operands: CallOperands, call: OpCall) -> None:
    """Checks operands with scales, in addition to `check_operands`: dtypes, strides, and shapes of scales.

    Args:
        spec: Definition of the op.
        operands: Operands of the caller. x and weights have 8 bits, biases `call.out_dtype`; scales are one
            element, or one for each row or block.
        call: Options of the call; `block` names the elements that share a scale.

    Raises:
        TypeError: A dtype is not supported, or scales are not of blocks and x is sent in parts of K.
        ValueError: A shape, a stride, `call.block`, `call.dim` or the number of scales does not fit.
    """
    op, x, scale_x, scales = spec.name, operands.x, operands.scale_x, _each(operands.scale_w)
    weights, biases = operands.lists(spec)
    if len(scales) != len(weights):
        raise ValueError(f"{op}: {len(weights)} weights need as many scale_w, got {len(scales)}")
    if call.out_dtype not in OUT_DTYPES:
        raise TypeError(
            f"{op}: out_dtype must be one of {', '.join(map(str, OUT_DTYPES))}, got {call.out_dtype}"
        )
    for name, tensors, dtypes in (
        ("weight", weights, tuple(FLOAT8)),
        ("bias", biases, (call.out_dtype,)),
        ("scale_x", [scale_x], SCALE_DTYPES),
        ("scale_w", scales, SCALE_DTYPES),
    ):
        for tensor in tensors:
            if tensor.dtype not in dtypes:
                raise TypeError(
                    f"{op}: {name} must be {' or '.join(map(str, dtypes))} where x is {x.dtype} and out_dtype"
                    f" {call.out_dtype}, got {tensor.dtype}"
                )
    for name, matrix in (("x", x), *(("weight", weight) for weight in weights)):
        if matrix.numel() and matrix.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} must be contiguous along K if operands have scales, because Hopper's tensor "
                f"cores read 8-bit operands so; got strides {matrix.stride()}; call .contiguous()"
            )
    try:
        types = ProductTypes(x.dtype, weights[0].dtype, call.out_dtype, blocks_named(call.block, x.dtype))
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    if why := why_not_exchanged(spec, types):
        raise TypeError(f"{op}: {why}; got block={call.block!r}")
    scaled = [
        ("scale_x", scale_x, x),
        *(("scale_w", scale, weight) for scale, weight in zip(scales, weights, strict=True)),
    ]
    if types.blocks == MX:
        _check_mx(op, scaled)
        if x.ndim > 2 and call.dim not in (None, 0, -x.ndim):
            raise ValueError(
                f"{op}: scales of {mx.SCALE} are in the order of x's rows, so dim must be the first "
                f"dimension of x {shape_of(x)}; got dim={call.dim}"
            )
        return
    if isinstance(types.scales, PaddedScaleRows):
        _check_blocks(op, scaled, types.scales)
        return
    rows = [*x.shape[:-1], 1]
    if scale_x.numel() != 1 and list(scale_x.shape) != rows:
        raise ValueError(
            f"{op}: scale_x must have one element, or be {rows}, one per row of x; got {shape_of(scale_x)} "
            f"(of blocks, or MX types: pass block=, one of {', '.join(map(repr, NAMED_BLOCKS))})"
        )
    for scale, weight in zip(scales, weights, strict=True):
        columns = weight.shape[0]
        if scale.numel() != 1 and list(scale.shape) not in ([columns, 1], [1, columns]):
            raise ValueError(
                f"{op}: scale_w must have one element, or be [{columns}, 1] or [1, {columns}], one per row "
                f"of weight {shape_of(weight)}; got {shape_of(scale)}"
            )


def _check_mx(op: str, scaled: list[tuple[str, Tensor, Tensor]]) -> None:
    """Raises ValueError unless K and the scales of each operand (name, scales, matrix) fit MX types."""
    depth = scaled[0][2].shape[-1]
    if depth % mx.WIDTH:
        raise ValueError(
            f"{op}: K of operands with scales of {mx.SCALE} must be a multiple of {mx.WIDTH}, got {depth}"
        )
    for name, scale, matrix in scaled:
        wanted = mx.num_scales(matrix.shape[:-1].numel(), matrix.shape[-1])
        if scale.numel() != wanted or scale.ndim != 1 or scale.dtype != mx.SCALE:
            raise ValueError(
                f"{op}: {name} must be [{wanted}] of {mx.SCALE}, in atoms of 128 rows and 128 of K "
                f"(SWIZZLE_32_4_4), for an operand {shape_of(matrix)}; got {shape_of(scale)} of {scale.dtype}"
            )


def _check_blocks(op: str, scaled: list[tuple[str, Tensor, Tensor]], layout: PaddedScaleRows) -> None:
    """Raises ValueError unless each operand (name, scales, matrix) has one scale for each of its blocks."""
    for name, scale, matrix in scaled:
        *leading, depth = matrix.shape
        rows = leading if name == "scale_x" else [-(-leading[0] // layout.width)]
        wanted = [*rows, layout.along(depth)]
        if list(scale.shape) != wanted:
            raise ValueError(
                f"{op}: {name} of {layout} must be {wanted} for an operand {shape_of(matrix)}; "
                f"got {shape_of(scale)}"
            )


def shape_of(tensor: Tensor) -> str:
    """Returns the shape of a tensor as text, for messages."""
    return str(list(tensor.shape))


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
