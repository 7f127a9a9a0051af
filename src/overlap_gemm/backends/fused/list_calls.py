"""Calls of `gemm_all_to_all` with a list of weights: one kernel for the list, or one for each weight.

One kernel multiplies and exchanges all of a list, as a shard of each owner's columns of every weight
(`kernel.work.WeightColumns`). `why_each` has the calls for which a kernel is launched for each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.rules import MOST_WEIGHTS
from ...exchange.geometry import ExchangeShape
from ...runtime.group import Group
from ...spec import PATTERNS, patterns_of
from ...spec.sharding import Shards
from ...tuning.settings import late_weights, settings, within
from ..base import Problem
from ..op_call import CallOperands
from ..scales.tma_operands import ROW_BYTES, aligned, aligned_vector, has_tma_strides, major, of_one_major
from .plan_cache import bias_visitor, plan_for

Run = Callable[[CallOperands], tuple[Tensor, list[Tensor]]]


def why_each(problem: Problem) -> str | None:
    """Returns the reason a list has a kernel for each weight; None if one kernel multiplies all of them."""
    if problem.num_weights == 1:
        return "there is one weight"
    patterns = patterns_of(problem.op)
    if not all(PATTERNS[name].takes_lists for name in patterns):
        return f"kernels of {problem.op} multiply one weight"
    if problem.num_weights > MOST_WEIGHTS:
        return f"a kernel multiplies at most {MOST_WEIGHTS} weights"
    if problem.world_size == 1:
        return "a group of one exchanges nothing"
    if problem.blocks:
        return "kernels of several weights have no scales of blocks"
    if not all(problem.widths):
        return "a weight has no rows"
    if len(set(problem.weight_dtypes)) > 1:
        return "weights have several dtypes"
    return None


def bind(
    problem: Problem,
    operands: CallOperands,
    shards: Shards,
    group: Group,
    bind_one: Callable[..., Callable[..., Any]],
) -> Run:
    """Returns the bound function of a list: one launch, or one for each weight (`why_each`).

    Collective at the first call of a signature.

    Args:
        problem: Problem of the call.
        operands: Local rows, and weights and biases that are the same on all ranks.
        shards: Division of the rows.
        group: Ranks that take part.
        bind_one: Binds the op for one weight and its bias, with the other arguments of this function.
    """
    if problem.applying is None and why_each(problem) is None:
        return _bind_list(problem, operands, shards, group)
    each = of_each_weight(operands)
    runs = [bind_one(problem, one, shards, group) for one in each]

    def run(operands: CallOperands) -> Any:
        each = of_each_weight(operands)
        if problem.applying is not None:  # of one weight
            return operands.x, runs[0](each[0])
        return operands.x, [run(one) for run, one in zip(runs, each, strict=True)]

    return run


def of_each_weight(operands: CallOperands) -> list[CallOperands]:
    """Returns the operands of a product with each weight of a list."""
    x, weights, biases, scale_x, scales_w, inputs = operands
    nothing = [None] * len(weights)
    each = zip(weights, biases or nothing, scales_w or nothing, strict=True)
    return [CallOperands(x, weight, bias, scale_x, scale_w, inputs) for weight, bias, scale_w in each]


def _bind_list(problem: Problem, operands: CallOperands, shards: Shards, group: Group) -> Run:
    """Returns the bound function of one launch for all weights; the arguments are those of `bind`."""
    x, (weights, biases) = operands.x, operands.lists(problem.spec)
    columns = [Shards.even(len(weight), group.size) for weight in weights]
    chunks = tuple(of.chunk for of in columns)
    total = sum(chunks)
    (pattern,) = patterns_of(problem.op)
    shape = ExchangeShape(shards.chunk, total * group.size, group.size, total, pattern, chunks)
    types, widths = problem.types, [of.size(group.rank) for of in columns]
    dtype = types.result
    epilogue = bias_visitor(bool(biases), dtype, problem.spec)

    def plan_of(x: Tensor, weights: Sequence[Tensor]) -> Any:
        majors = major(x, "m"), major(weights[0], "n")
        return plan_for(group, x.device, types, shape, *majors, epilogue, problem.k)

    def launch(plan: Any, x: Tensor, weights: Sequence[Tensor], operands: CallOperands) -> list[Tensor]:
        _, _, biases, of_x, of_weights, _ = operands
        outs = tuple([x.new_empty(shards.total, width, dtype=dtype) for width in widths])
        extras: tuple[Tensor, ...] = ()
        if biases or of_x is not None:
            begins = shape.weight_begins(plan.products[0].config)
            if of_x is not None:
                filled = [aligned_vector(one, len(w)) for one, w in zip(of_weights, weights, strict=True)]
                extras = aligned_vector(of_x, len(x)), by_owner(filled, columns, begins)
            if biases:
                extras += (by_owner(biases, columns, begins),)
        plan.launch(x, (tuple(weights),), (outs,), (extras or None,))
        return list(outs)

    def run(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        x, weights, *_ = operands
        if not shards.total:
            return x, [x.new_empty(0, width, dtype=dtype) for width in widths]
        a, matrices = aligned(x), of_one_major(weights)
        are_copies = any(one is not other for one, other in zip(matrices, weights, strict=True))
        with late_weights(are_copies):
            plan = plan_of(a, matrices)
        return x, launch(plan, a, matrices, operands)

    run = within(settings(), run)  # later calls use the settings of this one
    majors = {major(weight, "n") for weight in weights}
    if not shards.total or len(majors) > 1 or not all(has_tma_strides(operand) for operand in (x, *weights)):
        return run
    plan = plan_of(x, weights)

    def run_as_planned(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        x, weights, *_ = operands
        addresses = x.data_ptr()
        for weight in weights:
            addresses |= weight.data_ptr()
        if addresses % ROW_BYTES or not plan.is_open:
            return run(operands)
        return x, launch(plan, x, weights, operands)

    return run_as_planned


def by_owner(vectors: Sequence[Tensor], columns: Sequence[Shards], begins: Sequence[int]) -> Tensor:
    """Returns a value for each column of a kernel of several weights: owner after owner, with zeros between.

    Args:
        vectors: Values of the columns of each weight.
        columns: Division of the columns of each weight.
        begins: First column of each weight in an owner's shard, and the end (`ExchangeShape.weight_begins`).
    """
    parts, ends = [], begins[1:]
    for vector, of, begin, end in zip(vectors, columns, begins, ends, strict=False):
        by_rank = _filled(vector, of.chunk * of.parts).view(of.parts, of.chunk)
        parts.append(_filled(by_rank, end - begin))
    return torch.cat(parts, 1).view(-1)


def _filled(values: Tensor, size: int) -> Tensor:
    """Returns the values with zeros up to `size` in the last dimension; unchanged if there is none to add."""
    missing = size - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values
