"""Products of weights that stay in 8 bits, as checkpoints store them; rows are quantized at each call.

The weights are frozen. In `y = x @ weight.T` x and the bias have gradients, for adapters on a kept model.
Both products use 8-bit operands, and the weight is never rounded again:

- y: rows of x, quantized (or scaled by the checkpoint's activation scale), times the stored weight.
- grad x: rows of y's gradient times the weight's bytes, transposed. Row scales of the weight are along N, the
  summed dimension, so they are multiplied into y's gradient before its quantization. Block scales are
  transposed, since blocks are square.

The gradient ignores the rounding and clamping of x. Nothing of x is saved for backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backends.scales.scale_layouts import blocks_along
from ..dispatch.autocast import autocast
from ..dispatch.product_epilogues import InProduct, gradients, save
from ..epilogues import Applied
from .float8 import Float8, How, refuse_second_gradients
from .quantization import Quantized, quantize_rows


@dataclass(frozen=True)
class Stored:
    """8-bit weight of a checkpoint.

    Attributes:
        values: `[N, K]`, `torch.float8_e4m3fn`.
        scale: float32, `[N, 1]`, `[1, 1]`, or `[ceil(N / block), ceil(K / block)]`.
        input_scale: Scale of the input, float32 `[1, 1]`; None: each row is scaled at each call.
        block: Rows and elements of K that share a scale; None: scales are per row or per tensor.
    """

    values: Tensor
    scale: Tensor
    input_scale: Tensor | None = None
    block: int | None = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight `[N, K]`, scaled in float32."""
        return (self.values.float() * self.spread_scale()).to(dtype)

    def spread_scale(self) -> Tensor:
        """Returns block scales repeated for each element of `values`; other scales unchanged."""
        scale, (rows, columns) = self.scale, self.values.shape
        if self.block is not None:
            scale = scale.repeat_interleave(self.block, 0)[:rows]
            scale = scale.repeat_interleave(self.block, 1)[:, :columns]
        return scale

    def operand(self) -> Quantized:
        """Returns the weight as an operand of the ops, which take `block` separately."""
        return Quantized(self.values, self.scale)


class StoredFloat8(Float8):
    """Products of `Stored` weights; results have x's dtype."""

    def _product(
        self, how: How, x: Tensor, weights: list[Any], biases: list[Tensor], epilogue: Applied | None = None
    ) -> Sequence[Tensor]:
        x, _, biases = autocast(x, [], biases)
        if torch.is_grad_enabled() and any(weight.values.requires_grad for weight in weights):
            raise TypeError(
                f"{how.op}: a weight kept in 8 bits has no gradient, but it requires one: freeze it "
                f"(requires_grad_(False)), or load the checkpoint with quantized='dequantize'"
            )
        scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
        input_scale = torch.cat(scales).amax(0, keepdim=True) if scales else None  # the widest range
        blocks = tuple(weight.block for weight in weights)
        parts = [part for weight in weights for part in (weight.values, weight.scale)]

        def product(how: How, of: InProduct, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            fields = tuple(how), blocks, input_scale, tuple(of)
            return _StoredProduct.apply(*fields, x, *parts, *biases, *inputs)  # type: ignore[no-any-return]

        return how.apply(epilogue, x, [weight.values for weight in weights], biases, product)


STORED = StoredFloat8()


class _StoredProduct(torch.autograd.Function):
    """Product of weights that stay in 8 bits; the module describes its gradients."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        fields, blocks, input_scale, of, x, *others = args  # *args for torch.compile: see `float8._Product`
        of = InProduct(*of)
        tensors, epilogue = of.split(others)
        parts, biases = tensors[: 2 * len(blocks)], tensors[2 * len(blocks) :]
        weights = _weights(blocks, parts)
        operands = [weight.operand() for weight in weights]
        rows = _rows(x, input_scale, weights)
        outs = How(*fields).multiply(
            rows, operands, biases, x.dtype, weights[0].block, copied_weight=False, epilogue=epilogue
        )
        save(ctx, parts, of, epilogue, outs)
        ctx.how, ctx.blocks, ctx.biases = fields, blocks, len(biases)
        ctx.x, ctx.dtype = x.shape, x.dtype
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_gradients()
        parts, grads, of_inputs = gradients(ctx, len(ctx.blocks), grads)
        how = How(*ctx.how)
        local_grads = how.local_gradients(grads)
        grad_x = None
        grad_biases: list[Tensor | None] = [None] * ctx.biases
        first = 5 + len(parts)
        needs_biases = ctx.needs_input_grad[first : first + ctx.biases]
        if ctx.needs_input_grad[4]:
            dual = how.dual(ctx.x, grads[0].shape)
            rows, transposed, is_padded = _transposed(local_grads, _weights(ctx.blocks, parts))
            if is_padded:
                dual = dual._replace(weight=None)
            (grad_x,) = dual.multiply(rows, [transposed], (), ctx.dtype, ctx.blocks[0])
        if any(needs_biases):
            pairs = zip(how.of_all_rows(local_grads, ctx.x), needs_biases, strict=True)
            grad_biases = [grad.flatten(0, -2).sum(0) if needed else None for grad, needed in pairs]
        return *[None] * 4, grad_x, *[None] * len(parts), *grad_biases, *of_inputs


def _weights(blocks: tuple[int | None, ...], parts: Sequence[Tensor]) -> list[Stored]:
    pairs = zip(parts[::2], parts[1::2], blocks, strict=True)
    return [Stored(values, scale, block=block) for values, scale, block in pairs]


def _rows(x: Tensor, scale: Tensor | None, weights: list[Stored]) -> Quantized:
    """Quantizes x for weights that share it, by an activation scale or, without one, dynamically."""
    dtype, block = weights[0].values.dtype, weights[0].block
    if scale is None:
        return quantize_rows(x, dtype, block=block)
    largest = torch.finfo(dtype).max
    values = (x.float() / scale).clamp(-largest, largest).to(dtype)
    if block is not None:
        scale = scale.expand(*x.shape[:-1], blocks_along(x.shape[-1], block))
    return Quantized(values, scale)


def _transposed(grads: Sequence[Tensor], weights: list[Stored]) -> tuple[Quantized, Quantized, bool]:
    """Returns the operands of x's gradient, and whether they are padded.

    The operands are y's gradient, and all weights, transposed.
    """
    dtype, block = weights[0].values.dtype, weights[0].block
    values, scales = [weight.values for weight in weights], [weight.scale for weight in weights]
    if block is None:
        scaled = [grad.float() * scale.t() for grad, scale in zip(grads, scales, strict=True)]
        one = scales[0].new_ones(1, 1)
        return quantize_rows(_joined(scaled, -1), dtype), Quantized(_bytes_of(values), one), False
    # The last block of a weight ends with the weight, so all weights but the last are padded with zeros.
    padding = [-len(value) % block for value in values[:-1]] + [0]
    grads = [pad(grad, (0, zeros)) for grad, zeros in zip(grads, padding, strict=True)]
    transposed = Stored(_bytes_of(values, padding), _joined(scales, 0).t(), block=block)
    rows = quantize_rows(_joined(grads, -1), dtype, block=block)
    return rows, transposed.operand(), any(padding)


def _bytes_of(values: list[Tensor], padding: Sequence[int] = ()) -> Tensor:
    """Returns the values concatenated and transposed, `[K, N of all]`.

    They are moved as bytes, since not every operation supports 8-bit floats.
    """
    parts = [value.view(torch.uint8) for value in values]
    parts = [
        pad(part, (0, 0, 0, zeros)) for part, zeros in zip(parts, padding or [0] * len(parts), strict=True)
    ]
    return _joined(parts, 0).t().contiguous().view(values[0].dtype)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
