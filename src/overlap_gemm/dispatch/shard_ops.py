"""Custom ops that communicate without a product: they gather, cut, exchange or sum shards over the ranks.

| op              | gradient            | use of the result                                            |
|-----------------|---------------------|--------------------------------------------------------------|
| all_gather_rows | reduce_scatter_rows | ranks compute different things from the gathered rows        |
| shard_columns    | shard_rows           | each element is on one rank before and after                 |
| join_shards     | keep_shard          | all ranks compute the same from the joined tensor            |
| sum_over_ranks  | copy_to_ranks       | all ranks compute the same from the sum of different addends |

Each op is also the gradient of its gradient. `join_shards` and `sum_over_ranks` return replicated tensors:
the gradient of such a tensor must be the same on every rank.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.base import Problem
from ..backends.collectives import all_gather_rows as _all_gather_rows
from ..backends.collectives import collective, columns_to_rows, rows_to_columns
from ..backends.collectives import reduce_scatter_rows as _reduce_scatter_rows
from ..backends.op_call import CallOperands, OpCall
from ..backends.select import choose
from ..backends.torch_backend import reduce_scatter_padded
from ..runtime import agree
from ..runtime.group import Group, group_rank, group_size, resolve
from ..spec import GEMM_REDUCE_SCATTER
from ..spec.sharding import Shards
from .registered import Registered, Run


def local_rows(chunk: int, rows: int, group: str) -> int:
    """Returns the number of this rank's rows of `rows`; a full shard has `chunk` rows."""
    return Shards(rows, group_size(group), chunk).size(group_rank(group))


def new(like: Tensor, tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy if it is the op's input `like`, which a custom op must not return."""
    return tensor.clone() if tensor is like else tensor


def with_kept(run_op: Run, call: OpCall, takes_lists: bool) -> Run:
    """Returns an op's function that returns lists as declared: the communicated operand or None is first."""
    if not takes_lists:
        return run_op

    def run(*tensors: Any) -> list[Tensor | None]:
        moved, outs = run_op(*tensors)
        return [new(tensors[0], moved) if call.keep else None, *outs]

    return run


def compared(op: str, x: Tensor, group: str, **shared: int) -> Group:
    """Returns the group for calls of an op, whose ranks compare op, dtype and facts before they communicate.

    Args:
        op: Name of the op.
        x: Operand, for its dtype and device.
        group: Name of the group.
        **shared: Numbers that must be the same on every rank.
    """
    return agree.of_calls(resolve(group), x.device, (("op", op), ("dtype", x.dtype), *shared.items()))


# --- all_gather_rows: x [m_r, K] -> [rows, K]; shards of `chunk` rows ---


def _bind_all_gather_rows(x: Tensor, rows: int, chunk: int, group: str) -> Run:
    ranks = compared("all_gather_rows", x, group, rows=rows, chunk=chunk, width=x.shape[1])
    shards = Shards(rows, ranks.size, chunk)
    return lambda x: new(x, _all_gather_rows(x.contiguous(), shards, ranks))


all_gather_rows = Registered(
    "all_gather_rows(Tensor x, SymInt rows, SymInt chunk, str group) -> Tensor",
    bind=_bind_all_gather_rows,
    fake=lambda x, rows, chunk, group: x.new_empty(rows, x.shape[1]),
    backward=lambda ctx, call, needs, grad: (
        reduce_scatter_rows(grad, call.chunk, call.group, "auto", None),
    ),
)


# --- reduce_scatter_rows: x [M, N], one addend per rank -> this rank's rows of the sum; shards of `chunk` ---
# Summed by the backend that a gemm_reduce_scatter of that size would use.


def _bind_reduce_scatter_rows(
    x: Tensor, chunk: int, group: str, backend: str, deterministic: bool | None
) -> Run:
    rows, columns = x.shape
    call = OpCall(group, rows, columns, chunk=chunk, backend=backend, deterministic=deterministic)
    problem = Problem.of(GEMM_REDUCE_SCATTER.name, call, CallOperands(x, None), resolve(group))
    ranks = compared("reduce_scatter_rows", x, group, rows=rows, chunk=chunk, width=columns)
    shards = Shards(x.shape[0], ranks.size, chunk)
    if choose(problem, backend).backend.deterministic or ranks.size == 1:
        return lambda x: new(x, _reduce_scatter_rows(x.contiguous(), shards, ranks))

    def run(x: Tensor) -> Tensor:
        padded = x.new_empty(ranks.size * chunk, x.shape[1])
        padded[: shards.total] = x
        return reduce_scatter_padded(padded, None, shards, ranks)

    return run


reduce_scatter_rows: Registered = Registered(
    "reduce_scatter_rows(Tensor x, SymInt chunk, str group, str backend, bool? deterministic) -> Tensor",
    bind=_bind_reduce_scatter_rows,
    fake=lambda x, chunk, group, *_: x.new_empty(local_rows(chunk, x.shape[0], group), x.shape[1]),
    backward=lambda ctx, call, needs, grad: (all_gather_rows(grad, ctx.shape[0], call.chunk, call.group),),
)


# --- shard_columns: x [m_r, N] -> [rows, n_r], all-to-all; columns as torch.chunk cuts them ---
# --- shard_rows: x [rows, n_r] -> [m_r, columns], its inverse ---


def _bind_shard_columns(x: Tensor, rows: int, chunk: int, group: str) -> Run:
    ranks = compared("shard_columns", x, group, rows=rows, chunk=chunk, width=x.shape[1])
    shards = Shards(rows, ranks.size, chunk)
    return lambda x: new(x, rows_to_columns([x], shards, ranks)[0])


def _bind_shard_rows(x: Tensor, columns: int, chunk: int, group: str) -> Run:
    ranks = compared("shard_rows", x, group, rows=x.shape[0], chunk=chunk, width=columns)
    shards = Shards(x.shape[0], ranks.size, chunk)
    return lambda x: new(x, columns_to_rows(x.contiguous(), columns, shards, ranks))


def local_columns(columns: int, group: str) -> int:
    """Returns the number of this rank's columns, as torch.chunk cuts `columns`."""
    return Shards.owned_by(group_size(group), group_rank(group))(columns)


shard_columns: Registered = Registered(
    "shard_columns(Tensor x, SymInt rows, SymInt chunk, str group) -> Tensor",
    bind=_bind_shard_columns,
    fake=lambda x, rows, chunk, group: x.new_empty(rows, local_columns(x.shape[1], group)),
    backward=lambda ctx, call, needs, grad: (shard_rows(grad, ctx.shape[1], call.chunk, call.group),),
)

shard_rows: Registered = Registered(
    "shard_rows(Tensor x, SymInt columns, SymInt chunk, str group) -> Tensor",
    bind=_bind_shard_rows,
    fake=lambda x, columns, chunk, group: x.new_empty(local_rows(chunk, x.shape[0], group), columns),
    backward=lambda ctx, call, needs, grad: (shard_columns(grad, ctx.shape[0], call.chunk, call.group),),
)


# --- keep_shard: x, the same on every rank -> its shard along `dim`, as torch.chunk cuts ---
# --- join_shards: a shard along `dim`, `total` long over all ranks -> the full x, the same on every rank ---


def _bind_keep_shard(x: Tensor, dim: int, group: str) -> Run:
    ranks = resolve(group)
    start, stop = Shards.even(x.shape[dim], ranks.size).range(ranks.rank)
    return lambda x: x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _bind_join_shards(x: Tensor, dim: int, total: int, group: str) -> Run:
    rest = [size for axis, size in enumerate(x.shape) if axis != dim]
    ranks = compared("join_shards", x, group, total=total, dim=dim, width=math.prod(rest))
    shards = Shards.even(total, ranks.size)

    def run(x: Tensor) -> Tensor:
        if ranks.size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        rows = x.movedim(dim, 0).reshape(x.shape[dim], math.prod(rest)).contiguous()
        return _all_gather_rows(rows, shards, ranks).view(total, *rest).movedim(0, dim).contiguous()

    return run


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty([size if axis == dim else extent for axis, extent in enumerate(x.shape)])


keep_shard = Registered(
    "keep_shard(Tensor x, int dim, str group) -> Tensor",
    bind=_bind_keep_shard,
    fake=lambda x, dim, group: _resized(
        x, dim, Shards.even(x.shape[dim], resolve(group).size).size(resolve(group).rank)
    ),
    backward=lambda ctx, call, needs, grad: (join_shards(grad, call.dim, ctx.shape[call.dim], call.group),),
)

join_shards: Registered = Registered(
    "join_shards(Tensor x, int dim, SymInt total, str group) -> Tensor",
    bind=_bind_join_shards,
    fake=lambda x, dim, total, group: _resized(x, dim, total),
    backward=lambda ctx, call, needs, grad: (keep_shard(grad, call.dim, call.group),),
)


# --- sum_over_ranks: one addend per rank -> the sum, as torch.distributed's all-reduce rounds it ---


def _bind_sum_over_ranks(x: Tensor, group: str) -> Run:
    ranks = compared("sum_over_ranks", x, group, elements=x.numel())

    def run(x: Tensor) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        if ranks.size > 1 and out.numel():
            with collective("all-reduce", ranks, out):
                dist.all_reduce(out, group=ranks.process_group)
        return out

    return run


sum_over_ranks = Registered(
    "sum_over_ranks(Tensor x, str group) -> Tensor",
    bind=_bind_sum_over_ranks,
    fake=lambda x, group: x.new_empty(x.shape),
    backward=lambda ctx, call, needs, grad: (for_each_rank(grad, *call),),
)


# --- copy_to_ranks: x, the same on every rank -> x, with which every rank does something of its own ---


def for_each_rank(x: Tensor, group: str) -> Tensor:
    """Returns `copy_to_ranks(x, group)` while autograd records; else x itself, without a copy."""
    return copy_to_ranks(x, group) if torch.is_grad_enabled() else x


copy_to_ranks = Registered(
    "copy_to_ranks(Tensor x, str group) -> Tensor",
    bind=lambda x, group: lambda x: x.clone(memory_format=torch.contiguous_format),
    fake=lambda x, group: x.new_empty(x.shape),
    backward=lambda ctx, call, needs, grad: (sum_over_ranks(grad, *call),),
)
