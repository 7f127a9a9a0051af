"""Products of gradients, in the order of summation that a call promises.

`ordered_gemm` multiplies x `[M, K]` and weight `[N, K]` in an order that K alone determines.

`all_gather_gemm_gradients` computes the gradients of x and of all weights of an all_gather_gemm in one custom
op. The backward pass uses it if these gradients are needed and the forward pass did not keep the gathered x.
It is not used with ``create_graph=True``, nor for several weights whose sums have a tree
(``invariant="ranks"``). The gradients of the weights need x of all ranks:

- If a fused kernel computes the gradient of x, and shards are large, copy engines gather x alongside it, into
  the gather buffer of `all_gather_gemm`.
- Otherwise x is gathered by a collective after the gradient of x.

`SumOfParts` computes the gradient of x of a list of weights by one exchange and, fused, one kernel. This
reads gradients and weights from their own memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Problem
from ..backends.by_shards import pays_alongside
from ..backends.by_shards import plan_for as copies_for
from ..backends.collectives import all_gather_rows as gather_rows
from ..backends.op_call import SCHEMA, CallOperands, Joined, OpCall, promises_of
from ..backends.portable_arithmetic import arithmetic_of, ordered_product
from ..runtime.group import resolve
from ..spec import ALL_GATHER_GEMM, GEMM_REDUCE_SCATTER, OpSpec
from .choosing import chosen
from .registered import Registered, Run
from .shard_ops import compared, local_rows

ordered_gemm: Registered = Registered(
    "ordered_gemm(Tensor x, Tensor weight, str group) -> Tensor",
    bind=lambda x, weight, group: lambda x, weight: ordered_product(x, weight).to(x.dtype),
    fake=lambda x, weight, group: x.new_empty(x.shape[0], weight.shape[0]),
    backward=lambda ctx, call, needs, grad: (
        ordered_gemm(grad, ctx.saved_tensors[1].t(), call.group) if needs[0] else None,
        ordered_gemm(grad.t(), ctx.saved_tensors[0].t(), call.group) if needs[1] else None,
    ),
    saves=2,
)


def along_rows(x: Tensor, y: Tensor, how: Any) -> Tensor:
    """Returns `x.t() @ y`, the gradient of a weight, in the order of summation that the call promises.

    Args:
        x: `[M, N]`.
        y: `[M, K]`.
        how: Arguments of the op with `partials`, `invariant` and `group`.
    """
    is_ordered = promises_of(how.partials, how.invariant).leaves
    return ordered_gemm(x.t(), y.t(), how.group) if is_ordered else x.t() @ y


def sum_of_rows(x: Tensor, how: Any) -> Tensor:
    """Returns the sum over the rows of x `[M, N]`, the gradient of a bias; `how` as in `along_rows`."""
    if not promises_of(how.partials, how.invariant).leaves:
        return x.sum(0)
    sums: Tensor = ordered_gemm(x.new_ones(1, x.shape[0]), x.t(), how.group)
    return sums[0]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Returns the parts concatenated along `dim`; a single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def of_list(parts: Sequence[Tensor], weights: Sequence[Tensor]) -> CallOperands:
    """Returns the operands of a sum of products, each of a part `[M, K_i]` and a weight `[N, K_i]`."""
    if len(parts) == 1:
        return CallOperands(parts[0], weights[0])
    return CallOperands(Joined(tuple(parts)), Joined(tuple(weights)))


def _bind_all_gather_gemm_gradients(
    x: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor], *arguments: Any
) -> Run:
    call = OpCall(*arguments)
    ranks = resolve(call.group)
    operands = of_list(grads, [weight.t() for weight in weights])
    call = call.summed(GEMM_REDUCE_SCATTER, operands.x.shape[1], ranks.size)
    product = arithmetic_of(call.promises).product
    name, scatter = chosen(GEMM_REDUCE_SCATTER, call, operands)
    gather_call = call._replace(columns=call.k, k=call.columns, backend="decomposed")
    problem = Problem.of(ALL_GATHER_GEMM.name, gather_call, CallOperands(x, None), ranks)
    shards = problem.shards
    alongside = name == "fused" and pays_alongside(problem, shards)
    facts = {"rows": shards.total, "chunk": shards.chunk, "width": x.shape[1]}
    gathering = compared("all_gather_gemm_gradients", x, call.group, **facts)

    def run(x: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        shard = x.contiguous()

        def scattered() -> Tensor:
            result: Tensor = scatter(*of_list(grads, [weight.t() for weight in weights])[:3])
            return result

        if not alongside:
            grad_x = scattered()
            gathered = gather_rows(shard, shards, gathering)
            return [grad_x, *(product(grad.t(), gathered.t()) for grad in grads)]
        with copies_for(ranks, shard, shards).alongside(shard, scattered, *grads) as (grad_x, gathered):
            return [grad_x, *(product(grad.t(), gathered.t()) for grad in grads)]

    return run


def _no_second_gradient(*_: Any) -> Any:
    """Raises: the gradient is bound only if none of its own is recorded."""
    raise RuntimeError(
        "this op of a backward pass has no gradient, because it runs only where no second derivatives are "
        "recorded; call backward with create_graph=True for them"
    )


all_gather_gemm_gradients = Registered(
    f"all_gather_gemm_gradients(Tensor x, Tensor[] grads, Tensor[] weights, {SCHEMA}) -> Tensor[]",
    bind=_bind_all_gather_gemm_gradients,
    fake=lambda x, grads, weights, *_: [x.new_empty(x.shape), *(w.new_empty(w.shape) for w in weights)],
    backward=_no_second_gradient,
    named=OpCall,
)


class SumOfParts(Registered):
    """Sum of an op's products over matrices side by side along K; returns [sum, exchanged matrices if kept].

    Args:
        spec: Definition of the op, whose ranks have columns of x.
    """

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        super().__init__(
            f"{spec.name}_of_parts(Tensor x, Tensor[] others, Tensor[] weights, {SCHEMA}) -> Tensor[]",
            bind=self._bind,
            fake=self._fake,
            backward=_no_second_gradient,
            named=OpCall,
        )

    def gradient_of_x(
        self, grads: list[Tensor], weights: Sequence[Tensor], call: OpCall, keep: bool
    ) -> tuple[Tensor, list[Any]]:
        """Returns the gradient of x of a call of the dual, and with `keep` the exchanged `grads`, else None.

        Args:
            grads: Gradient of each result of the dual.
            weights: Weights of the dual.
            call: Call of the dual.
            keep: Whether to return the exchanged gradients.
        """
        depth = sum([len(weight) for weight in weights])
        how = call.backward(columns=weights[0].shape[1], k=depth, keep=keep)
        grad_x, *moved = self.sum_of(grads, weights, how)
        return grad_x, moved or [None] * len(weights)

    def sum_of(self, grads: list[Tensor], weights: Sequence[Tensor], call: OpCall) -> list[Tensor]:
        """Returns [sum of `grad @ weight`, exchanged `grads` if kept].

        Args:
            grads: `[M, N_i]`, this rank's columns.
            weights: `[N_i, K]`.
            call: Call of this op.
        """
        result: list[Tensor] = self.call((grads[0], grads[1:], [weight.t() for weight in weights]), call)
        return result

    def _bind(self, x: Tensor, others: Sequence[Tensor], weights: Sequence[Tensor], *arguments: Any) -> Run:
        call = OpCall(*arguments)
        operands, takes_lists = of_list((x, *others), weights), self.spec.takes_lists
        if takes_lists:
            operands = operands._replace(weight=[operands.weight])
        run_op = chosen(self.spec, call, operands).run

        def run(x: Tensor, others: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
            parts, weight = of_list((x, *others), weights)[:2]
            if not takes_lists:
                return [run_op(parts, weight, None)]
            moved, (total,) = run_op(parts, [weight], ())
            return [total, *(moved.parts if call.keep else ())]

        return run

    def _fake(
        self, x: Tensor, others: Sequence[Tensor], weights: Sequence[Tensor], *arguments: Any
    ) -> list[Tensor]:
        call = OpCall(*arguments)
        rows: Any = call.rows
        if self.spec.out == "m":
            rows = local_rows(call.chunk, rows, call.group)
        kept = weights if call.keep else ()
        widths = len(weights[0]), *[weight.shape[1] for weight in kept]
        return [x.new_empty(rows, width) for width in widths]


def gradients_of_each(
    grads: Sequence[Tensor | None], ctx: Any, x: Tensor, weights: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients of the results of a list of weights, zeros for those that are None.

    Args:
        grads: Gradients of all results; the first is that of the communicated operand.
        ctx: Context of autograd, filled by `GemmOp.keep`.
        x: Operand x.
        weights: Weights.
    """
    return [
        x.new_zeros(ctx.out_rows, weight.shape[0]) if grad is None else grad
        for grad, weight in zip(grads[1:], weights, strict=True)
    ]


def gradients_of_biases(grads: Sequence[Tensor], needs: Any, call: OpCall) -> list[Tensor | None] | None:
    """Returns the gradients of a list of biases; None if there is none.

    Args:
        grads: Gradient of each weight's result.
        needs: Whether each bias needs one; no list if there are no biases.
        call: Call of the op.
    """
    if not isinstance(needs, (list, tuple)):
        return None
    pairs = zip(grads, needs, strict=False)  # no bias, or one for each weight
    return [sum_of_rows(grad, call) if needed else None for grad, needed in pairs]


def sum_of_products(op: Any, grads: list[Tensor], weights: Sequence[Tensor], call: OpCall) -> Tensor:
    """Returns the sum of all `grad @ weight` over the ranks, by one call of an op.

    With a tree of sums, each product is summed by a call of its own: joined columns would be cut into other
    leaves.

    Args:
        op: `GemmOp` that sums over ranks.
        grads: `[M, N_i]`, this rank's columns.
        weights: `[N_i, K]`.
        call: Call of the op.
    """
    total: Tensor
    if len(weights) == 1:
        total = op.call((grads[0], weights[0].t(), None), call)
    elif call.promises.has_tree:
        how, of_each = call._replace(k=None), zip(grads, weights, strict=True)
        total = sum(op.call((grad, weight.t(), None), how) for grad, weight in of_each)
    elif torch.is_grad_enabled():
        total = op.call((joined(grads, 1), joined(weights, 0).t(), None), call)
    else:
        (total,) = op.of_parts.sum_of(grads, weights, call)
    return total
