"""The products of linear layers in 8 bits, with gradients: operands quantised by row at every call.

    layer = nn.ColumnParallelLinear(4096, 16384, sequence_parallel=True, float8=nn.Float8())

Of `y = x @ weight.T` and its gradients:

    y       rows of x and rows of the weight, each with its scale: what all_gather_gemm sends are 8-bit rows
    grad x  rows of y's gradient, and rows of the weight's transpose, quantised anew: they lie along N, and
            Hopper's tensor cores read 8-bit operands that are contiguous along the summed dimension alone
    grad w  in the operands' own type: its summed dimension are the tokens, along which no row has one scale;
            or, with `wgrad=True`, both quantised anew along the tokens

Parameters, and what is saved for backward, stay in their own type: optimizers, checkpoints, FSDP and
recomputation see nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.base import BackendName
from ..backends.scaling import FLOAT8
from ..backends.select import with_fallback
from ..dispatch import moves
from ..dispatch.autocast import autocast
from ..dispatch.options import Length
from ..runtime.group import GroupLike, group_name
from ..spec import (
    ALL_GATHER_GEMM,
    ARGUMENTS,
    GEMM_ALL_GATHER,
    GEMM_ALL_REDUCE,
    GEMM_REDUCE_SCATTER,
    OPS,
    OpSpec,
)
from . import functional
from .quantization import Quantized, quantize_rows


class Products:
    """The five products that layers are made of, in their operands' own type: those of `functional`."""

    all_gather_gemm = staticmethod(functional.all_gather_gemm)
    gemm_reduce_scatter = staticmethod(functional.gemm_reduce_scatter)
    gemm_all_reduce = staticmethod(functional.gemm_all_reduce)
    gemm_all_gather = staticmethod(functional.gemm_all_gather)
    column_parallel_gemm = staticmethod(functional.column_parallel_gemm)


PLAIN = Products()
LOCAL = "column_parallel_gemm"


@dataclass(frozen=True)
class Float8(Products):
    """How linear layers multiply in 8 bits: dynamic scales of rows, in forward and for the input's gradient.

    An argument (`float8=`) of the layers in `overlap_gemm.nn`, the styles, and `parallelize`; its methods are
    the ops themselves, with gradients: operands in their own type, of 16 or 32 bits, which is the result's,
    too. There are no gradients of gradients.

    Each operand is quantised by one kernel (`quantize_rows`); in a compiled model Inductor makes it.

    Attributes:
        dtype: Of x and weight: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        grad_dtype: Of the result's gradient, where the gradient of x is made; the weight is `dtype` there,
            too.
        wgrad: Whether the gradient of the weight is made in 8 bits, too: of x (`dtype`) and the result's
            gradient (`grad_dtype`), quantised anew along the tokens, each feature with a scale.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    wgrad: bool = False

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("grad_dtype", self.grad_dtype)):
            if dtype not in FLOAT8:
                raise TypeError(f"Float8: {name} must be one of {', '.join(map(str, FLOAT8))}, got {dtype}")
        if not isinstance(self.wgrad, bool):
            raise TypeError(f"Float8: wgrad must be True or False, got {self.wgrad!r}")

    def all_gather_gemm(  # type: ignore[override]
        self,
        x_shard: Tensor,
        weight: Tensor | Sequence[Tensor],
        *,
        bias: Tensor | Sequence[Tensor] | None = None,
        group: GroupLike = None,
        dim: int = 0,
        rows: Length = None,
        columns: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
    ) -> Any:
        """`overlap_gemm.all_gather_gemm`; 8-bit rows travel, with a scale each."""
        how = _How(ALL_GATHER_GEMM.name, group_name(group), backend, reserve_sms, columns, rows, dim)
        single = isinstance(weight, (Tensor, Stored))
        weights: list[Any] = [weight] if single else list(weight)
        biases = [bias] if isinstance(bias, Tensor) else list(bias or [])
        outs = self._product(how, x_shard, weights, biases)
        return outs[0] if single else list(outs)

    def gemm_reduce_scatter(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        group: GroupLike = None,
        dim: int = 0,
        k: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
    ) -> Tensor:
        """`overlap_gemm.gemm_reduce_scatter`; partial sums travel in x's type, their gradients in 8 bits."""
        how = _How(GEMM_REDUCE_SCATTER.name, group_name(group), backend, reserve_sms, k, dim=dim)
        return self._product(how, x, [weight], [] if bias is None else [bias])[0]

    def gemm_all_reduce(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        group: GroupLike = None,
        k: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
    ) -> Tensor:
        """`overlap_gemm.gemm_all_reduce`."""
        how = _How(GEMM_ALL_REDUCE.name, group_name(group), backend, reserve_sms, k)
        return self._product(how, x, [weight], [] if bias is None else [bias])[0]

    def gemm_all_gather(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        group: GroupLike = None,
        columns: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
    ) -> Tensor:
        """`overlap_gemm.gemm_all_gather`."""
        how = _How(GEMM_ALL_GATHER.name, group_name(group), backend, reserve_sms, columns)
        return self._product(how, x, [weight], [] if bias is None else [bias])[0]

    def column_parallel_gemm(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: GroupLike,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
    ) -> Tensor:
        """`overlap_gemm.nn.column_parallel_gemm`."""
        how = _How(LOCAL, group_name(group), backend, reserve_sms)
        return self._product(how, x, [weight], [] if bias is None else [bias])[0]

    def _product(
        self, how: "_How", x: Tensor, weights: list[Tensor], biases: list[Tensor]
    ) -> tuple[Tensor, ...]:
        x, weights, biases = autocast(x, weights, biases)
        for name, given in (("weight", weights), ("bias", biases)):
            for tensor in given:
                if tensor.dtype != x.dtype:
                    raise TypeError(f"{how.op}: {name} must be {x.dtype} as x is, got {tensor.dtype}")
        types = (self.dtype, self.grad_dtype, self.wgrad)
        return _Product.apply(tuple(how), types, len(weights), x, *weights, *biases)  # type: ignore[no-any-return]


class Stored(NamedTuple):
    """A weight of a checkpoint that is kept in 8 bits.

    Attributes:
        values: `[N, K]`, `torch.float8_e4m3fn`.
        scale: float32, `[N, 1]`, `[1, 1]`, or of blocks, `[ceil(N / block), ceil(K / block)]`.
        input_scale: float32, `[1, 1]`: of what it is multiplied with; None: each row's own.
        block: Rows and elements of K that share a scale; None: it is of rows, or of all.
    """

    values: Tensor
    scale: Tensor
    input_scale: Tensor | None
    block: int | None = None


class StoredFloat8(Float8):
    """The products of `Stored` weights, in inference: of x, which is quantised at each call, in x's type."""

    def _product(
        self, how: "_How", x: Tensor, weights: list[Any], biases: list[Tensor]
    ) -> tuple[Tensor, ...]:
        x, _, biases = autocast(x, [], biases)
        if torch.is_grad_enabled() and (x.requires_grad or any(bias.requires_grad for bias in biases)):
            raise TypeError(
                f"{how.op}: weights stored in 8 bits have no gradients: call under torch.no_grad()"
            )
        given = [weight.input_scale for weight in weights if weight.input_scale is not None]
        if given:  # of weights that share a gather the widest
            scale = torch.cat(given).amax(0, keepdim=True)
            largest = torch.finfo(self.dtype).max
            values = (x.float() / scale).clamp(-largest, largest).to(self.dtype)
            rows = Quantized(values, scale)
        else:
            block = next((weight.block for weight in weights if weight.scale.shape[-1] > 1), None)
            rows = quantize_rows(x, self.dtype, block=block)
        return tuple(how.multiply(rows, [_for_op(weight) for weight in weights], biases, x.dtype))


def _for_op(weight: Stored) -> Quantized:
    """As the ops take it: where K is one block, its scales are of rows."""
    scale, rows = weight.scale, len(weight.values)
    if scale.shape[-1] == 1 and len(scale) not in (1, rows):
        scale = scale.repeat_interleave(weight.block or rows, 0)[:rows]
    return Quantized(weight.values, scale)


STORED = StoredFloat8()


def products(float8: Float8 | None) -> Products:
    """Those of a layer that was given this `float8=`."""
    return PLAIN if float8 is None else float8


class _How(NamedTuple):
    """What a product is told, besides its operands; see `options.CallOptions`.

    Attributes:
        op: Its name; `LOCAL` for a rank's own product, whose gradient is summed.
        group: The group's.
        backend: As for the op.
        reserve_sms: As for the op.
        weight: Extent over all ranks of the weight's sharded axis.
        x: That of x's, where it is another one.
        dim: The sharded dimension of x, or of the result.
    """

    op: str
    group: str
    backend: Any
    reserve_sms: int | None
    weight: Length = None
    x: Length = None
    dim: int = 0

    @property
    def spec(self) -> OpSpec | None:
        """The op's; None of `LOCAL`."""
        return OPS.get(self.op)

    def multiply(
        self, x: Quantized, weights: list[Quantized], biases: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """The op of 8-bit operands, in forward or of a gradient; one result per weight."""
        spec, call = self.spec, getattr(functional, self.op)
        told: dict[str, Any] = {
            "group": self.group, "backend": self.backend, "reserve_sms": self.reserve_sms,
            "scale_x": x.scale, "out_dtype": dtype,
        }  # fmt: skip
        for axis, extent in () if spec is None else ((spec.x, self.x), (spec.weight, self.weight)):
            if axis is not None:
                told[ARGUMENTS[axis]] = extent
        if spec is not None and "m" in (spec.x, spec.out):
            told["dim"] = self.dim
        if spec is not None and spec.gathers_operand:
            values, scales = [weight.values for weight in weights], [weight.scale for weight in weights]
            outs: list[Tensor] = call(x.values, values, bias=list(biases) or None, scale_w=scales, **told)
            return outs
        (weight,), bias = weights, biases[0] if biases else None
        return [call(x.values, weight.values, bias=bias, scale_w=weight.scale, **told)]

    def along_tokens(self, grad: Tensor, x: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> Tensor:
        """`grad` `[N, M]` times `x` `[K, M]` transposed, in 8 bits: `[N, K]`, a rank's own product."""
        rows, weight = quantize_rows(grad, grad_dtype), quantize_rows(x, dtype)
        return functional.column_parallel_gemm(
            rows.values, weight.values, None, self.group, self.backend,
            scale_x=rows.scale, scale_w=weight.scale, out_dtype=x.dtype,
        )  # fmt: skip

    def dual(self, x: Tensor, out: torch.Size) -> "_How":
        """The product that makes the gradient of `x`, where the result has shape `out`."""
        spec, how = self.spec, self._replace(backend=with_fallback(self.backend))
        if spec is None:
            return how._replace(op=GEMM_ALL_REDUCE.name)
        if spec.gathers_output:
            return how._replace(op=GEMM_ALL_REDUCE.name, weight=out[-1])
        return how._replace(op=spec.dual or LOCAL, x=x.shape[self.dim])


class _Product(torch.autograd.Function):
    """A product of quantised operands; see the module for its gradients."""

    @staticmethod
    def forward(
        ctx: Any, told: Any, types: Any, count: int, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        how, (dtype, *_) = _How(*told), types
        weights, biases = parameters[:count], parameters[count:]
        rows = [quantize_rows(weight, dtype) for weight in weights]
        outs = how.multiply(quantize_rows(x, dtype), rows, biases, x.dtype)
        ctx.save_for_backward(x, *weights)
        ctx.told, ctx.types, ctx.biases = told, types, len(biases)
        ctx.shapes = [out.shape for out in outs]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("a product in 8 bits (float8=) has no gradients of its gradients")
        x, *weights = ctx.saved_tensors
        how, (dtype, grad_dtype, wgrad) = _How(*ctx.told), ctx.types
        spec = how.spec
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = needs[: len(weights)], needs[len(weights) :]
        if spec is not None and spec.gathers_output:  # of the gathered columns this rank's
            grads = (moves.keep_shard(grads[0], grads[0].ndim - 1, how.group),)
        grad_x = None
        if needs_x:
            joined = grads[0] if len(grads) == 1 else torch.cat(grads, -1)
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            rows, dual = quantize_rows(weight.t(), dtype), how.dual(x, ctx.shapes[0])
            (grad_x,) = dual.multiply(quantize_rows(joined, grad_dtype), [rows], (), x.dtype)
        found: list[Tensor | None] = [None] * (len(weights) + ctx.biases)
        if any(needs):
            if spec is not None and spec.out == "m":
                grads = (moves.join_shards(grads[0], how.dim, x.shape[how.dim], how.group),)
            if spec is not None and spec.gathers_operand and any(needs_weights):
                x = moves.join_shards(x, how.dim, grads[0].shape[how.dim], how.group)
            for i, grad in enumerate(grads):
                flat = grad.flatten(0, -2)
                if needs_weights[i]:
                    both = flat.t(), x.flatten(0, -2).t()
                    found[i] = how.along_tokens(*both, dtype, grad_dtype) if wgrad else both[0] @ both[1].t()
                if ctx.biases and needs_biases[i]:
                    found[len(weights) + i] = flat.sum(0)
        return None, None, None, grad_x, *found
