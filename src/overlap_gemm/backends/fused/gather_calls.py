"""Calls of the fused all-gather GEMM: operands and outputs for the plans of `gather_plans`.

A bound function launches the plan directly if kernels can load all tensors as they are. Else
`all_gather_gemm` copies what must be aligned or padded. Outputs are new tensors, which the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...config.scale_blocks import Blocks
from ...config.visitors import Visitor
from ...epilogues import BLOCK, PAIR
from ...exchange.geometry import ExchangeShape
from ...runtime.group import Group
from ...spec.sharding import Shards
from ...tuning.settings import late_weights, settings, within
from ..base import Problem
from ..epilogues import new_scales, read_by_kernel, result_dtype
from ..op_call import CallOperands
from ..scales.block_scales import layout_of
from ..scales.block_scales import scales_of_shard as scales_of_blocks
from ..scales.scaling import scales_of_shard as scales_of_rows
from ..scales.tma_operands import (
    ROW_BYTES,
    ROW_ELEMENTS,
    aligned,
    aligned_vector,
    has_tma_strides,
    is_weight_pair,
    major,
    padded,
    weight_pair,
)
from . import plan_cache as plans
from .gather_plans import plan_for
from .launch_plan import Plan, Weight
from .list_calls import why_each
from .plan_cache import bias_visitor


def bind(
    problem: Problem, operands: CallOperands, shards: Shards, group: Group
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the bound function of an all-gather GEMM (`Backend.bind`).

    Collective at the first call of a signature.
    """
    x, (weights, biases) = operands.x, operands.lists(problem.spec)
    keep, out_dtype, blocks, applying = problem.keep, problem.out_dtype, problem.blocks, problem.applying
    rows, depth = shards.total, x.shape[1]
    columns = [len(weight) for weight in weights]
    at_once = applying is None and why_each(problem) is None
    if applying is not None:
        visitor = replace(applying.visitor, of_two_weights=len(weights) == 2)

        def run_with_epilogue(
            x: Tensor,
            weights: Sequence[Tensor],
            biases: Sequence[Tensor],
            inputs: Sequence[Tensor],
            *scales: Any,
        ) -> tuple[Tensor, list[Tensor]]:
            common = x, weights, biases, shards, group, keep
            if visitor.of_two_weights:
                return all_gather_pairs(*common, visitor, inputs, scales, out_dtype)
            return all_gather_gemm(*common, scales, out_dtype, blocks, (visitor, inputs))

        run_with_epilogue = within(settings(), run_with_epilogue)  # later calls use the settings of this one
        fits = rows and len(x) and x.is_contiguous() and padded(depth, x.itemsize) == depth
        fits = fits and not biases and all(has_tma_strides(weight) for weight in weights)
        fits = fits and visitor.of_two_weights and out_dtype is None and not visitor.writes
        if group.size == 1 or not fits or not is_weight_pair(*weights):
            return run_with_epilogue
        of_pair = plan_for(group, x, depth, (tuple(weights),), (visitor,), shards, keep)
        dtype = result_dtype(visitor.epilogue, x.dtype)

        def run_pair_as_planned(
            x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], inputs: Sequence[Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            if any_misaligned(x, *weights) or not is_weight_pair(*weights) or not of_pair.is_open:
                return run_with_epilogue(x, weights, biases, inputs)
            out = x.new_empty(rows, columns[0], dtype=dtype)
            kept = x.new_empty(rows, depth) if keep else None
            read = read_by_kernel(visitor, inputs, rows, columns[0])
            of_pair.launch(x, (tuple(weights),), (out,), (read or None,), kept)
            return x if kept is None else kept, [out]

        return run_pair_as_planned

    def run(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *scales: Any
    ) -> tuple[Tensor, list[Tensor]]:
        how = out_dtype, blocks, None, at_once
        return all_gather_gemm(x, weights, biases, shards, group, keep, scales, *how)

    run = within(settings(), run)  # later calls use the settings of this one
    is_unpadded = all(n and n % ROW_ELEMENTS == 0 for n in columns) and padded(depth, x.itemsize) == depth
    strided = x.is_contiguous() and all(has_tma_strides(weight) for weight in weights)
    if group.size == 1 or not (rows and len(x) and is_unpadded and strided):
        return run
    if any(bias.stride(0) != 1 for bias in biases):
        return run
    if at_once and len({major(weight, "n") for weight in weights}) > 1:
        return run
    if out_dtype is not None:
        return _bind_scaled(run, x, weights, biases, shards, group, keep, out_dtype, blocks, at_once)
    visitors = bias_visitor(bool(biases), x.dtype)
    plan = plan_for(group, x, depth, weights, visitors, shards, keep, at_once=at_once)
    return planned(plan, run, rows, columns, depth if keep else None)


def planned(
    plan: Plan,
    run: Callable[..., tuple[Tensor, list[Tensor]]],
    rows: int,
    columns: Sequence[int],
    depth: int | None,
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the bound function of calls without scales and epilogue whose tensors need no copies.

    Args:
        plan: Plan of the call.
        run: Function for a call with addresses that are no multiples of 16 bytes, or with a closed plan.
        rows: Rows of the results.
        columns: Columns of each result.
        depth: K of the sent operand, `[rows, K]`, that the kernel stores; None: x itself is returned.
    """
    without: list[tuple[Tensor, ...] | None] = [None] * len(columns)
    launch = joint_launch(plan, len(columns))

    def run_as_planned(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        if any_misaligned(x, *weights, *biases) or not plan.is_open:
            return run(x, weights, biases)
        outs = [x.new_empty(rows, n) for n in columns]
        kept = None if depth is None else x.new_empty(rows, depth)
        (launch or plan.launch)(x, weights, outs, [(bias,) for bias in biases] or without, kept)
        return x if kept is None else kept, outs

    return run_as_planned


def joint_launch(plan: Plan, number: int) -> Callable[..., None] | None:
    """Returns the function that launches one product of `number` weights; None if each weight has one.

    Its arguments are those of `Plan.launch`. The scales of rows of x are the first of each weight's operands.
    All others are joined: those of a weight begin with its first tile.
    """
    if len(plan.products) == number:
        return None
    (product,) = plan.products
    wide, of_x = product.config.cluster_tile[1], int(product.config.visits_rows)

    def launch(
        x: Tensor,
        weights: Sequence[Weight],
        outs: Sequence[Tensor],
        extras: Sequence[tuple[Tensor, ...] | None],
        kept: Tensor | None,
    ) -> None:
        first, read = extras[0], None
        if first is not None:
            joined = [_at_tiles(vectors, wide) for vectors in list(zip(*extras, strict=True))[of_x:]]
            read = (*first[:of_x], *joined)
        plan.launch(x, (tuple(weights),), (tuple(outs),), (read,), kept)

    return launch


def _at_tiles(vectors: Sequence[Tensor], wide: int) -> Tensor:
    """Returns vectors one after the other, each from a multiple of `wide` elements on, zeros between."""
    return torch.cat([padded_vector(vector, -(-len(vector) // wide) * wide) for vector in vectors])


def _bind_scaled(
    run: Callable[..., tuple[Tensor, list[Tensor]]],
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    shards: Shards,
    group: Group,
    keep: bool,
    out_dtype: torch.dtype,
    blocks: Blocks | None,
    at_once: bool,
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the bound function of operands with scales; `run` is the function of calls that need copies.

    The other arguments are those of `bind`.
    """
    (local_rows, depth), columns = x.shape, [weight.shape[0] for weight in weights]
    rows, chunk, layout = shards.total, shards.chunk, layout_of(blocks) if blocks else None
    epilogue = bias_visitor(bool(biases), out_dtype)
    plan = plan_for(group, x, depth, weights, epilogue, shards, keep, out_dtype, blocks, at_once)
    launch = joint_launch(plan, len(columns))

    def read_with(scale_x: Tensor, scales: Sequence[Tensor]) -> list[tuple[Tensor, ...]] | None:
        """Returns the scales of x and of the weight for each product; None if a weight's need a copy."""
        if blocks is not None and layout is not None:
            of_x = scales_of_blocks(scale_x, blocks, chunk, depth)
            return [(of_x, layout.of_b(scale, (n, depth))) for scale, n in zip(scales, columns, strict=True)]
        for scale, n in zip(scales, columns, strict=True):
            if scale.shape[0] != n or scale.stride(0) != 1 or scale.data_ptr() % ROW_BYTES:
                return None
        of_x = scales_of_rows(scale_x, local_rows)
        return [(of_x, scale) for scale in scales]

    def run_as_planned(
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        scale_x: Tensor,
        scales: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        extras = None
        if plan.is_open and not any_misaligned(x, *weights, *biases):
            extras = read_with(scale_x, scales)
        if extras is None:
            return run(x, weights, biases, scale_x, scales)
        if biases:
            extras = [(*read, bias) for read, bias in zip(extras, biases, strict=True)]
        outs = [x.new_empty(rows, n, dtype=out_dtype) for n in columns]
        kept = x.new_empty(rows, depth) if keep else None
        (launch or plan.launch)(x, weights, outs, extras, kept)
        return x if kept is None else kept, outs

    return run_as_planned


def any_misaligned(*tensors: Tensor) -> bool:
    """Returns whether the address of a tensor is no multiple of 16 bytes, the unit of TMA."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % ROW_BYTES != 0


def all_gather_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    shards: Shards,
    group: Group,
    keep: bool,
    scales: Sequence[Any] = (),
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
    epilogue: tuple[Visitor, Sequence[Tensor]] | None = None,
    at_once: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Runs an all-gather GEMM on tensors of any strides, alignment and extents. Collective.

    Copies are padded: K to 16 bytes, N to 8 columns. A rank without rows sends nothing, and one without
    columns multiplies zeros: its peers wait for its signals.

    Args:
        x: Local shard `[shards.size(rank), K]`.
        weights: Local weights `[N_i, K]`.
        biases: One `[N_i]` for each weight, or none.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        keep: Whether to return the gathered x, which the kernel copies: M x K elements.
        scales: Scales of x and a list of those of the weights (`scaling`); empty without scales. Those of x
            are sent with its rows.
        out_dtype: Dtype of the results if there are scales; else None.
        blocks: Blocks that share a scale; None: rows, or no scales.
        epilogue: Epilogue that the kernel applies after the bias, and its inputs; or None.
        at_once: Whether the weights are one product (`list_calls.why_each`).

    Returns:
        The gathered x `[M, K]` (without `keep`, and in a group of one, x itself), and the products `[M,
        N_i]`. An epilogue of pairs of columns halves N_i.
    """
    rows, depth, alone, dtype = shards.total, x.shape[1], group.size == 1, out_dtype or x.dtype
    visitor, inputs = epilogue or (None, ())
    columns_of = 2 if visitor is not None and visitor.epilogue.pairs else 1  # columns for a result's column
    of_result = result_dtype(visitor.epilogue if visitor else None, dtype)
    has_scales = visitor is not None and visitor.epilogue.block
    local_widths = [len(weight) // columns_of for weight in weights]
    if rows == 0:
        results = [x.new_empty(0, width, dtype=of_result) for width in local_widths]
        return x, [*results, *(new_scales(x, 0, width)[1] for width in local_widths if has_scales)]
    # A rank without columns launches, too: its peers wait for its signals.
    used = [weight if len(weight) else weight.new_zeros(2 * PAIR, depth) for weight in weights]
    operands, widths = [aligned(weight) for weight in used], [len(weight) // columns_of for weight in used]
    if at_once and len({major(weight, "n") for weight in operands}) > 1:
        operands = [aligned(weight.contiguous()) for weight in operands]
    outs = [x.new_empty(rows, padded(width, of_result.itemsize), dtype=of_result) for width in widths]
    shard = _shard(x, alone)
    vectors: list[tuple[Tensor, ...]] = [()] * len(used)
    if blocks:
        layout = layout_of(blocks)
        if alone:
            of_x = layout.of_a(scales[0], x.shape)
        else:
            of_x = scales_of_blocks(scales[0], blocks, shards.chunk, shard.shape[1])
        each = zip(scales[1], weights, strict=True)
        vectors = [(of_x, layout.of_b(scale, weight.shape)) for scale, weight in each]
    elif scales:
        by_row = aligned_vector(scales[0], len(x)) if alone else scales_of_rows(scales[0], len(x))
        vectors = [(by_row, column) for column in _columns(used, scales[1])]
    if biases:
        of_weights = zip(biases, used, strict=True)
        padded_biases = [padded_vector(bias, padded(len(weight))) for bias, weight in of_weights]
        vectors = [(*read, bias) for read, bias in zip(vectors, padded_biases, strict=True)]
    visitors = bias_visitor(bool(biases), dtype)
    if visitor is not None:
        visitors += (visitor,)
        pairs = zip(vectors, widths, strict=True)
        vectors = [(*read, *read_by_kernel(visitor, inputs, rows, width)) for read, width in pairs]
    of_blocks = [new_scales(x, rows, width) for width in widths if has_scales]
    if has_scales:
        vectors = [(*read, stored) for read, (stored, _) in zip(vectors, of_blocks, strict=True)]
    extras = [read or None for read in vectors]
    narrowed = [out[:, :width] for out, width in zip(outs, widths, strict=True)]
    kept = None
    with late_weights(any(operand is not weight for operand, weight in zip(operands, weights, strict=True))):
        if alone:
            for weight, out, read in zip(operands, narrowed, extras, strict=True):
                shape = ExchangeShape.even(rows, len(weight), 1)
                majors = "k", major(weight, "n")
                arguments, how = (group, x.device, x.dtype, shape), (out_dtype, blocks, weight.dtype)
                plain = plans.plan_for(*arguments, *majors, visitors, depth, *how)
                plain.launch(shard, (weight,), (out,), (read,))
        else:
            kept = shard.new_empty(rows, shard.stride(0)) if keep else None
            how = out_dtype, blocks, at_once
            plan = plan_for(group, x, shard.shape[1], operands, visitors, shards, keep, *how)
            launch = joint_launch(plan, len(used)) or plan.launch
            launch(shard, operands, narrowed, extras, kept)
    results = [first_columns(out, width, group) for out, width in zip(outs, local_widths, strict=True)]
    if has_scales:
        pairs = zip(of_blocks, local_widths, strict=True)
        results += [returned[:, : width // BLOCK] for (_, returned), width in pairs]
    return x if kept is None else first_columns(kept, depth, group), results


def all_gather_pairs(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    shards: Shards,
    group: Group,
    keep: bool,
    visitor: Visitor,
    inputs: Sequence[Tensor],
    scales: Sequence[Any] = (),
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Runs `all_gather_gemm` with two weights and an epilogue of pairs, as one product. Collective.

    The kernel reads both weights as one operand B: `PAIR` rows of one, `PAIR` rows of the other, and so on.
    The weight at the lower address is first.

    Args:
        x: Local shard `[shards.size(rank), K]`.
        weights: Two weights `[N, K]`; N is a multiple of `PAIR`.
        biases: One `[N]` for each weight, or none.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        keep: Whether to return the gathered x.
        visitor: Epilogue of the pairs.
        inputs: Inputs of the epilogue.
        scales: Scales of rows, of x and a list of those of the weights; empty without scales.
        out_dtype: Dtype of the results without the epilogue if there are scales; else None.

    Returns:
        The gathered x (without `keep`, and in a group of one, x itself), and a list of the result `[M, N]`.
    """
    rows, depth, width, of_bias = shards.total, x.shape[1], len(weights[0]), out_dtype or x.dtype
    dtype = result_dtype(visitor.epilogue, of_bias)
    stored, more = [], []
    if visitor.epilogue.block:
        stored, more = ([one] for one in new_scales(x, rows, width))
    if rows == 0:
        return x, [x.new_empty(0, width, dtype=dtype), *more]
    alone, pair = group.size == 1, weight_pair(*weights)
    shard = _shard(x, alone)
    out, visitors = x.new_empty(rows, width, dtype=dtype), (*bias_visitor(bool(biases), of_bias), visitor)
    # Vectors are in the order of the bands of B: first the weight at the lower address.
    order = (0, 1) if pair[0].data_ptr() < pair[1].data_ptr() else (1, 0)

    def by_bands(vectors: Sequence[Tensor]) -> Tensor:
        bands = [aligned_vector(vectors[i], width).unflatten(0, (-1, PAIR)) for i in order]
        return torch.stack(bands, 1).flatten()

    read: tuple[Tensor, ...] = ()
    if scales:
        read = ((aligned_vector if alone else scales_of_rows)(scales[0], len(x)), by_bands(scales[1]))
    if biases:
        read += (by_bands(biases),)
    read += (*read_by_kernel(visitor, inputs, rows, width), *stored)
    kept = None
    with late_weights(any(one is not weight for one, weight in zip(pair, weights, strict=True))):
        if alone:
            shape = ExchangeShape.even(rows, 2 * width, 1)
            arguments = group, x.device, x.dtype, shape, "k", "k", visitors, depth
            plain = plans.plan_for(*arguments, out_dtype, None, weights[0].dtype)
            plain.launch(shard, (pair,), (out,), (read or None,))
        else:
            kept = shard.new_empty(rows, shard.stride(0)) if keep else None
            plan = plan_for(group, x, shard.shape[1], (pair,), visitors, shards, keep, out_dtype)
            plan.launch(shard, (pair,), (out,), (read or None,), kept)
    return x if kept is None else first_columns(kept, depth, group), [out, *more]


def _shard(x: Tensor, alone: bool) -> Tensor:
    """Returns the local shard as TMA loads it; if there are peers, an empty one as a row of zeros."""
    return aligned(x.contiguous()) if alone or len(x) else x.new_zeros(1, padded(x.shape[1], x.itemsize))


def _columns(weights: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Tensor]:
    """Returns the scales of each weight's rows, padded with zeros to a multiple of 8."""
    columns = [
        aligned_vector(scale if len(scale) else scale.new_zeros(1), len(weight))
        for scale, weight in zip(scales, weights, strict=True)
    ]
    return [padded_vector(column, padded(len(column))) for column in columns]


def first_columns(matrix: Tensor, columns: int, group: Group) -> Tensor:
    """Returns the first columns of a result, contiguous; for a virtual rank a view.

    A virtual rank's kernels run later, so its result cannot be copied yet.
    """
    first = matrix[:, :columns]
    return first if group.is_virtual else first.contiguous()


def padded_vector(vector: Tensor, size: int) -> Tensor:
    """Returns `vector` as epilogues load it, with zeros up to `size` elements; unchanged if possible."""
    if len(vector) == size:
        return aligned_vector(vector, size)
    padded = vector.new_zeros(size)
    padded[: len(vector)] = vector
    return padded
