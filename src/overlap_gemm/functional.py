"""The four ops as users call them: any leading dimensions, any shard lengths, checked arguments."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import lowering, ops
from .autocast import autocast, autocast_call
from .backends.base import BackendName, Problem
from .backends.select import Choice, choose, preferring
from .calls import is_plain, keep, layouts, needs_grad, state
from .lowering import (
    Lowered,
    is_capturing,
    lower_all_gather_gemm,
    lower_gemm_all_gather,
    lower_gemm_all_reduce,
    lower_gemm_reduce_scatter,
)
from .options import CallOptions, Length
from .registered import Bound, Registered
from .runtime import agree
from .runtime.group import Group, GroupLike, find, group_name, resolve
from .spec import ARGUMENTS, OPS, op_named

__all__ = [
    "Length",
    "all_gather_gemm",
    "explain",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
]


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    return_gathered: Literal[False] = False,
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> Tensor: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    return_gathered: Literal[True],
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    *,
    group: GroupLike = None,
    bias: Sequence[Tensor] | None = None,
    return_gathered: Literal[False] = False,
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> list[Tensor]: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    *,
    group: GroupLike = None,
    bias: Sequence[Tensor] | None = None,
    return_gathered: Literal[True],
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> tuple[list[Tensor], Tensor]: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    return_gathered: bool,
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> Any: ...


def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    return_gathered: bool = False,
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> Any:
    """Gathers the rows of x from all ranks and multiplies them with this rank's weight.

    The column-parallel half of a tensor-parallel layer with sequence parallelism. The rows are sharded as
    `torch.chunk` cuts them; a shard may be short or empty.

    Args:
        x_shard: This rank's rows `[M_local, ..., K]`; float32, bfloat16, float16 (or float64).
        weight: `[N_local, K]` as in `nn.Linear`, or a list of such weights that share one gather (q/k/v,
            gate/up).
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N_local]`, or one per weight if `weight` is a list.
        return_gathered: Return the gathered x as well.
        backend: "auto" or a backend's name; see `explain`.
        rows: M, the sum of the ranks' `M_local`; or "equal" if every rank has as many rows as this one; or
            None: the ranks exchange their lengths first, one small all-gather between the hosts. Under
            torch.compile and CUDA graph capture, where that cannot be, None means "equal".
        dim: The sharded dimension of `x_shard`, 0 for Megatron's `[s, b, h]`, 1 for `[b, s, h]` (which costs
            a copy unless b = 1).
        save_gathered: Keep the gathered x for the weight gradient, P times the shard's memory, instead of
            gathering it again in backward (by copy engines beside the gradient of x, where that is fused and
            shards are not small). Always so where `return_gathered` keeps it alive anyway.
        columns: N of all weights over all ranks; or "equal" if every rank has as many columns as this one; or
            None: what `auto` chooses then does not depend on it.
        deterministic: Whether the sums of the gradient must come out bitwise the same from call to call, as
            for `gemm_reduce_scatter`.
        reserve_sms: SMs that fused kernels leave to others on this rank, for the gradient's, too; None: what
            `configured` or ``OVERLAP_GEMM_RESERVE_SMS`` says. Other backends take what their libraries take.

    Returns:
        `[M, ..., N_local]`, or a list with one such tensor per weight. With `return_gathered` a pair of that
        and the gathered `[M, ..., K]`.

    Raises:
        ValueError, TypeError: Arguments that do not fit together; the message holds the values and the rule.
        RuntimeError: A peer is gone, did not answer within the group's timeout, or (`OVERLAP_GEMM_CHECK=1`)
            disagrees about the call.
    """
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    biases = list(bias) if isinstance(bias, (list, tuple)) else [] if bias is None else [bias]
    single, kept = not isinstance(weight, (list, tuple)), return_gathered or save_gathered
    options = CallOptions(
        backend, deterministic, reserve_sms, dim, rows, columns, None, return_gathered, kept, single
    )
    return call_op(ops.all_gather_gemm, lower_all_gather_gemm, x_shard, weights, biases, group, options)


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: BackendName = "auto",
    dim: int = 0,
    k: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> Tensor:
    """Multiplies with this rank's slice of the weight and keeps this rank's rows of the sum over the ranks.

    The row-parallel half of a tensor-parallel layer with sequence parallelism. Every backend but `torch`
    accumulates the sum in float32 (or wider) in rank order: bitwise the same from call to call.

    Args:
        x: `[M, ..., K_local]`; float32, bfloat16, float16 (or float64). K_local may differ between ranks.
        weight: `[N, K_local]`.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum. Every rank gets its whole gradient.
        backend: "auto" or a backend's name; see `explain`.
        dim: The dimension of x along which the result is sharded, as in `all_gather_gemm`.
        k: K, the sum of the ranks' `K_local`; or "equal" if every rank has as much as this one; or None: what
            `auto` chooses then does not depend on it.
        deterministic: True keeps `auto` to backends that sum in rank order; None asks
            `torch.are_deterministic_algorithms_enabled()`. The same on every rank.
        reserve_sms: As for `all_gather_gemm`.

    Returns:
        `[M_local, ..., N]`; M_local is this rank's share of M as `torch.chunk` cuts it.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    options = CallOptions(backend, deterministic, reserve_sms, dim, k=k)
    return call_op(ops.gemm_reduce_scatter, lower_gemm_reduce_scatter, x, weight, bias, group, options)


def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: BackendName = "auto",
    k: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> Tensor:
    """Multiplies with this rank's slice of the weight and sums over the ranks.

    The row-parallel half of a tensor-parallel layer without sequence parallelism. Summed as in
    `gemm_reduce_scatter`; all ranks get bitwise the same.

    Args:
        x: `[..., K_local]`; float32, bfloat16, float16 (or float64).
        weight: `[N, K_local]`.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum.
        backend: "auto" or a backend's name; see `explain`.
        k: As for `gemm_reduce_scatter`.
        deterministic: As for `gemm_reduce_scatter`.
        reserve_sms: As for `all_gather_gemm`.

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    options = CallOptions(backend, deterministic, reserve_sms, k=k)
    return call_op(ops.gemm_all_reduce, lower_gemm_all_reduce, x, weight, bias, group, options)


def gemm_all_gather(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: BackendName = "auto",
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
) -> Tensor:
    """Multiplies with this rank's rows of the weight and gathers the columns of the result.

    Args:
        x: `[..., K]`, the same on every rank; float32, bfloat16, float16 (or float64). Its gradient is
            complete on every rank.
        weight: `[N_local, K]`; N is sharded as `torch.chunk` cuts it.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N_local]`.
        backend: "auto" or a backend's name; see `explain`.
        columns: N; as `rows` of `all_gather_gemm`.
        deterministic: Of the gradient's sums, as for `gemm_reduce_scatter`.
        reserve_sms: As for `all_gather_gemm`.

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    options = CallOptions(backend, deterministic, reserve_sms, columns=columns)
    return call_op(ops.gemm_all_gather, lower_gemm_all_gather, x, weight, bias, group, options)


def explain(
    op: str | Callable[..., Any],
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    backend: BackendName = "auto",
    rows: Length = None,
    columns: Length = None,
    k: Length = None,
    dim: int = 0,
    deterministic: bool | None = None,
    **_: Any,
) -> Choice:
    """Which backend would carry out `op(x, weight, ...)`, and why.

    Communicates only where the op would: to ask for lengths that are not given.

    Args:
        op: One of the four ops or its name.
        x: As for the op.
        weight: As for the op.
        group: As for the op.
        backend: As for the op.
        rows: As for `all_gather_gemm`.
        columns: As for the op.
        k: As for the op.
        dim: As for the op.
        deterministic: As for the op.
        **_: The op's other arguments, on which the choice does not depend.

    Returns:
        A `Choice`; print it.

    Raises:
        ValueError, TypeError: As the op.
    """
    spec = op_named(op if isinstance(op, str) else getattr(op, "__name__", op))
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    x, weights, _biases = autocast(x, weights, [])
    ranks, several = group_name(group), spec.gathers_operand
    dim = dim if "m" in (spec.x, spec.out) else 0
    options = CallOptions(backend, deterministic, None, dim, rows, columns, k)
    lower: Callable[..., Lowered] = getattr(lowering, f"lower_{spec.name}")
    lowered = lower(ranks, x, weights if several else weights[0], [] if several else None, options)
    problem = Problem.of(spec.name, *lowered.extents, x, resolve(ranks), deterministic, backend)
    choice = choose(problem, backend)
    if spec.dual:  # the gradient's exchange moves a tensor of the same size the other way
        choice = replace(choice, backward=choose(replace(problem, op=spec.dual), preferring(backend)))
    return choice


class _Prepared(NamedTuple):
    """All that calls of one kind have in common: a call is this and its tensors."""

    bound: Bound
    lowered: Lowered

    def __call__(self, x: Tensor, weight: Any, bias: Any) -> Any:
        bound, lowered = self
        if lowered.dim is not None:
            x = lowered.flatten(x)
        run = bound.with_gradient if needs_grad(x, weight, bias) else bound.run
        result = run(x, weight, bias)
        return result if lowered.finish is None else lowered.finish(result)


class _Asking(NamedTuple):
    """The same for calls whose sharded extent the ranks must ask each other for, every time."""

    op: Registered
    lower: Callable[..., Lowered]
    group: Group
    options: CallOptions
    facts: agree.Facts

    def __call__(self, x: Tensor, weight: Any, bias: Any) -> Any:
        length = x.shape[self.options.dim] if OPS[self.op.name].gathers_operand else weight.shape[0]
        name, what = self.op.name, ASKED[self.op.name]
        total = agree.total_length(name, what, length, x.device, self.group, self.facts)
        told = self.options.told(what, total)
        return call_op(self.op, self.lower, x, weight, bias, self.group.name, told)


ASKED = {name: ARGUMENTS[spec.asked] for name, spec in OPS.items() if spec.asked}
"""The option that says the extent which ranks ask each other for where callers do not say it."""


def call_op(
    op: Registered,
    lower: Callable[..., Lowered],
    x: Tensor,
    weight: Any,
    bias: Any,
    group: GroupLike,
    options: CallOptions,
) -> Any:
    """Calls an op: at once where nobody but autograd looks, else through torch's dispatcher.

    Args:
        op: It.
        lower: Makes a call of it.
        x: The user's.
        weight: The user's, or a list.
        bias: The user's, or a list.
        group: The user's.
        options: The user's.
    """
    if not is_plain(x, weight, bias):
        x, weight, bias = autocast_call(x, weight, bias)
        lowered = lower(group_name(group), x, weight, bias, options)
        through = getattr(torch.ops.overlap_gemm, op.name)
        result = through(lowered.flatten(x), weight, bias, *lowered.arguments)
        return result if lowered.finish is None else lowered.finish(result)
    ranks = find(group)
    launched = ranks.progress.launched
    try:
        try:
            key = (op.name, layouts(x, weight, bias), options, state(x))
            prepared = ranks.calls.get(key)
        except (TypeError, RuntimeError):  # tensors without strides, arguments without a hash: ours to name
            lower(ranks.name, x, weight, bias, options.equal(ASKED.get(op.name)))
            raise
        if prepared is None:
            prepared = keep(ranks, key, _prepare(op, lower, x, weight, bias, ranks, options))
        return prepared(x, weight, bias)
    except BaseException as error:
        ranks.progress.raised(error, launched)
        raise


def _prepare(
    op: Registered,
    lower: Callable[..., Lowered],
    x: Tensor,
    weight: Any,
    bias: Any,
    group: Group,
    options: CallOptions,
) -> _Prepared | _Asking:
    asked = ASKED.get(op.name)
    extent = getattr(options, asked) if asked else ()
    if extent is None and group.size > 1 and not is_capturing(x):
        facts = lower(group.name, x, weight, bias, options.equal(ASKED.get(op.name))).facts
        return _Asking(op, lower, group, options, facts)
    lowered = lower(group.name, x, weight, bias, options)
    return _Prepared(op.bound((lowered.flatten(x), weight, bias), lowered.arguments), lowered)
