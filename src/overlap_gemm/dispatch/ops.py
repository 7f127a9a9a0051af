"""The ops as torch.library custom ops: schema, implementation, fake (meta) kernel and autograd of each.

Everything here is 2-D and validated; `functional` is the door for users. Groups travel by name, so that the
ops are plain graph nodes to torch.compile. Gradients follow the duality of the ops:

    all_gather_gemm     <->  gemm_reduce_scatter
    gemm_all_reduce     <->  local_gemm
    gemm_all_gather      ->  slice of the output's gradient, then gemm_all_reduce

(`local_gemm` is a product of replicated rows, whose input's gradient is a gemm_all_reduce.) A replicated
output's gradient must be the same on every rank, as it is when every rank computes the same loss; a
replicated input gets its whole gradient on every rank. So it is with gradients of gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Problem
from ..backends.by_shards import pays_alongside
from ..backends.by_shards import plan_for as copies_for
from ..backends.collectives import all_gather_rows as gather_rows
from ..backends.portable_arithmetic import arithmetic_of, ordered_product
from ..backends.scales.scaling import Scaled, dequantised, why_no_product, with_scales
from ..config.scale_blocks import Blocks
from ..runtime.group import group_size, resolve
from ..spec import ALL_GATHER_GEMM, GEMM_ALL_GATHER, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER
from ..spec.promises import InvarianceError
from ..spec.sharding import Shards
from .choosing import chosen
from .moves import compared, each, new, own_rows
from .options import SCHEMA, Passed, promises_of
from .registered import Registered, Run

_ops = torch.ops.overlap_gemm


def _for_gradient(given: Any) -> Passed:
    """What a gradient's ops take of what the op was told: `Passed` is the last of it."""
    return Passed(*given[-len(Passed._fields) :]).backward()


def _extent(local: int, whole: int | None, options: Passed) -> int | None:
    """Of all ranks, what is summed over: known, or where it is cut into leaves as much on every rank.

    Raises:
        InvarianceError: It is cut, and ranks have not as much as each other.
    """
    if not options.promises.has_tree:
        return whole
    ranks = group_size(options.group)
    if whole is not None and whole != local * ranks:
        raise InvarianceError(
            f"invariant={options.promises.invariant!r} sums equal parts of {whole} elements on {ranks} "
            f"ranks; this one has {local}"
        )
    return local * ranks


# --- ordered_gemm: x [M, K], weight [N, K] -> [M, N], a rank's own, in an order that K alone decides ---


def _bind_ordered_gemm(x: Tensor, weight: Tensor, group: str) -> Run:
    return lambda x, weight: ordered_product(x, weight).to(x.dtype)


ordered_gemm = Registered(
    "ordered_gemm(Tensor x, Tensor weight, str group) -> Tensor",
    bind=_bind_ordered_gemm,
    fake=lambda x, weight, group: x.new_empty(x.shape[0], weight.shape[0]),
    backward=lambda ctx, given, needs, grad: (
        _ops.ordered_gemm(grad, ctx.saved_tensors[1].t(), given.group) if needs[0] else None,
        _ops.ordered_gemm(grad.t(), ctx.saved_tensors[0].t(), given.group) if needs[1] else None,
    ),
    saves=2,
)


def along_rows(x: Tensor, y: Tensor, options: Any) -> Tensor:
    """`x.t() @ y`: of a weight's gradient, a sum over all rows."""
    promises = promises_of(options.partials, options.invariant)
    return _ops.ordered_gemm(x.t(), y.t(), options.group) if promises.leaves else x.t() @ y


def sum_of_rows(x: Tensor, options: Any) -> Tensor:
    """Of a bias' gradient."""
    if not promises_of(options.partials, options.invariant).leaves:
        return x.sum(0)
    sums: Tensor = _ops.ordered_gemm(x.new_ones(1, x.shape[0]), x.t(), options.group)
    return sums[0]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


# --- all_gather_gemm: x [m_r, K], weights [N_i, K] -> gathered x [rows, K] (empty unless kept), products ---
# `columns` is N of all weights over all ranks, if it is known.


def _bind_all_gather_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    rows: int,
    chunk: int,
    keep_gathered: bool,
    columns: int | None,
    *passed: Any,
    **scaled: Any,
) -> Run:
    options, extents = Passed(*passed), (rows, columns, x.shape[1])
    shards = Shards(rows, group_size(options.group), chunk)
    operands = ALL_GATHER_GEMM, x, weights, biases or ()
    carry_out = chosen(*operands, extents, shards, options, keep_gathered, **scaled).run

    def run(x: Tensor, weights: Any, biases: Any, *scales: Any) -> list[Tensor]:
        gathered, outs = carry_out(x, weights, biases or (), *scales)
        return [new(x, gathered) if keep_gathered else x.new_empty(0, x.shape[1]), *outs]

    return run


def _fake_all_gather_gemm(
    x: Tensor, weights: Sequence[Tensor], _: Any, rows: int, chunk: int, keep_gathered: bool, *__: Any
) -> list[Tensor]:
    gathered = x.new_empty(rows if keep_gathered else 0, x.shape[1])
    return [gathered, *(x.new_empty(rows, weight.shape[0]) for weight in weights)]


def _save_all_gather_gemm(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, *ctx.rest = inputs
    _, _, kept, *_ = ctx.rest
    ctx.save_for_backward(output[0] if kept else x, *weights)
    ctx.set_materialize_grads(False)


def _backward_all_gather_gemm(
    ctx: Any, given: Any, needs: Any, grads: list[Tensor | None]
) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_biases = needs
    rows, chunk, kept, columns, *_ = given
    passed = _for_gradient(given)
    grad_gathered = grads[0] if kept else None
    grad_outs = [
        x.new_zeros(rows, weight.shape[0]) if grad is None else grad
        for grad, weight in zip(grads[1:], weights, strict=True)
    ]
    grad_x = None
    grad_weights: list[Tensor | None] = [None] * len(weights)
    grad_biases = None
    if isinstance(needs_biases, (list, tuple)):
        pairs = zip(grad_outs, needs_biases, strict=False)  # there is none, or one for each weight
        grad_biases = [sum_of_rows(grad, passed) if needed else None for grad, needed in pairs]
    keeps_apart = passed.promises.has_tree and len(weights) > 1
    if needs_x and all(needs_weights) and not (kept or keeps_apart or torch.is_grad_enabled()):
        grad_x, *found = _ops.all_gather_gemm_gradients(x, grad_outs, weights, rows, chunk, columns, *passed)
        return grad_x, found, grad_biases
    if needs_x and keeps_apart and grad_gathered is None:  # a rank's columns of all, joined, are other leaves
        of_each = zip(grad_outs, weights, strict=True)
        grad_x = sum(
            _ops.gemm_reduce_scatter(grad, weight.t(), None, chunk, None, *passed) for grad, weight in of_each
        )
    elif needs_x:
        stacked, weight = _joined(grad_outs, 1), _joined(weights, 0)
        if grad_gathered is None:
            grad_x = _ops.gemm_reduce_scatter(stacked, weight.t(), None, chunk, columns, *passed)
        elif passed.promises.has_tree:
            raise InvarianceError(
                f"invariant={passed.promises.invariant!r} promises nothing of the gradient of gathered rows "
                "(return_gathered=True), which every rank uses in its own way"
            )
        elif passed.promises.leaves:
            grad_x = _ops.gemm_reduce_scatter(stacked, weight.t(), None, chunk, columns, *passed)
            grad_x = grad_x + _ops.reduce_scatter_rows(grad_gathered, chunk, *passed[:2], True)
        else:
            grad_x = _ops.reduce_scatter_rows(stacked @ weight + grad_gathered, chunk, *passed[:3])
    if any(needs_weights):
        gathered = x if kept else _ops.all_gather_rows(x, rows, chunk, passed.group)
        grad_weights = [
            along_rows(grad, gathered, passed) if needed else None
            for grad, needed in zip(grad_outs, needs_weights, strict=True)
        ]
    return grad_x, grad_weights, grad_biases


all_gather_gemm = Registered(
    "all_gather_gemm(Tensor x, Tensor[] weights, Tensor[]? biases, SymInt rows, SymInt chunk, "
    f"bool keep_gathered, SymInt? columns, {SCHEMA}) -> Tensor[]",
    bind=_bind_all_gather_gemm,
    fake=_fake_all_gather_gemm,
    save=_save_all_gather_gemm,
    backward=_backward_all_gather_gemm,
)


# --- all_gather_gemm_gradients: of x and of every weight, where all are wanted and no gathered x was kept ---
# The gather of x, which the weights' gradients wait for, goes by copy engines alongside the fused kernel that
# makes x's gradient, where there is one and the shards are not small. Its memory is the gather buffer of
# `all_gather_gemm` itself.


def _bind_all_gather_gemm_gradients(
    x: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows: int,
    chunk: int,
    columns: int | None,
    *passed: Any,
) -> Run:
    options = Passed(*passed)
    ranks, depth = resolve(options.group), x.shape[1]
    shards = Shards(rows, ranks.size, chunk)
    stacked, weight = _joined(grads, 1), _joined(weights, 0).t()
    extents = rows, depth, _extent(stacked.shape[1], columns, options)
    name, scatter = chosen(GEMM_REDUCE_SCATTER, stacked, weight, None, extents, shards, options)
    alongside = False
    if name == "fused":
        op, sums = ALL_GATHER_GEMM.name, options.deterministic
        told: Any = sums, "decomposed", False, (None, None), options.promises
        problem = Problem.of(op, rows, columns, depth, x, ranks, *told)
        alongside = pays_alongside(problem, shards)

    product = arithmetic_of(options.promises).product
    facts = {"rows": rows, "chunk": chunk, "width": depth}
    gathering = compared("all_gather_gemm_gradients", x, options.group, **facts)

    def run(x: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        own = x.contiguous()

        def scattered() -> Tensor:
            result: Tensor = scatter(_joined(grads, 1), _joined(weights, 0).t(), None)
            return result

        if not alongside:
            grad_x = scattered()
            gathered = gather_rows(own, shards, gathering)
            return [grad_x, *(product(grad.t(), gathered.t()) for grad in grads)]
        with copies_for(ranks, own, shards).alongside(own, scattered, *grads) as (grad_x, gathered):
            return [grad_x, *(grad.t() @ gathered for grad in grads)]

    return run


def _no_second_gradient(*_: Any) -> Any:
    raise RuntimeError("all_gather_gemm_gradients is for a backward pass that has none of its own")


all_gather_gemm_gradients = Registered(
    "all_gather_gemm_gradients(Tensor x, Tensor[] grads, Tensor[] weights, SymInt rows, SymInt chunk, "
    f"SymInt? columns, {SCHEMA}) -> Tensor[]",
    bind=_bind_all_gather_gemm_gradients,
    fake=lambda x, grads, weights, *_: [x.new_empty(x.shape), *(w.new_empty(w.shape) for w in weights)],
    backward=_no_second_gradient,
)


# --- gemm_reduce_scatter: x [M, K_local], weight [N, K_local] -> own rows [m_r, N]; shards of `chunk` ---
# `k` is K over all ranks, if it is known.


def _bind_gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk: int,
    k: int | None,
    *passed: Any,
    **scaled: Any,
) -> Run:
    options = Passed(*passed)
    extents = x.shape[0], weight.shape[0], _extent(x.shape[1], k, options)
    shards = Shards(x.shape[0], group_size(options.group), chunk)
    return chosen(GEMM_REDUCE_SCATTER, x, weight, bias, extents, shards, options, **scaled).run


def _backward_gemm_reduce_scatter(ctx: Any, given: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs
    rows, chunk, group = x.shape[0], given.chunk, given.group
    whole = needs_weight or needs_bias
    grad_x = gathered = None
    if needs_x:
        how = (given.k, *_for_gradient(given))
        gathered, grad_x = _ops.all_gather_gemm(grad, [weight.t()], None, rows, chunk, whole, *how)
    elif whole:
        gathered = _ops.all_gather_rows(grad, rows, chunk, group)
    grad_bias = None
    if needs_bias and torch.is_grad_enabled():  # replicated; gathered rows are each rank's own
        grad_bias = _ops.sum_over_ranks(grad.sum(0), group)
    elif needs_bias and gathered is not None:
        grad_bias = sum_of_rows(gathered, given)
    grad_weight = along_rows(gathered, x, given) if needs_weight and gathered is not None else None
    return grad_x, grad_weight, grad_bias


gemm_reduce_scatter = Registered(
    f"gemm_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, SymInt chunk, SymInt? k, {SCHEMA}) "
    "-> Tensor",
    bind=_bind_gemm_reduce_scatter,
    fake=lambda x, weight, bias, chunk, k, group, *_: x.new_empty(
        own_rows(chunk, x.shape[0], group), weight.shape[0]
    ),
    backward=_backward_gemm_reduce_scatter,
    saves=2,
)


# --- products whose rows every rank has: gemm_all_reduce, local_gemm, gemm_all_gather ---
# gemm_all_reduce: x [M, K_local], weight [N, K_local] -> [M, N], the same on every rank; `k` as above.
# local_gemm: x [M, K], the same on every rank, weight [N_local, K] -> [M, N_local]. Silent in forward.
# gemm_all_gather: x [M, K], weight [n_r, K], bias [n_r] -> [M, columns], the same on every rank.


def _bind_gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int | None, *passed: Any, **scaled: Any
) -> Run:
    options = Passed(*passed)
    extents = x.shape[0], weight.shape[0], _extent(x.shape[1], k, options)
    shards = Shards.even(x.shape[0], group_size(options.group))
    return chosen(GEMM_ALL_REDUCE, x, weight, bias, extents, shards, options, **scaled).run


def _bind_gemm_all_gather(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, *passed: Any, **scaled: Any
) -> Run:
    options, extents = Passed(*passed), (x.shape[0], columns, x.shape[1])
    shards = Shards.even(columns, group_size(options.group))
    return chosen(GEMM_ALL_GATHER, x, weight, bias, extents, shards, options, **scaled).run


def _bind_local_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *passed: Any,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> Run:
    how = arithmetic_of(Passed(*passed).promises)
    if out_dtype is None:
        return how.product
    why = why_no_product(x.device.type, x.dtype, weight.dtype, out_dtype, blocks)
    torchs = why is None and not how.is_ordered
    return with_scales(how.product, out_dtype, Scaled if torchs else dequantised, blocks)


def _backward_gemm_all_reduce(ctx: Any, given: Any, needs: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs
    return (
        _ops.local_gemm(grad, weight.t(), None, *_for_gradient(given)) if needs_x else None,
        along_rows(each(grad, given.group), x, given) if needs_weight else None,
        sum_of_rows(grad, given) if needs_bias else None,
    )


def _backward_local_gemm(
    ctx: Any, given: Any, needs: Any, grad: Tensor, columns: int | None = None
) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs
    how = (columns, *_for_gradient(given))
    return (
        _ops.gemm_all_reduce(grad, weight.t(), None, *how) if needs_x else None,
        along_rows(grad, each(x, given.group), given) if needs_weight else None,
        sum_of_rows(grad, given) if needs_bias else None,
    )


def _backward_gemm_all_gather(ctx: Any, given: Any, needs: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ranks = resolve(given.group)
    if torch.is_grad_enabled():
        own = _ops.keep_shard(grad, 1, given.group)
    else:  # the same without a copy
        own = grad[:, slice(*Shards.even(given.columns, ranks.size).range(ranks.rank))]
    return _backward_local_gemm(ctx, given, needs, own, given.columns)


gemm_all_reduce = Registered(
    f"gemm_all_reduce(Tensor x, Tensor weight, Tensor? bias, SymInt? k, {SCHEMA}) -> Tensor",
    bind=_bind_gemm_all_reduce,
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
    backward=_backward_gemm_all_reduce,
    saves=2,
)

local_gemm = Registered(
    f"local_gemm(Tensor x, Tensor weight, Tensor? bias, {SCHEMA}) -> Tensor",
    bind=_bind_local_gemm,
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
    backward=_backward_local_gemm,
    saves=2,
)

gemm_all_gather = Registered(
    f"gemm_all_gather(Tensor x, Tensor weight, Tensor? bias, SymInt columns, {SCHEMA}) -> Tensor",
    bind=_bind_gemm_all_gather,
    fake=lambda x, weight, bias, columns, *_: x.new_empty(x.shape[0], columns),
    backward=_backward_gemm_all_gather,
    saves=2,
)
