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
from ..scales.tma_operands import ROW_BYTES, aligned, aligned_vector, has_tma_strides, major
from .plan_cache import bias_visitor, plan_for

Run = Callable[..., tuple[Tensor, list[Tensor]]]


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
    weights, biases = operands.lists(problem.spec)
    runs = [
        bind_one(problem, CallOperands(operands.x, weight, biases[i] if biases else None), shards, group)
        for i, weight in enumerate(weights)
    ]
    return _bind_each(runs, problem.applying is not None)


def _bind_each(runs: Sequence[Callable[..., Any]], has_epilogue: bool) -> Run:
    """Returns the bound function of a separate launch for each weight.

    Args:
        runs: Bound function of each weight.
        has_epilogue: Whether there is an epilogue, which has one weight; its inputs precede the scales.
    """

    def bias_of(biases: Sequence[Tensor], i: int) -> Tensor | None:
        return biases[i] if biases else None

    def run(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *scales: Any) -> Any:
        if has_epilogue:  # of one weight
            inputs, *vectors = scales
            vectors = [vectors[0], vectors[1][0]] if vectors else []
            return x, runs[0](x, weights[0], bias_of(biases, 0), inputs, *vectors)
        outs = []
        for i, (one, weight) in enumerate(zip(runs, weights, strict=True)):
            weight_scales = (scales[0], scales[1][i]) if scales else ()
            outs.append(one(x, weight, bias_of(biases, i), *weight_scales))
        return x, outs

    return run


def _bind_list(problem: Problem, operands: CallOperands, shards: Shards, group: Group) -> Run:
    """Returns the bound function of one launch for all weights; the arguments are those of `bind`."""
    x, (weights, biases) = operands.x, operands.lists(problem.spec)
    columns = [Shards.even(len(weight), group.size) for weight in weights]
    chunks = tuple(of.chunk for of in columns)
    total = sum(chunks)
    (pattern,) = patterns_of(problem.op)
    shape = ExchangeShape(shards.chunk, total * group.size, group.size, total, pattern, chunks)
    dtype, widths = problem.out_dtype or x.dtype, [of.size(group.rank) for of in columns]
    epilogue = bias_visitor(bool(biases), dtype, problem.spec)

    def plan_of(x: Tensor, weights: Sequence[Tensor]) -> Any:
        majors, kinds = (major(x, "m"), major(weights[0], "n")), (problem.out_dtype, None, weights[0].dtype)
        return plan_for(group, x.device, x.dtype, shape, *majors, epilogue, problem.k, *kinds)

    def launch(
        plan: Any, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: Sequence[Any]
    ) -> list[Tensor]:
        outs = tuple([x.new_empty(shards.total, width, dtype=dtype) for width in widths])
        extras: tuple[Tensor, ...] = ()
        if scales or biases:
            begins = shape.weight_begins(plan.products[0].config)
            if scales:
                of_x, of_weights = scales
                filled = [aligned_vector(one, len(w)) for one, w in zip(of_weights, weights, strict=True)]
                extras = aligned_vector(of_x, len(x)), by_owner(filled, columns, begins)
            if biases:
                extras += (by_owner(biases, columns, begins),)
        plan.launch(x, (tuple(weights),), (outs,), (extras or None,))
        return list(outs)

    def run(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *scales: Any
    ) -> tuple[Tensor, list[Tensor]]:
        if not shards.total:
            return x, [x.new_empty(0, width, dtype=dtype) for width in widths]
        a, matrices = aligned(x), [aligned(weight) for weight in weights]
        if len({major(weight, "n") for weight in matrices}) > 1:
            matrices = [aligned(weight.contiguous()) for weight in matrices]
        are_copies = any(one is not other for one, other in zip(matrices, weights, strict=True))
        with late_weights(are_copies):
            plan = plan_of(a, matrices)
        return x, launch(plan, a, matrices, biases, scales)

    run = within(settings(), run)  # later calls use the settings of this one
    majors = {major(weight, "n") for weight in weights}
    if not shards.total or len(majors) > 1 or not all(has_tma_strides(operand) for operand in (x, *weights)):
        return run
    plan = plan_of(x, weights)

    def run_as_planned(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *scales: Any
    ) -> tuple[Tensor, list[Tensor]]:
        addresses = x.data_ptr()
        for weight in weights:
            addresses |= weight.data_ptr()
        if addresses % ROW_BYTES or not plan.is_open:
            return run(x, weights, biases, *scales)
        return x, launch(plan, x, weights, biases, scales)

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
