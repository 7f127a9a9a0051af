"""Epilogues ready for use: bias, scales, residual, activations, and gated activations of pairs.

A gradient function's parameter with a leading underscore is not read, so it is not saved for backward.
"""

from __future__ import annotations

from typing import Any

from .arithmetic import gelu, gelu_tanh, maximum, reciprocal, relu, rsqrt, silu
from .definition import BLOCK, LARGEST, LEAST_SCALE, epilogue


def _of_sum_and_bias(gradients: Any, _outputs: Any, _inputs: Any) -> Any:
    (gradient,) = gradients
    return gradient, gradient.sum(0)


@epilogue(inputs={"bias": "columns"}, gradient=_of_sum_and_bias)
def add_bias(x: Any, bias: Any) -> Any:
    """Returns x + bias."""
    return x + bias


@epilogue(inputs={"row": "rows", "column": "columns"}, of="partial")
def scale_rows_and_columns(x: Any, row: Any, column: Any) -> Any:
    """Returns x * row * column, of one rank's partial sum and the scales of its operands."""
    return x * (row * column)


@epilogue(inputs={"scale": "rows"})
def scale_rows(x: Any, scale: Any) -> Any:
    """Returns x * scale, with one scale for each row of the result."""
    return x * scale


@epilogue(inputs={"scale": "gathered_rows"})
def scale_gathered_rows(x: Any, scale: Any) -> Any:
    """Returns x * scale, with one scale for each row of this rank's x, in `all_gather_gemm`."""
    return x * scale


def _of_sum_and_residual(gradients: Any, _outputs: Any, _inputs: Any) -> Any:
    (gradient,) = gradients
    return gradient, gradient


@epilogue(inputs={"residual": "element"}, gradient=_of_sum_and_residual)
def add_residual(x: Any, residual: Any) -> Any:
    """Returns x + residual."""
    return x + residual


def _of_stream(gradients: Any, outputs: Any, _inputs: Any) -> Any:
    """Returns the gradients of sum and residual: d(stream) + 2 stream d(squares)."""
    stream, _ = outputs
    of_stream, of_squares = gradients
    gradient = of_stream.clone().addcmul_(stream, 2.0 * of_squares[:, None])  # rounded once, without fp32
    return gradient, gradient


@epilogue(inputs={"residual": "element"}, outputs={"squares": "row_sum"}, gradient=_of_stream)
def add_residual_squared(x: Any, residual: Any) -> Any:
    """Returns y = x + residual, and y * y, whose sum over each row an RMS norm after the op needs."""
    stream = x + residual
    return stream, stream * stream


def _of_norm(gradients: Any, outputs: Any, inputs: Any) -> Any:
    """Returns the gradients of sum, residual and weight, in float32 (or float64), from the stream."""
    (of_normed, of_stream), (_, stream), (_, weight, eps) = gradients, outputs, inputs
    wide = stream if stream.element_size() == 8 else stream.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, scaled = wide * rstd, of_normed * weight
    gradient = (rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).add_(of_stream)
    gradient = gradient.to(of_stream.dtype)
    return gradient, gradient, (of_normed * normed).sum(0), None


def _normed(stream: Any, squares: Any, weight: Any, eps: Any) -> Any:
    """Returns the stream divided by the root of its row's mean square, times weight."""
    return stream * rsqrt(squares + eps) * weight


@epilogue(
    inputs={"residual": "element", "weight": "columns", "eps": "scalar"},
    outputs={"squares": "row_mean"},
    gradient=_of_norm,
    then=_normed,
)
def add_residual_rms_norm(x: Any, residual: Any) -> Any:
    """Returns the stream x + residual; the op returns its RMS norm, times weight, and the stream."""
    stream = x + residual
    return stream, stream * stream


def scale_e4m3(largest: Any) -> Any:
    """Returns the scale of 8-bit values from their largest magnitude: it becomes 448; at least 2^-60."""
    return maximum(largest * (1 / LARGEST), LEAST_SCALE)


def _normed_e4m3(stream: Any, squares: Any, largest: Any, weight: Any, eps: Any) -> Any:
    """Returns the norm divided by the row's scale, and that scale."""
    rstd = rsqrt(squares + eps)
    scale = scale_e4m3(largest * rstd)
    return stream * weight * (rstd * reciprocal(scale)), scale


@epilogue(
    inputs={"residual": "element", "weight": "columns", "eps": "scalar"},
    outputs={"squares": "row_mean", "largest": "row_max", "scale": "rows"},
    result="e4m3",
    then=_normed_e4m3,
)
def add_residual_rms_norm_e4m3(x: Any, residual: Any, weight: Any) -> Any:
    """Returns the stream x + residual; the op returns its RMS norm, times weight, in 8 bits.

    After it the op returns a scale for each row, and the stream. `scale[..., None]` is the `scale_x` of a
    product. A scale is the largest magnitude of the norm / 448, at least 2^-60.
    """
    stream = x + residual
    return stream, stream * stream, abs(stream * weight)


def _of_relu(gradients: Any, outputs: Any, _inputs: Any) -> Any:
    (gradient,), (result,) = gradients, outputs
    return (gradient * (result > 0),)


@epilogue(gradient=_of_relu)
def apply_relu(x: Any) -> Any:
    """Returns relu(x)."""
    return relu(x)


@epilogue
def apply_silu(x: Any) -> Any:
    """Returns silu(x)."""
    return silu(x)


@epilogue
def apply_gelu(x: Any) -> Any:
    """Returns gelu(x)."""
    return gelu(x)


@epilogue
def apply_gelu_tanh(x: Any) -> Any:
    """Returns gelu_tanh(x)."""
    return gelu_tanh(x)


@epilogue(pairs=True)
def swiglu(gate: Any, up: Any) -> Any:
    """Returns silu(gate) * up."""
    return silu(gate) * up


@epilogue(pairs=True)
def geglu(gate: Any, up: Any) -> Any:
    """Returns gelu(gate) * up."""
    return gelu(gate) * up


@epilogue(pairs=True)
def geglu_tanh(gate: Any, up: Any) -> Any:
    """Returns gelu_tanh(gate) * up."""
    return gelu_tanh(gate) * up


@epilogue(inputs={"scale": "scalar"}, result="e4m3")
def to_e4m3(x: Any, scale: Any) -> Any:
    """Returns x / scale in 8 bits.

    `scale` is a number or a tensor of one element. A product that follows takes it as `scale_x`, a float32
    tensor of one element.
    """
    return x / scale


@epilogue(inputs={"scale": "scalar"}, pairs=True, result="e4m3")
def swiglu_e4m3(gate: Any, up: Any, scale: Any) -> Any:
    """Returns silu(gate) * up / scale in 8 bits; `scale` as in `to_e4m3`."""
    return silu(gate) * up / scale


@epilogue(result="e4m3", block=BLOCK)
def to_e4m3_blocks(x: Any) -> Any:
    """Returns x in 8 bits, with a scale for each 128 columns of a row."""
    return x


@epilogue(pairs=True, result="e4m3", block=BLOCK)
def swiglu_e4m3_blocks(gate: Any, up: Any) -> Any:
    """Returns silu(gate) * up in 8 bits, with a scale for each 128 columns of a row."""
    return silu(gate) * up


TORCH_OPERATIONS: dict[str, tuple[str, ...]] = {
    one.key: operations
    for one, operations in (
        (add_bias, ("add",)),
        (scale_rows, ("mul",)),
        (scale_gathered_rows, ("mul",)),
        (scale_gathered_rows.with_rows, ("mul",)),
        (add_residual, ("add",)),
        (apply_relu, ("relu",)),
        (apply_silu, ("silu",)),
        (apply_gelu, ("gelu",)),
        (apply_gelu_tanh, ("gelu_tanh",)),
        (swiglu, ("silu", "mul")),
        (geglu, ("gelu", "mul")),
        (geglu_tanh, ("gelu_tanh", "mul")),
    )
}
"""torch's operations for epilogues that they apply after an op in the dtype of the sums, by `Epilogue.key`.

The first one takes the first sum, each other one the result so far. `BINARY` ones also take the next operand:
the second sum of a pair, then the inputs. Each computes in fp32 and rounds once, in forward and in backward.
"""

BINARY = ("add", "mul")
"""Operations of `TORCH_OPERATIONS` with two operands."""
