"""Products of linear layers in 8 bits, with gradients; operands are quantized by row at every call.

    layer = nn.ColumnParallelLinear(4096, 16384, sequence_parallel=True, float8=nn.Float8())

Operands of `y = x @ weight.T` and its gradients:

- y: rows of x and rows of the weight, each row with its scale. all_gather_gemm sends 8-bit rows.
- grad x: rows of y's gradient, and rows of the transposed weight, quantized again. They are along N, and
  Hopper's tensor cores read only 8-bit operands that are contiguous along the summed dimension.
- grad w: operands in their original dtype. The summed dimension is the tokens, along which a row has no
  common scale. With `wgrad=True`, both are quantized again along the tokens.

Parameters, and tensors saved for backward, keep their dtype, so optimizers, checkpoints, FSDP and
recomputation need no changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.op_call import (
    BackendName,
    CallOperands,
    Length,
    OpCall,
    operands_of_lists,
    promises_of,
    with_fallback,
)
from ..backends.scales.scaling import FLOAT8, Block
from ..dispatch import gradient_products, ops, shard_ops
from ..dispatch.autocast import autocast
from ..dispatch.bound import call_op
from ..dispatch.product_epilogues import NOTHING, InProduct, apply_to_product, gradients, save
from ..dispatch.with_epilogue import call_with_epilogue, one_or_all
from ..epilogues import Applied
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
from ..spec.promises import Invariant, Partials
from . import functional
from .quantization import Quantized, quantize_rows


class Products:
    """The five products of layers, without quantization: those of `functional`."""

    all_gather_gemm = staticmethod(functional.all_gather_gemm)
    gemm_reduce_scatter = staticmethod(functional.gemm_reduce_scatter)
    gemm_all_reduce = staticmethod(functional.gemm_all_reduce)
    gemm_all_gather = staticmethod(functional.gemm_all_gather)
    column_parallel_gemm = staticmethod(functional.column_parallel_gemm)


class ProductsOfCopies(Products):
    """`Products` of a list of weights that were made for the call."""

    @staticmethod
    def all_gather_gemm(  # type: ignore[override]
        x: Tensor, weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None, group: GroupLike, **how: Any
    ) -> list[Tensor]:
        """Runs `overlap_gemm.all_gather_gemm` on copied weights."""
        call = OpCall(**how, copied_weight=True)
        operands = CallOperands(x, list(weight), list(bias or []) or None)
        _, *outs = call_op(ops.all_gather_gemm, operands, group, call)
        return outs


PLAIN = Products()
COPIES = ProductsOfCopies()
LOCAL = "column_parallel_gemm"


@dataclass(frozen=True)
class Float8(Products):
    """8-bit products of linear layers, in forward and for the input's gradient, with dynamic scales of rows.

    It is the argument `float8=` of the layers in `overlap_gemm.nn`, the styles, and `parallelize`. Its
    methods are the ops with gradients: operands have 16 or 32 bits and the same dtype (otherwise TypeError),
    and the result has it, too. Gradients of gradients (`create_graph=True`) raise RuntimeError.

    One kernel quantizes each operand (`quantize_rows`); in a compiled model Inductor generates it.

    Attributes:
        dtype: Type of x and weight: `torch.float8_e4m3fn` (the default) or `torch.float8_e5m2`.
        grad_dtype: Type of the result's gradient in the product for the gradient of x, default
            `torch.float8_e4m3fn`; the weight has `dtype` there, too.
        wgrad: Compute the gradient of the weight in 8 bits, too: x (`dtype`) and the result's gradient
            (`grad_dtype`) are quantized again along the tokens, with one scale per feature.
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
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        epilogue: Applied | None = None,
    ) -> Any:
        """Runs `overlap_gemm.all_gather_gemm`; 8-bit rows are sent, each with a scale."""
        how = How(
            ALL_GATHER_GEMM.name, group_name(group), backend, reserve_sms, partials, invariant, columns,
            rows, dim,
        )  # fmt: skip
        return self._of_lists(how, x_shard, weight, bias, epilogue)

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
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        epilogue: Applied | None = None,
    ) -> Any:
        """Runs `overlap_gemm.gemm_reduce_scatter`; partial sums have x's dtype, their gradients 8 bits."""
        how = How(
            GEMM_REDUCE_SCATTER.name, group_name(group), backend, reserve_sms, partials, invariant, k,
            dim=dim,
        )  # fmt: skip
        return one_or_all(self._product(how, x, [weight], [] if bias is None else [bias], epilogue))

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
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        epilogue: Applied | None = None,
    ) -> Any:
        """Runs `overlap_gemm.gemm_all_reduce`."""
        how = How(
            GEMM_ALL_REDUCE.name, group_name(group), backend, reserve_sms, partials, invariant, k,
        )  # fmt: skip
        return one_or_all(self._product(how, x, [weight], [] if bias is None else [bias], epilogue))

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
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        epilogue: Applied | None = None,
    ) -> Any:
        """Runs `overlap_gemm.gemm_all_gather`."""
        how = How(
            GEMM_ALL_GATHER.name, group_name(group), backend, reserve_sms, partials, invariant, columns,
        )  # fmt: skip
        return one_or_all(self._product(how, x, [weight], [] if bias is None else [bias], epilogue))

    def column_parallel_gemm(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor] | None,
        group: GroupLike,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
    ) -> Any:
        """Runs `overlap_gemm.nn.column_parallel_gemm`."""
        how = How(LOCAL, group_name(group), backend, reserve_sms, partials, invariant)
        return self._of_lists(how, x, weight, bias)

    def _of_lists(
        self,
        how: "How",
        x: Tensor,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor] | None,
        epilogue: Applied | None = None,
    ) -> Any:
        """Returns the result of an op that takes lists: a list of results if `weight` is one."""
        _, weights, biases, *_ = operands_of_lists((x, weight, bias, None, None))
        outs = self._product(how, x, weights, biases or [], epilogue)
        several = isinstance(weight, (list, tuple)) and epilogue is None
        return list(outs) if several else one_or_all(outs)

    def _product(
        self,
        how: "How",
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        epilogue: Applied | None = None,
    ) -> Sequence[Tensor]:
        if not torch.compiler.is_compiling():  # gradients are computed outside of the block of `promising`
            how = how._replace(**promises_of(how.partials, how.invariant)._asdict())
        x, weights, biases = autocast(x, weights, biases)
        for name, tensors in (("weight", weights), ("bias", biases)):
            for tensor in tensors:
                if tensor.dtype != x.dtype:
                    raise TypeError(f"{how.op}: {name} must have x's dtype, {x.dtype}, got {tensor.dtype}")
        types = (self.dtype, self.grad_dtype, self.wgrad)

        def product(how: How, of: InProduct, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            fields = tuple(how), types, len(weights), tuple(of)
            return _Product.apply(*fields, x, *weights, *biases, *inputs)  # type: ignore[no-any-return]

        return how.apply(epilogue, x, weights, biases, product)


def products(float8: Float8 | None) -> Products:
    """Returns the products of a layer with this `float8=`."""
    return PLAIN if float8 is None else float8


class How(NamedTuple):
    """Arguments of a product other than its operands; see `backends.op_call.OpCall`.

    Attributes:
        op: Name of the op; `LOCAL` for a rank's local product, whose gradient is summed.
        group: Name of the group.
        backend: Backend of the op.
        reserve_sms: SMs that kernels leave free.
        partials: Type of partial sums.
        invariant: Bitwise invariance.
        weight: Extent of the weight's sharded axis over all ranks.
        x: Extent of x's sharded axis over all ranks, if it is a different axis.
        dim: Sharded dimension of x, or of the result.
    """

    op: str
    group: str
    backend: Any
    reserve_sms: int | None
    partials: Any = None
    invariant: Any = None
    weight: Length = None
    x: Length = None
    dim: int = 0

    @property
    def spec(self) -> OpSpec | None:
        """Returns the spec of the op; None for `LOCAL`."""
        return OPS.get(self.op)

    @property
    def call(self) -> OpCall:
        """Returns the options and extents of the op's call."""
        spec = self.spec
        axes = () if spec is None else ((spec.x, self.x), (spec.weight, self.weight))
        extents: dict[str, Any] = {ARGUMENTS[axis]: extent for axis, extent in axes if axis is not None}
        dim = self.dim if spec is not None and "m" in (spec.x, spec.out) else 0
        return OpCall(
            backend=self.backend, reserve_sms=self.reserve_sms, dim=dim, **extents,
            partials=self.partials, invariant=self.invariant,
        )  # fmt: skip

    def apply(
        self,
        epilogue: Applied | None,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        product: "Callable[[How, InProduct, Sequence[Tensor]], Sequence[Tensor]]",
    ) -> Sequence[Tensor]:
        """Returns one result per weight, or the result and the outputs of an epilogue.

        Args:
            epilogue: Epilogue with its inputs, or None.
            x: First operand, before it is quantized.
            weights: Weights.
            biases: One per weight, or none.
            product: Function that calls an autograd function; see `product_epilogues.apply_to_product`.
        """
        if epilogue is None:
            return product(self, NOTHING, ())

        def of_call(call: OpCall, of: InProduct, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            has_rows = of_op.spec.x == "m"  # which an input of kind "gathered_rows" has resolved
            return product(self._replace(x=call.rows) if has_rows else self, of, inputs)

        of_op = getattr(ops, self.op)
        operands = CallOperands(x, list(weights) if of_op.takes_lists else weights[0], list(biases))
        return apply_to_product(of_op, operands, self.group, self.call, epilogue, of_call)

    def multiply(
        self,
        x: Quantized,
        weights: list[Quantized],
        biases: Sequence[Tensor],
        dtype: torch.dtype,
        block: Block = None,
        copied_weight: bool = True,
        epilogue: Applied | None = None,
    ) -> list[Tensor]:
        """Runs the op on 8-bit operands, in forward or for a gradient.

        Args:
            x: First operand.
            weights: Weights; one, unless the op gathers x.
            biases: One per weight, or none.
            dtype: Type of the results.
            block: Block of the scales of all operands.
            copied_weight: True if the weights' values were made for this product.
            epilogue: Epilogue with its inputs, or None.

        Returns:
            One result per weight, or the result and the outputs of the epilogue.
        """
        spec = self.spec
        call = self.call._replace(out_dtype=dtype, block=block, copied_weight=copied_weight)
        op = ops.column_parallel_gemm if spec is None else getattr(ops, spec.name)
        values, scales = [weight.values for weight in weights], [weight.scale for weight in weights]
        takes_lists = op.spec.takes_lists
        operands = CallOperands(x.values, values, list(biases) or None, x.scale, scales)
        if not takes_lists:
            operands = CallOperands(x.values, values[0], biases[0] if biases else None, x.scale, scales[0])
        if epilogue is None:
            outs: Any = call_op(op, operands, self.group, call)
            return outs[1:] if takes_lists else [outs]  # type: ignore[no-any-return]
        outs = call_with_epilogue(op, operands, self.group, call, epilogue)
        return outs[1:] if takes_lists else outs  # type: ignore[no-any-return]

    def along_tokens(self, grad: Tensor, x: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> Tensor:
        """Returns the local product of `grad` `[N, M]` and `x` `[K, M]`, transposed, in 8 bits: `[N, K]`."""
        rows, weight = quantize_rows(grad, grad_dtype), quantize_rows(x, dtype)
        return functional.column_parallel_gemm(
            rows.values, weight.values, None, self.group, self.backend,
            scale_x=rows.scale, scale_w=weight.scale, out_dtype=x.dtype,
            partials=self.partials, invariant=self.invariant,
        )  # fmt: skip

    def dual(self, x: torch.Size, out: torch.Size) -> "How":
        """Returns the product that computes the gradient of x, from the shapes of x and of the result."""
        spec, how = self.spec, self._replace(backend=with_fallback(self.backend))
        if spec is None:
            return how._replace(op=GEMM_ALL_REDUCE.name)
        if spec.gathers_output:
            return how._replace(op=GEMM_ALL_REDUCE.name, weight=out[-1])
        return how._replace(op=spec.dual or LOCAL, x=x[self.dim])

    def local_gradients(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients of this rank's columns if the result is gathered along columns."""
        if self.spec is None or not self.spec.gathers_output:
            return grads
        return (shard_ops.keep_shard(grads[0], grads[0].ndim - 1, self.group),)

    def of_all_rows(self, grads: Sequence[Tensor], x: torch.Size) -> Sequence[Tensor]:
        """Returns the gradients of all rows of the result if these are scattered; x has the shape `x`."""
        if self.spec is None or self.spec.out != "m":
            return grads
        return (shard_ops.join_shards(grads[0], self.dim, x[self.dim], self.group),)


class _Product(torch.autograd.Function):
    """Product of quantized operands; the module describes its gradients."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # With named arguments, torch.compile (2.13) without gradients may pass the first one as `ctx`.
        fields, types, count, of, x, *tensors = args
        how, (dtype, *_), of = How(*fields), types, InProduct(*of)
        parameters, epilogue = of.split(tensors)
        weights, biases = parameters[:count], parameters[count:]
        rows = [quantize_rows(weight, dtype) for weight in weights]
        outs = how.multiply(quantize_rows(x, dtype), rows, biases, x.dtype, epilogue=epilogue)
        save(ctx, (x, *weights), of, epilogue, outs)
        ctx.how, ctx.types, ctx.weights, ctx.biases = fields, types, count, len(biases)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_gradients()
        (x, *weights), grads, of_inputs = gradients(ctx, ctx.weights, grads)
        how, (dtype, grad_dtype, wgrad) = How(*ctx.how), ctx.types
        spec = how.spec
        needs_x, *needs = ctx.needs_input_grad[4 : 5 + ctx.weights + ctx.biases]
        needs_weights, needs_biases = needs[: len(weights)], needs[len(weights) :]
        local_grads = how.local_gradients(grads)
        grad_x = None
        if needs_x:
            joined = local_grads[0] if len(local_grads) == 1 else torch.cat(local_grads, -1)
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            rows, dual = quantize_rows(weight.t(), dtype), how.dual(x.shape, grads[0].shape)
            (grad_x,) = dual.multiply(quantize_rows(joined, grad_dtype), [rows], (), x.dtype)
        parameter_grads: list[Tensor | None] = [None] * (len(weights) + ctx.biases)
        if any(needs):
            local_grads = how.of_all_rows(local_grads, x.shape)
            if spec is not None and spec.gathers_operand and any(needs_weights):
                x = shard_ops.join_shards(x, how.dim, local_grads[0].shape[how.dim], how.group)
            for i, grad in enumerate(local_grads):
                flat = grad.flatten(0, -2)
                if needs_weights[i]:
                    rows = x.flatten(0, -2)
                    if wgrad:
                        parameter_grads[i] = how.along_tokens(flat.t(), rows.t(), dtype, grad_dtype)
                    else:
                        parameter_grads[i] = gradient_products.along_rows(flat, rows, how)
                if ctx.biases and needs_biases[i]:
                    parameter_grads[len(weights) + i] = gradient_products.sum_of_rows(flat, how)
        return *[None] * 4, grad_x, *parameter_grads, *of_inputs


def refuse_second_gradients() -> None:
    """Raises RuntimeError in a backward pass that records gradients itself."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a product in 8 bits has no gradients of its gradients: use create_graph=False")
