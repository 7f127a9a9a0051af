"""The four ops as users call them: any leading dimensions, any shard lengths, checked arguments."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from . import ops as _ops  # noqa: F401  registers torch.ops.overlap_gemm
from .backends.base import DUAL, OPS, Problem
from .backends.select import Choice, check_name, choose, preferring
from .runtime import agree
from .runtime.group import GroupLike, group_name, group_rank, group_size, resolve
from .sharding import Shards

Length: TypeAlias = int | Literal["equal"] | None
"""A sharded extent over all ranks; "equal": every rank has as much as this one; None: ask the others."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""float64 is for gradient checks; the portable backends alone carry it."""


def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    return_gathered: bool = False,
    backend: str = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
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
            gathering it again in backward. Always so where `return_gathered` keeps it alive anyway.

    Returns:
        `[M, ..., N_local]`, or a list with one such tensor per weight. With `return_gathered` a pair of that
        and the gathered `[M, ..., K]`.

    Raises:
        ValueError, TypeError: Arguments that do not fit together; the message holds the values and the rule.
        RuntimeError: A peer is gone, did not answer within the group's timeout, or (`OVERLAP_GEMM_CHECK=1`)
            disagrees about the call.
    """
    op = "all_gather_gemm"
    single = isinstance(weight, Tensor)
    name = group_name(group)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = _as_list(bias)
    _validate(op, name, x_shard, weights, biases, backend, dim)
    x = x_shard.movedim(dim, 0)
    length, inner, width = x.shape[0], x.shape[1:-1], x.shape[-1]
    total = _total(op, "rows", rows, length, x, name)
    unit = math.prod(inner)
    shards = Shards.even(total * unit, group_size(name), max(unit, 1))
    flat = x.reshape(length * unit, width)
    gathered, *outs = torch.ops.overlap_gemm.all_gather_gemm(
        flat, weights, biases, shards.total, shards.chunk, return_gathered or save_gathered, name, backend
    )
    outs = [out.view(total, *inner, out.shape[-1]).movedim(0, dim) for out in outs]
    result = outs[0] if single else outs
    return (result, gathered.view(total, *inner, width).movedim(0, dim)) if return_gathered else result


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    dim: int = 0,
) -> Tensor:
    """Multiplies with this rank's slice of the weight and keeps this rank's rows of the sum over the ranks.

    The row-parallel half of a tensor-parallel layer with sequence parallelism. The sum is accumulated in
    float32 (or wider) in rank order: bitwise the same from call to call.

    Args:
        x: `[M, ..., K_local]`; float32, bfloat16, float16 (or float64). K_local may differ between ranks.
        weight: `[N, K_local]`.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum. Every rank gets its whole gradient.
        backend: "auto" or a backend's name; see `explain`.
        dim: The dimension of x along which the result is sharded, as in `all_gather_gemm`.

    Returns:
        `[M_local, ..., N]`; M_local is this rank's share of M as `torch.chunk` cuts it.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    op = "gemm_reduce_scatter"
    name = group_name(group)
    _validate(op, name, x, [weight], _as_list(bias), backend, dim)
    x = x.movedim(dim, 0)
    inner = x.shape[1:-1]
    unit = math.prod(inner)
    flat = x.reshape(x.shape[0] * unit, x.shape[-1])
    shards = Shards.even(flat.shape[0], group_size(name), max(unit, 1))
    out = torch.ops.overlap_gemm.gemm_reduce_scatter(flat, weight, bias, shards.chunk, name, backend)
    length = Shards.even(x.shape[0], group_size(name)).size(group_rank(name))
    return out.view(length, *inner, out.shape[-1]).movedim(0, dim)


def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: str = "auto",
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

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    op = "gemm_all_reduce"
    name = group_name(group)
    _validate(op, name, x, [weight], _as_list(bias), backend)
    out = torch.ops.overlap_gemm.gemm_all_reduce(x.flatten(0, -2), weight, bias, name, backend)
    return out.view(*x.shape[:-1], out.shape[-1])


def gemm_all_gather(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    columns: Length = None,
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

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    op = "gemm_all_gather"
    name = group_name(group)
    _validate(op, name, x, [weight], _as_list(bias), backend)
    total = _total(op, "columns", columns, weight.shape[0], x, name)
    out = torch.ops.overlap_gemm.gemm_all_gather(x.flatten(0, -2), weight, bias, total, name, backend)
    return out.view(*x.shape[:-1], total)


def explain(
    op: str | Callable[..., Any],
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    backend: str = "auto",
    rows: Length = None,
    columns: Length = None,
    dim: int = 0,
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
        columns: As for `gemm_all_gather`.
        dim: As for the op.
        **_: The op's other arguments, on which the choice does not depend.

    Returns:
        A `Choice`; print it.

    Raises:
        ValueError, TypeError: As the op.
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {name!r}")
    ranks = group_name(group)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    _validate(name, ranks, x, weights, [], backend, dim)
    batch = math.prod(x.shape[:-1])
    if name == "all_gather_gemm":
        length = x.shape[dim]
        total = _total(name, "rows", rows, length, x, ranks)
        batch = total * math.prod(size for axis, size in enumerate(x.shape[:-1]) if axis != dim % x.ndim)
        features = x.shape[-1]
    elif name == "gemm_all_gather":
        features = _total(name, "columns", columns, weights[0].shape[0], x, ranks)
    else:
        features = weights[0].shape[0]
    problem = Problem.of(name, batch, features, x, resolve(ranks))
    choice = choose(problem, backend)
    if name in DUAL:  # the gradient's exchange moves a tensor of the same size the other way
        choice = replace(choice, backward=choose(replace(problem, op=DUAL[name]), preferring(backend)))
    return choice


def _as_list(bias: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if bias is None:
        return []
    return [bias] if isinstance(bias, Tensor) else list(bias)


def _validate(
    op: str, group: str, x: Tensor, weights: list[Tensor], biases: list[Tensor], backend: str, dim: int = 0
) -> None:
    """Raises for arguments that do not fit together; in debug mode on the other ranks, too."""
    try:
        _check_operands(op, x, weights, biases)
        if not 0 <= dim < x.ndim - 1:
            raise ValueError(
                f"{op}: dim must name one of the {x.ndim - 1} row dimensions of x {_shape(x)}, got {dim}"
            )
        _check_group(op, x, group)
        check_name(backend)
    except (ValueError, TypeError) as error:
        agree.report(op, resolve(group), error)
        raise


def _check_operands(op: str, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
    if not weights:
        raise ValueError(f"{op}: weight is an empty list")
    if biases and len(biases) != len(weights):
        raise ValueError(f"{op}: {len(weights)} weights need as many biases or none, got {len(biases)}")
    named = [("x", x), *(("weight", weight) for weight in weights), *(("bias", bias) for bias in biases)]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise TypeError(
                f"{op}: operands must share dtype and device, got x {x.dtype} on {x.device} and "
                f"{name} {tensor.dtype} on {tensor.device}"
            )
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: dtype must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{op}: x must be [M, ..., K], got {_shape(x)}")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: weight must be [N, K] as in nn.Linear with K={x.shape[-1]} of x {_shape(x)}, "
                f"got {_shape(weight)}"
            )
    for bias, weight in zip(biases, weights, strict=False):
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{op}: bias must be [{weight.shape[0]}] for weight {_shape(weight)}, got {_shape(bias)}"
            )


def _check_group(op: str, x: Tensor, group: str) -> None:
    if torch.compiler.is_compiling():
        return
    ranks = resolve(group)
    if x.device.type not in ranks.device_types:
        raise ValueError(
            f"{op}: x lies on {x.device}, for which group {group!r} (P={ranks.size}) has no backend; "
            f"it serves {sorted(ranks.device_types)}"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _total(op: str, what: str, given: Length, length: int, x: Tensor, group: str) -> int:
    """The sharded extent over all ranks: the caller's, or equal shards in a graph, or what the ranks say."""
    if given == "equal":
        return length * group_size(group)
    if given is not None:
        own = Shards.even(given, group_size(group)).size(group_rank(group))
        if own != length:
            raise ValueError(
                f"{op}: of {what}={given} rank {group_rank(group)} of {group_size(group)} owns {own} "
                f"(as torch.chunk cuts), but its operand has {length}"
            )
        return given
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return length * group_size(group)
    return agree.total_length(op, what, length, x.device, resolve(group))
