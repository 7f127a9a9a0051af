"""The ops with a product as torch custom ops: schema, implementation, fake kernel and gradient of each.

Operands are 2-D and validated; users call the functions of `api.functional`. All ops have the same arguments:
x, weight and bias, their scales or None, and the fields of `backends.op_call.OpCall`. An op that takes lists
has lists of weights and biases. A group is passed by its name, so that torch.compile can put the ops into a
graph. The gradient of an op's x is computed by its dual op:

    all_gather_gemm     <->  gemm_reduce_scatter
    gemm_all_reduce     <->  column_parallel_gemm
    gemm_all_gather      ->  gemm_all_reduce of a part of the output's gradient
    registered ops      <->  their duals (`GemmOp.by_dual`)

Gradients of weight and bias are local, but all_gather_gemm needs the gathered x for the weight, and
gemm_reduce_scatter the gathered gradient for both. A backward pass uses "<backend of forward> or auto".

Replicated tensors follow two rules, which hold for gradients of gradients, too. The gradient of a replicated
output must be the same on every rank; it is if every rank computes the same loss. A replicated input gets its
full gradient on every rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.op_call import SCHEMA, CallOperands, OpCall, split
from ..backends.portable_arithmetic import arithmetic_of
from ..backends.scales.product_types import ProductTypes
from ..backends.scales.scaling import Scaled, dequantised, why_no_product, with_scales
from ..config.rules import MOST_WEIGHTS
from ..epilogues.library import add_residual
from ..runtime.group import group_size, resolve
from ..spec import (
    ALL_GATHER_GEMM,
    COLUMN_PARALLEL_GEMM,
    GEMM_ALL_GATHER,
    GEMM_ALL_REDUCE,
    GEMM_REDUCE_SCATTER,
    OpSpec,
)
from ..spec.promises import InvarianceError
from ..spec.sharding import Shards
from .choosing import chosen
from .gradient_products import (
    SumOfParts,
    all_gather_gemm_gradients,
    along_rows,
    gradients_of_biases,
    gradients_of_each,
    joined,
    sum_of_products,
    sum_of_rows,
)
from .registered import Registered, Run
from .shard_ops import (
    all_gather_rows,
    for_each_rank,
    keep_shard,
    local_columns,
    local_rows,
    reduce_scatter_rows,
    shard_columns,
    shard_rows,
    sum_over_ranks,
    with_kept,
)

NO_GRADIENT = "operands with scales have no gradients: call under torch.no_grad(), or with detached tensors"


class GemmOp(Registered):
    """An op with a product, registered as a custom op and in `GEMM_OPS`.

    An op that takes lists returns a list: the operand that was communicated, then a result for each weight.
    Unless that operand is kept, it is None in a plain call, and else empty. Other ops return one tensor.

    Attributes:
        operands: Schema of x, weight and bias.
        scales: Schema of their scales.
        with_epilogue: The op with an epilogue (`with_epilogue.EpilogueOp`, which sets it).
        of_parts: The op of a list along K (`SumOfParts`); None unless x is cut along K.

    Args:
        spec: Definition of the op.
        backward: Function that returns the gradients of x, weight and bias, as in `Registered`. Its saved
            tensors are x, or the communicated operand if it is kept, then the weights. None: `by_dual`.
    """

    with_epilogue: Registered
    of_parts: Any

    def __init__(self, spec: OpSpec, backward: Any = None) -> None:
        self.spec, self.takes_lists = spec, spec.takes_lists
        backward = backward or self.by_dual
        several = "[]" if self.takes_lists else ""
        weight, bias, scale = (f"Tensor{several}{mark}" for mark in ("", "?", "?"))
        self.operands = f"Tensor x, {weight} weight, {bias} bias"
        self.scales = f"Tensor? scale_x, {scale} scale_w"
        super().__init__(
            f"{spec.name}({self.operands}, {self.scales}, {SCHEMA}) -> Tensor{several}",
            bind=self._bind,
            fake=self._fake,
            backward=backward,
            named=OpCall,
        )
        self.of_parts = SumOfParts(spec) if spec.x == "k" else None
        GEMM_OPS[spec.name] = self

    def _bind(self, *arguments: Any) -> Run:
        operands, call = split(arguments)
        if self.spec.sums:
            call = call.summed(self.spec, operands.x.shape[1], group_size(call.group))
        return with_kept(chosen(self.spec, call, operands).run, call, self.takes_lists)

    def _fake(self, *arguments: Any) -> Any:
        (x, weight, *_), call = split(arguments)
        dtype = call.out_dtype or x.dtype
        if not self.takes_lists:
            return x.new_empty(*result_extents(self.spec, call, weight), dtype=dtype)
        outs = [x.new_empty(*result_extents(self.spec, call, one), dtype=dtype) for one in weight]
        return [x.new_empty(*self.kept_extents(call, x, weight[0])), *outs]

    def kept_extents(self, call: OpCall, x: Tensor, weight: Tensor) -> tuple[Any, Any]:
        """Returns (rows, columns) of the communicated operand; (0, columns of x) if it is not kept."""
        if not call.keep:
            return 0, x.shape[1]
        rows: Any = call.rows
        if self.spec.weight is None:
            rows = local_rows(call.chunk, rows, call.group)
        return rows, weight.shape[1]

    def dispatched(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Returns the result; the dispatcher passes scales that are None, and takes no None in lists."""
        if tensors[3] is None:
            tensors = tensors[:3]
        return without_none(super().dispatched(tensors, arguments), tensors[0])

    def keep(self, ctx: Any, tensors: Sequence[Any], arguments: OpCall, output: Any) -> None:
        """Saves x, or the communicated operand if it is kept, and the weights."""
        x, weight, *_ = tensors
        ctx.rest, ctx.is_scaled = arguments, len(tensors) > 3 and tensors[3] is not None
        if not self.takes_lists:
            ctx.save_for_backward(x, weight)
            return
        ctx.out_rows = output[1].shape[0]
        ctx.save_for_backward(output[0] if arguments.keep else x, *weight)
        ctx.set_materialize_grads(False)

    def gradients(self, ctx: Any, needs: Any, *grads: Any) -> tuple[Any, ...]:
        """Returns the gradients of x, weight and bias.

        Raises:
            TypeError: Operands had scales.
        """
        if ctx.is_scaled:
            raise TypeError(NO_GRADIENT)
        return super().gradients(ctx, needs[:3], *grads)

    def by_dual(self, ctx: Any, call: OpCall, needs: Any, grads: Any) -> tuple[Any, ...]:
        """Returns the gradients of x, weights and biases, for ops whose weight every rank has in full.

        The dual op of the result's gradient and the weight returns the gradient of x. Of several weights it
        exchanges all gradients at once (`SumOfParts`). With second derivatives, more than `MOST_WEIGHTS`, and
        where no columns are exchanged, each further call adds to it, by an epilogue; with `invariant` torch.
        Gradients of weights and biases are summed over the ranks by all-reduces, so every rank gets the full
        ones.
        """
        x, *weights = ctx.saved_tensors
        needs_x, needs_weights, needs_biases = needs
        grad_kept, several = None, self.takes_lists
        if several:
            grad_kept, *of_results = grads
            rows = ctx.out_rows
        else:
            of_results, needs_weights, needs_biases = [grads], [needs_weights], [needs_biases]
            rows = grads.shape[0]
        has_biases = isinstance(needs_biases, (list, tuple)) and len(needs_biases) > 0
        if not has_biases:
            needs_biases = [False] * len(weights)
        multiplied = (
            x
            if call.keep or self.spec.operand_move is None
            else _redistribute(x, self.spec, call, weights[0])
        )
        for i, (grad, weight) in enumerate(zip(of_results, weights, strict=True)):
            if grad is None:
                of_results[i] = x.new_zeros(rows, result_extents(self.spec, call, weight)[1])
        grad_x, grad_weights, grad_biases = None, [], []
        adds = len(weights) == 1 or call.promises.invariant is None
        is_one_sum = adds and 1 < len(weights) <= MOST_WEIGHTS
        of_parts = dual_of(self.spec).of_parts if is_one_sum and needs_x else None
        moved: Any = None
        if of_parts is not None and group_size(call.group) > 1 and not torch.is_grad_enabled():
            keep = any(needs_weights) or any(needs_biases)
            grad_x, moved = of_parts.gradient_of_x(of_results, weights, call, keep)
        operands = zip(of_results, weights, needs_weights, needs_biases, strict=True)
        for i, (grad, weight, *needed) in enumerate(operands):
            if moved is not None:
                grad_moved = moved[i]
            else:
                others: Any = grad_x if adds else None
                of_x, grad_moved = self._dual_of(grad, weight, call, needs_x, any(needed), others)
                grad_x = of_x if adds or grad_x is None else grad_x + of_x
            grad_weights.append(self._sum(grad_moved, multiplied, call) if needed[0] else None)
            ones = x.new_ones(multiplied.shape[0], 1) if needed[1] else None
            grad_biases.append(None if ones is None else self._sum(grad_moved, ones, call)[:, 0])
        if needs_x and grad_kept is not None and call.keep:
            grad_x = grad_x + _redistribute_back(grad_kept, self.spec, call)
        if several:
            return grad_x, grad_weights, grad_biases if has_biases else None
        return grad_x, grad_weights[0], grad_biases[0]

    def _dual_of(
        self, grad: Tensor, weight: Tensor, call: OpCall, needs_x: bool, needs_moved: bool, others: Any
    ) -> tuple[Tensor | None, Any]:
        """Returns the gradient of x plus `others`, and the communicated gradient; None if not needed."""
        dual = dual_of(self.spec)
        how = call.backward(columns=weight.shape[1], k=weight.shape[0], keep=False)
        if not needs_x:
            return None, _redistribute(grad, dual.spec, how, weight.t())
        how = how._replace(keep=needs_moved and dual.spec.operand_is_sent)
        operands = grad, [weight.t()] if dual.takes_lists else weight.t(), None
        if others is None:
            results = dual.call(operands, how)
        else:
            how = how._replace(epilogue=add_residual.key)
            results = dual.with_epilogue.call((*operands, [others]), how)
        *kept, grad_x = results if isinstance(results, list) else [results]
        if dual.takes_lists:
            return grad_x, kept[0] if how.keep else grad
        return grad_x, _redistribute(grad, dual.spec, how, weight.t()) if needs_moved else None

    def _sum(self, grad: Tensor, multiplied: Tensor, call: OpCall) -> Tensor:
        """Returns `grad.t() @ multiplied`, summed over the ranks."""
        extents = grad.shape[1], multiplied.shape[1]
        chunk = -(-extents[0] // group_size(call.group))
        how = call.backward(rows=extents[0], columns=extents[1], k=call.rows, chunk=chunk, keep=False)
        summed: Tensor = gemm_all_reduce.call((grad.t(), multiplied.t(), None), how)
        return summed


def without_none(results: Any, x: Tensor) -> Any:
    """Returns an op's result; the first tensor of a list is empty if it is None."""
    if isinstance(results, list) and results[0] is None:
        results[0] = x.new_empty(0, x.shape[1])
    return results


GEMM_OPS: dict[str, GemmOp] = {}
"""Ops with a product by name."""


def dual_of(spec: OpSpec) -> GemmOp:
    """Returns the op that computes the gradient of an op's x.

    Raises:
        RuntimeError: The dual op is not registered.
    """
    if spec.dual not in GEMM_OPS:
        x, weight, out = spec.dual_axes
        raise RuntimeError(
            f"{spec.name} has no gradient: no op dual={spec.dual!r} is registered; register one with "
            f"x={x!r}, weight={weight!r}, out={out!r}, and {spec.name} with its name as dual="
        )
    return GEMM_OPS[spec.dual]


def result_extents(spec: OpSpec, call: OpCall, weight: Tensor) -> tuple[Any, Any]:
    """Returns (rows, columns) of this rank's result of a lowered call, for one weight."""
    rows: Any = call.rows
    if spec.out == "m":
        rows = local_rows(call.chunk, rows, call.group)
    if spec.gathers_output:
        return rows, call.columns
    columns = weight.shape[0]
    return rows, local_columns(columns, call.group) if spec.out == "n" and spec.weight is None else columns


def _redistribute(x: Tensor, spec: OpSpec, call: OpCall, weight: Tensor) -> Tensor:
    """Returns the operand of the product: x communicated by the op's collective, with a gradient."""
    move = spec.operand_move
    if move is None:
        return x
    if move.kind == "slice":
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{spec.name} has no gradients of gradients, because each rank takes its rows of x; call "
                "backward without create_graph=True"
            )
        ranks = resolve(call.group)
        return x[slice(*Shards(x.shape[0], ranks.size, call.chunk).range(ranks.rank))]
    return shard_rows(x, weight.shape[1], call.chunk, call.group)  # type: ignore[no-any-return]


def _redistribute_back(grad: Tensor, spec: OpSpec, call: OpCall) -> Tensor:
    """Returns the gradient of x, computed from the gradient of the communicated operand."""
    assert spec.operand_is_sent, spec
    return shard_columns(grad, call.rows, call.chunk, call.group)  # type: ignore[no-any-return]


def _dual(call: OpCall, **changes: Any) -> OpCall:
    """Returns the call of `grad @ weight`, whose N is the op's K."""
    return call.backward(**{"columns": call.k, "k": call.columns, "keep": False, **changes})


# --- all_gather_gemm: x [m_r, K], weights [N_i, K] -> gathered x [rows, K], products [rows, N_i] ---


def _backward_all_gather_gemm(
    ctx: Any, call: OpCall, needs: Any, grads: list[Tensor | None]
) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_biases = needs
    kept, dual = call.keep, _dual(call)
    grad_gathered = grads[0] if kept else None
    grad_outs = gradients_of_each(grads, ctx, x, weights)
    grad_x = None
    grad_weights: list[Tensor | None] = [None] * len(weights)
    grad_biases = gradients_of_biases(grad_outs, needs_biases, call)
    are_separate = call.promises.has_tree and len(weights) > 1
    if needs_x and all(needs_weights) and not (kept or are_separate or torch.is_grad_enabled()):
        grad_x, *grads_of_weights = all_gather_gemm_gradients.call((x, grad_outs, weights), dual)
        return grad_x, grads_of_weights, grad_biases
    if needs_x and grad_gathered is None:
        grad_x = sum_of_products(gemm_reduce_scatter, grad_outs, weights, dual)
    elif needs_x:
        stacked, weight = joined(grad_outs, 1), joined(weights, 0)
        if call.promises.has_tree:
            raise InvarianceError(
                f"invariant={call.promises.invariant!r} cannot be kept for the gradient of gathered rows "
                "(return_gathered=True), because ranks use them differently; detach them, or omit invariant="
            )
        if call.promises.leaves:
            grad_x = gemm_reduce_scatter.call((stacked, weight.t(), None), dual)
            local_rows = reduce_scatter_rows(grad_gathered, dual.chunk, dual.group, dual.backend, True)
            grad_x = grad_x + local_rows
        else:
            partial = stacked @ weight + grad_gathered
            how = dual.chunk, dual.group, dual.backend, dual.deterministic
            grad_x = reduce_scatter_rows(partial, *how)
    if any(needs_weights):
        gathered = x if kept else all_gather_rows(x, call.rows, call.chunk, call.group)
        grad_weights = [
            along_rows(grad, gathered, call) if needed else None
            for grad, needed in zip(grad_outs, needs_weights, strict=True)
        ]
    return grad_x, grad_weights, grad_biases


all_gather_gemm = GemmOp(ALL_GATHER_GEMM, _backward_all_gather_gemm)


# --- gemm_reduce_scatter: x [M, K_local], weight [N, K_local] -> local rows [m_r, N] ---


def _backward_gemm_reduce_scatter(ctx: Any, call: OpCall, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs
    needs_gathered = needs_weight or needs_bias
    grad_x = gathered = None
    if needs_x:
        dual = _dual(call, keep=needs_gathered)
        gathered, grad_x = all_gather_gemm.call((grad, [weight.t()], None), dual)
    elif needs_gathered:
        gathered = all_gather_rows(grad, x.shape[0], call.chunk, call.group)
    grad_bias = None
    if needs_bias and torch.is_grad_enabled():  # the bias is replicated, gathered rows are not
        grad_bias = sum_over_ranks(grad.sum(0), call.group)
    elif needs_bias and gathered is not None:
        grad_bias = sum_of_rows(gathered, call)
    grad_weight = along_rows(gathered, x, call) if needs_weight and gathered is not None else None
    return grad_x, grad_weight, grad_bias


gemm_reduce_scatter = GemmOp(GEMM_REDUCE_SCATTER, _backward_gemm_reduce_scatter)


# --- products whose rows every rank has: gemm_all_reduce, column_parallel_gemm, gemm_all_gather ---
# gemm_all_reduce: x [M, K_local], weight [N, K_local] -> [M, N], the same on every rank.
# column_parallel_gemm: x [M, K], the same on every rank, weights [N_i, K] -> None, products [M, N_i].
# gemm_all_gather: x [M, K], weight [n_r, K], bias [n_r] -> [M, columns], the same on every rank.


def _backward_gemm_all_reduce(ctx: Any, call: OpCall, needs: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs
    return (
        column_parallel_gemm.call((grad, [weight.t()], None), _dual(call))[1] if needs_x else None,
        along_rows(for_each_rank(grad, call.group), x, call) if needs_weight else None,
        sum_of_rows(grad, call) if needs_bias else None,
    )


def _backward_column_parallel_gemm(
    ctx: Any, call: OpCall, needs: Any, grads: list[Tensor | None]
) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    return _of_replicated(x, weights, gradients_of_each(grads, ctx, x, weights), call, needs)


def _of_replicated(
    x: Tensor, weights: Sequence[Tensor], grads: list[Tensor], call: OpCall, needs: Any
) -> tuple[Any, ...]:
    """Returns the gradients of products of replicated x: one all-reduce for the gradient of x."""
    needs_x, needs_weights, needs_biases = needs
    grad_x, grad_weights = None, [None] * len(weights)
    if needs_x:
        chunk = Shards.even(x.shape[0], resolve(call.group).size).chunk
        grad_x = sum_of_products(gemm_all_reduce, grads, weights, _dual(call, chunk=chunk))
    if any(needs_weights):
        of_this_rank, pairs = for_each_rank(x, call.group), zip(grads, needs_weights, strict=True)
        grad_weights = [along_rows(grad, of_this_rank, call) if needed else None for grad, needed in pairs]
    return grad_x, grad_weights, gradients_of_biases(grads, needs_biases, call)


def _backward_gemm_all_gather(ctx: Any, call: OpCall, needs: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ranks = resolve(call.group)
    if torch.is_grad_enabled():
        shard = keep_shard(grad, 1, call.group)
    else:  # the same without a copy
        shard = grad[:, slice(*Shards(grad.shape[1], ranks.size, call.chunk).range(ranks.rank))]
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs
    lists = needs_x, [needs_weight], [needs_bias]
    grad_x, (grad_weight,), (grad_bias,) = _of_replicated(x, [weight], [shard], call, lists)
    return grad_x, grad_weight, grad_bias


class ColumnParallelGemm(GemmOp):
    """Local products of each rank, by torch: no backend is chosen, and forward does not communicate."""

    def _bind(self, *arguments: Any) -> Run:
        (x, weights, *_), call = split(arguments)
        each_types = [ProductTypes(x.dtype, one.dtype, call.out_dtype, call.blocks) for one in weights]
        how = arithmetic_of(call.promises)
        if each_types[0].scales is None:
            return lambda *tensors: [None, *how.products(*tensors)]
        torchs = not (how.is_ordered or any(why_no_product(x.device.type, types) for types in each_types))
        operand = Scaled if torchs else dequantised
        run = with_scales(lambda operands: (None, how.products(*operands[:3])), each_types[0], operand)
        return lambda *tensors: [None, *run(CallOperands(*tensors))[1]]


gemm_all_reduce = GemmOp(GEMM_ALL_REDUCE, _backward_gemm_all_reduce)
column_parallel_gemm = ColumnParallelGemm(COLUMN_PARALLEL_GEMM, _backward_column_parallel_gemm)
gemm_all_gather = GemmOp(GEMM_ALL_GATHER, _backward_gemm_all_gather)
