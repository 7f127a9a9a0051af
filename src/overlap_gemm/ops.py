"""The ops as torch.library custom ops: schema, implementation, fake (meta) kernel and autograd of each.

Everything here is 2-D and validated; `functional` is the door for users. Groups travel by name, so that the
ops are plain graph nodes to torch.compile. Gradients follow the duality of the ops:

    all_gather_gemm     <->  gemm_reduce_scatter
    gemm_all_reduce     <->  local_gemm (a product of replicated rows whose input gradient is a
    gemm_all_reduce) gemm_all_gather      ->  slice of the output gradient, then gemm_all_reduce

A replicated output's gradient must be the same on every rank, as it is when every rank computes the same
loss; a replicated input gets its whole gradient on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .backends.base import Backend, Op, Problem
from .backends.collectives import all_gather_rows as _all_gather_rows
from .backends.collectives import gemm
from .backends.collectives import reduce_scatter_rows as _reduce_scatter_rows
from .backends.select import choose, preferring
from .runtime import agree
from .runtime.group import Group, resolve
from .sharding import Shards

_library = torch.library.Library("overlap_gemm", "DEF")


class _Registered:
    """A function as an op of ``torch.ops.overlap_gemm``, by its name, schema from its annotations.

    `torch.library.custom_op` without the wrappers it runs in every call: a quarter of the host time of one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"overlap_gemm::{function.__name__}"
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(function.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(function.__name__, function, "CompositeExplicitAutograd")

    def register_fake(self, function: Callable[..., Any]) -> None:
        """What the op returns, in shape and dtype."""
        torch.library.register_fake(self._name, function, lib=_library)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """How gradients are computed, and what is kept for it."""
        torch.library.register_autograd(self._name, backward, setup_context=setup_context, lib=_library)


def _begin(op: Op, x: Tensor, rows: int, features: int, group: str, backend: str) -> tuple[Backend, Group]:
    """Chooses the backend; in debug mode all ranks compare notes first."""
    ranks = resolve(group)
    problem = Problem.of(op, rows, features, x, ranks)
    agree.check(ranks, backend=backend, **vars(problem))
    return choose(problem, backend).backend, ranks


def _new(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, which a custom op may return only if it is not one of its inputs."""
    return tensor.clone() if tensor is like else tensor


def _columns(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=0)


# --- all_gather_rows, reduce_scatter_rows: for what backward moves without a product ---


@_Registered
def all_gather_rows(x: Tensor, rows: int, chunk: int, group: str) -> Tensor:
    """X `[m_r, K]` -> `[rows, K]`; shards of `chunk` rows."""
    ranks = resolve(group)
    return _new(x, _all_gather_rows(x.contiguous(), Shards(rows, ranks.size, chunk), ranks))


@all_gather_rows.register_fake
def _(x: Tensor, rows: int, chunk: int, group: str) -> Tensor:
    return x.new_empty(rows, x.shape[1])


@_Registered
def reduce_scatter_rows(x: Tensor, chunk: int, group: str) -> Tensor:
    """X `[M, N]`, one addend per rank -> this rank's rows of the sum; shards of `chunk` rows."""
    ranks = resolve(group)
    return _new(x, _reduce_scatter_rows(x.contiguous(), None, Shards(x.shape[0], ranks.size, chunk), ranks))


@reduce_scatter_rows.register_fake
def _(x: Tensor, chunk: int, group: str) -> Tensor:
    ranks = resolve(group)
    return x.new_empty(Shards(x.shape[0], ranks.size, chunk).size(ranks.rank), x.shape[1])


def _save_all_gather_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.chunk, ctx.group = inputs


def _backward_all_gather_rows(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.overlap_gemm.reduce_scatter_rows(grad, ctx.chunk, ctx.group), None, None, None


def _save_reduce_scatter_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.chunk, ctx.group = inputs
    ctx.rows = x.shape[0]


def _backward_reduce_scatter_rows(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.overlap_gemm.all_gather_rows(grad, ctx.rows, ctx.chunk, ctx.group), None, None


all_gather_rows.register_autograd(_backward_all_gather_rows, setup_context=_save_all_gather_rows)
reduce_scatter_rows.register_autograd(_backward_reduce_scatter_rows, setup_context=_save_reduce_scatter_rows)


# --- slice_columns: for a row-parallel layer whose input is replicated ---


@_Registered
def slice_columns(x: Tensor, group: str) -> Tensor:
    """X `[M, K]`, the same on every rank -> this rank's columns. The gradient is gathered to all of x."""
    ranks = resolve(group)
    start, stop = Shards.even(x.shape[1], ranks.size).range(ranks.rank)
    return x[:, start:stop].clone(memory_format=torch.contiguous_format)


@slice_columns.register_fake
def _(x: Tensor, group: str) -> Tensor:
    ranks = resolve(group)
    return x.new_empty(x.shape[0], Shards.even(x.shape[1], ranks.size).size(ranks.rank))


def _save_slice_columns(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.group = inputs
    ctx.columns = x.shape[1]


def _backward_slice_columns(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    chunk = Shards.even(ctx.columns, resolve(ctx.group).size).chunk
    return torch.ops.overlap_gemm.all_gather_rows(grad.t(), ctx.columns, chunk, ctx.group).t(), None


slice_columns.register_autograd(_backward_slice_columns, setup_context=_save_slice_columns)


# --- all_gather_gemm ---


@_Registered
def all_gather_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    rows: int,
    chunk: int,
    keep_gathered: bool,
    group: str,
    backend: str,
) -> list[Tensor]:
    """X `[m_r, K]`, weights `[N_i, K]` -> gathered x `[rows, K]` (empty unless kept), then products."""
    way, ranks = _begin("all_gather_gemm", x, rows, x.shape[1], group, backend)
    gathered, outs = way.all_gather_gemm(
        x.contiguous(), weights, biases, Shards(rows, ranks.size, chunk), ranks
    )
    return [_new(x, gathered) if keep_gathered else x.new_empty(0, x.shape[1]), *outs]


@all_gather_gemm.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    rows: int,
    chunk: int,
    keep_gathered: bool,
    group: str,
    backend: str,
) -> list[Tensor]:
    gathered = x.new_empty(rows if keep_gathered else 0, x.shape[1])
    return [gathered, *(x.new_empty(rows, weight.shape[0]) for weight in weights)]


def _save_all_gather_gemm(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, ctx.rows, ctx.chunk, ctx.kept, ctx.group, ctx.backend = inputs
    ctx.num_weights, ctx.num_biases = len(weights), len(biases)
    ctx.save_for_backward(output[0] if ctx.kept else x, *weights)
    ctx.set_materialize_grads(False)


def _backward_all_gather_gemm(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    grad_gathered = grads[0] if ctx.kept else None
    grad_outs = [
        x.new_zeros(ctx.rows, weight.shape[0]) if grad is None else grad
        for grad, weight in zip(grads[1:], weights, strict=True)
    ]
    needs_x, needs_weights, needs_biases, *_ = ctx.needs_input_grad
    grad_x, grad_weights, grad_biases = None, [None] * ctx.num_weights, [None] * ctx.num_biases
    if needs_x:
        stacked, weight = _columns(grad_outs), _rows(weights)
        if grad_gathered is None:
            grad_x = torch.ops.overlap_gemm.gemm_reduce_scatter(
                stacked, weight.t(), None, ctx.chunk, ctx.group, preferring(ctx.backend)
            )
        else:
            grad_x = torch.ops.overlap_gemm.reduce_scatter_rows(
                stacked @ weight + grad_gathered, ctx.chunk, ctx.group
            )
    if any(needs_weights):
        gathered = (
            x if ctx.kept else torch.ops.overlap_gemm.all_gather_rows(x, ctx.rows, ctx.chunk, ctx.group)
        )
        grad_weights = [
            grad.t() @ gathered if needed else None
            for grad, needed in zip(grad_outs, needs_weights, strict=True)
        ]
    if any(needs_biases):
        grad_biases = [grad.sum(0) for grad in grad_outs]
    return grad_x, grad_weights, grad_biases, None, None, None, None, None


all_gather_gemm.register_autograd(_backward_all_gather_gemm, setup_context=_save_all_gather_gemm)


# --- gemm_reduce_scatter ---


@_Registered
def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, group: str, backend: str
) -> Tensor:
    """X `[M, K_local]`, weight `[N, K_local]` -> this rank's rows `[m_r, N]`; shards of `chunk` rows."""
    way, ranks = _begin("gemm_reduce_scatter", x, x.shape[0], weight.shape[0], group, backend)
    shards = Shards(x.shape[0], ranks.size, chunk)
    return way.gemm_reduce_scatter(x.contiguous(), weight, bias, shards, ranks)


@gemm_reduce_scatter.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, group: str, backend: str) -> Tensor:
    ranks = resolve(group)
    return x.new_empty(Shards(x.shape[0], ranks.size, chunk).size(ranks.rank), weight.shape[0])


def _save_gemm_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.chunk, ctx.group, ctx.backend = inputs
    ctx.save_for_backward(x, weight)


def _backward_gemm_reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    gathered: Any = None
    if needs_x:
        gathered, grad_x = torch.ops.overlap_gemm.all_gather_gemm(
            grad,
            [weight.t()],
            [],
            x.shape[0],
            ctx.chunk,
            needs_weight or needs_bias,
            ctx.group,
            preferring(ctx.backend),
        )
    elif needs_weight or needs_bias:
        gathered = torch.ops.overlap_gemm.all_gather_rows(grad, x.shape[0], ctx.chunk, ctx.group)
    if needs_weight:
        grad_weight = gathered.t() @ x
    if needs_bias:
        grad_bias = gathered.sum(0)
    return grad_x, grad_weight, grad_bias, None, None, None


gemm_reduce_scatter.register_autograd(_backward_gemm_reduce_scatter, setup_context=_save_gemm_reduce_scatter)


# --- gemm_all_reduce and local_gemm ---


@_Registered
def gemm_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, backend: str) -> Tensor:
    """X `[M, K_local]`, weight `[N, K_local]` -> `[M, N]`, the same on every rank."""
    way, ranks = _begin("gemm_all_reduce", x, x.shape[0], weight.shape[0], group, backend)
    return way.gemm_all_reduce(x.contiguous(), weight, bias, ranks)


@gemm_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_Registered
def local_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, backend: str) -> Tensor:
    """X `[M, K]`, the same on every rank, weight `[N_local, K]` -> `[M, N_local]`. Silent in forward."""
    return gemm(x, weight, bias)


@local_gemm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.group, ctx.backend = inputs
    ctx.save_for_backward(x, weight)


def _backward_gemm_all_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x = (
        torch.ops.overlap_gemm.local_gemm(grad, weight.t(), None, ctx.group, preferring(ctx.backend))
        if needs_x
        else None
    )
    return (
        grad_x, grad.t() @ x if needs_weight else None, grad.sum(0) if needs_bias else None, None, None
    )  # fmt: skip


def _backward_local_gemm(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x = (
        torch.ops.overlap_gemm.gemm_all_reduce(grad, weight.t(), None, ctx.group, preferring(ctx.backend))
        if needs_x
        else None
    )
    return (
        grad_x, grad.t() @ x if needs_weight else None, grad.sum(0) if needs_bias else None, None, None
    )  # fmt: skip


gemm_all_reduce.register_autograd(_backward_gemm_all_reduce, setup_context=_save_product)
local_gemm.register_autograd(_backward_local_gemm, setup_context=_save_product)


# --- gemm_all_gather ---


@_Registered
def gemm_all_gather(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, group: str, backend: str
) -> Tensor:
    """X `[M, K]`, weight `[n_r, K]`, bias `[n_r]` -> `[M, columns]`, the same on every rank."""
    way, ranks = _begin("gemm_all_gather", x, x.shape[0], columns, group, backend)
    return way.gemm_all_gather(x.contiguous(), weight, bias, Shards.even(columns, ranks.size), ranks)


@gemm_all_gather.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, group: str, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], columns)


def _save_gemm_all_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.columns, ctx.group, ctx.backend = inputs
    ctx.save_for_backward(x, weight)


def _backward_gemm_all_gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    ranks = resolve(ctx.group)
    grad = grad[:, slice(*Shards.even(ctx.columns, ranks.size).range(ranks.rank))]
    grad_x = (
        torch.ops.overlap_gemm.gemm_all_reduce(grad, weight.t(), None, ctx.group, preferring(ctx.backend))
        if needs_x
        else None
    )
    return (
        grad_x, grad.t() @ x if needs_weight else None, grad.sum(0) if needs_bias else None, None, None, None
    )  # fmt: skip


gemm_all_gather.register_autograd(_backward_gemm_all_gather, setup_context=_save_gemm_all_gather)
