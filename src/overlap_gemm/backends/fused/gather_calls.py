"""Calls of the fused all-gather GEMM: operands and outputs for the plans of `gather_plans`.

A bound function launches the plan directly if kernels can load all tensors as they are. Else
`all_gather_gemm` copies what must be aligned or padded. Outputs are new tensors, which the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...config.visitors import Visitor
from ...epilogues import BLOCK, PAIR
from ...exchange.geometry import ExchangeShape
from ...runtime.group import Group
from ...spec.sharding import Shards
from ...tuning.settings import late_weights, settings, within
from ..base import Problem
from ..epilogues import read_by_kernel, result_dtype
from ..op_call import CallOperands
from ..scales.product_types import ProductTypes
from ..scales.result_blocks import new_scales
from ..scales.scale_layouts import ScaleLayout
from ..scales.tma_operands import (
    ROW_BYTES,
    ROW_ELEMENTS,
    aligned,
    aligned_vector,
    has_tma_strides,
    is_weight_pair,
    major,
    of_one_major,
    padded,
    weight_pair,
    widened,
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
    (x, weights, *_), biases = operands, operands.bias or ()
    types, keep, applying = problem.types, problem.keep, problem.applying
    rows, depth = shards.total, x.shape[1]
    columns = [len(weight) for weight in weights]
    at_once = applying is None and why_each(problem) is None
    if applying is not None:
        visitor = replace(applying.visitor, of_two_weights=len(weights) == 2)

        def run_with_epilogue(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
            gemm = all_gather_pairs if visitor.of_two_weights else all_gather_gemm
            return gemm(types, operands, shards, group, keep, visitor)

        run_with_epilogue = within(settings(), run_with_epilogue)  # later calls use the settings of this one
        fits = rows and len(x) and x.is_contiguous() and padded(depth, x.itemsize) == depth
        fits = fits and not biases and all(has_tma_strides(one) for one in (x, *weights))
        fits = fits and visitor.of_two_weights and types.scales is None and not visitor.writes
        if group.size == 1 or not fits or not is_weight_pair(*weights):
            return run_with_epilogue
        of_pair = plan_for(group, types, x.device, depth, (tuple(weights),), (visitor,), shards, keep)
        dtype = result_dtype(visitor.epilogue, x.dtype)

        def run_pair_as_planned(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
            x, weights, *_ = operands
            if any_misaligned(x, *weights) or not is_weight_pair(*weights) or not of_pair.is_open:
                return run_with_epilogue(operands)
            out = x.new_empty(rows, columns[0], dtype=dtype)
            kept = x.new_empty(rows, depth) if keep else None
            read = read_by_kernel(visitor, operands.inputs, rows, columns[0])
            of_pair.launch(x, (tuple(weights),), (out,), (read or None,), kept)
            return x if kept is None else kept, [out]

        return run_pair_as_planned

    def run(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        return all_gather_gemm(types, operands, shards, group, keep, at_once=at_once)

    run = within(settings(), run)  # later calls use the settings of this one
    is_unpadded = all(n and n % ROW_ELEMENTS == 0 for n in columns) and padded(depth, x.itemsize) == depth
    strided = x.is_contiguous() and all(has_tma_strides(one) for one in (x, *weights))
    if group.size == 1 or not (rows and len(x) and is_unpadded and strided):
        return run
    if any(bias.stride(0) != 1 for bias in biases):
        return run
    if at_once and len({major(weight, "n") for weight in weights}) > 1:
        return run
    visitors = bias_visitor(bool(biases), types.result)
    plan = plan_for(group, types, x.device, depth, weights, visitors, shards, keep, at_once)
    if types.scales is not None:
        return _planned_with_scales(plan, run, types.scales, types.result, x.shape, shards, columns, keep)
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

    def run_as_planned(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        x, weights, biases, *_ = operands
        if any_misaligned(x, *weights, *(biases or ())) or not plan.is_open:
            return run(operands)
        outs = [x.new_empty(rows, n) for n in columns]
        kept = None if depth is None else x.new_empty(rows, depth)
        extras = [(bias,) for bias in biases] if biases else without
        (launch or plan.launch)(x, weights, outs, extras, kept)
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


def _planned_with_scales(
    plan: Plan,
    run: Callable[..., tuple[Tensor, list[Tensor]]],
    layout: ScaleLayout,
    dtype: torch.dtype,
    shape: Sequence[int],
    shards: Shards,
    columns: Sequence[int],
    keep: bool,
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the bound function of operands with scales whose tensors need no copies.

    Args:
        plan: Plan of the call.
        run: Function for a call with addresses that are no multiples of 16 bytes, or with a closed plan.
        layout: Layout of the scales.
        dtype: Dtype of the results.
        shape: Shape of the local x.
        shards: Division of the rows.
        columns: Columns of each result.
        keep: Whether the kernel stores the gathered x.
    """
    rows, (local_rows, depth) = shards.total, shape
    sent, of_weights = layout.rows_sent(local_rows, shards.chunk), [(n, depth) for n in columns]
    launch = joint_launch(plan, len(columns))

    def run_as_planned(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        x, weights, biases, scale_x, scales_w, _ = operands
        if any_misaligned(x, *weights, *(biases or ())) or not plan.is_open:
            return run(operands)
        of_x, each = layout.of_shard(scale_x, sent, depth), zip(scales_w, of_weights, strict=True)
        extras: list[tuple[Tensor, ...]] = [(of_x, layout.of_b(*of_weight)) for of_weight in each]
        if biases:
            extras = [(*read, bias) for read, bias in zip(extras, biases, strict=True)]
        outs = [x.new_empty(rows, n, dtype=dtype) for n in columns]
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
    types: ProductTypes,
    operands: CallOperands,
    shards: Shards,
    group: Group,
    keep: bool,
    visitor: Visitor | None = None,
    at_once: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Runs an all-gather GEMM on tensors of any strides, alignment and extents. Collective.

    Copies are padded: K to 16 bytes, N to 8 columns. A rank without rows sends nothing, and one without
    columns multiplies zeros: its peers wait for its signals.

    Args:
        types: Types of the product.
        operands: Local shard `[shards.size(rank), K]`, local weights `[N_i, K]` and biases. Scales of x are
            sent with its rows.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        keep: Whether to return the gathered x, which the kernel copies: M x K elements.
        visitor: Epilogue that the kernel applies after the bias, or None.
        at_once: Whether the weights are one product (`list_calls.why_each`).

    Returns:
        The gathered x `[M, K]` (without `keep`, and in a group of one, x itself), and the products `[M,
        N_i]`. An epilogue of pairs of columns halves N_i.
    """
    x, weights, biases, scale_x, scales_w, inputs = operands
    rows, depth, alone, dtype = shards.total, x.shape[1], group.size == 1, types.result
    columns_of = 2 if visitor is not None and visitor.epilogue.pairs else 1  # columns for a result's column
    of_result = result_dtype(visitor.epilogue if visitor else None, dtype)
    has_scales = visitor is not None and visitor.epilogue.block
    local_widths = [len(weight) // columns_of for weight in weights]
    if rows == 0:
        results = [x.new_empty(0, width, dtype=of_result) for width in local_widths]
        return x, [*results, *(new_scales(x, 0, width)[1] for width in local_widths if has_scales)]
    # A rank without columns launches, too: its peers wait for its signals.
    used = [weight if len(weight) else weight.new_zeros(2 * PAIR, depth) for weight in weights]
    loaded = of_one_major(used) if at_once else [aligned(weight) for weight in used]
    widths = [len(weight) // columns_of for weight in used]
    outs = [x.new_empty(rows, padded(width, of_result.itemsize), dtype=of_result) for width in widths]
    shard = _shard(x, alone)
    vectors: list[tuple[Tensor, ...]] = [()] * len(used)
    if (layout := types.scales) is not None:
        sent = layout.rows_sent(len(x), shards.chunk)
        of_x = layout.of_a(scale_x, x.shape) if alone else layout.of_shard(scale_x, sent, shard.shape[1])
        each = zip(scales_w, weights, used, strict=True)
        vectors = [(of_x, _of_columns(layout, *one)) for one in each]
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
    with late_weights(any(operand is not weight for operand, weight in zip(loaded, weights, strict=True))):
        if alone:
            for weight, out, read in zip(loaded, narrowed, extras, strict=True):
                shape = ExchangeShape.even(rows, len(weight), 1)
                majors = "k", major(weight, "n")
                of_weight = types._replace(weight=weight.dtype)
                plain = plans.plan_for(group, x.device, of_weight, shape, *majors, visitors, depth)
                plain.launch(shard, (weight,), (out,), (read,))
        else:
            kept = shard.new_empty(rows, shard.stride(0)) if keep else None
            arguments = loaded, visitors, shards, keep, at_once
            plan = plan_for(group, types, x.device, shard.shape[1], *arguments)
            launch = joint_launch(plan, len(used)) or plan.launch
            launch(shard, loaded, narrowed, extras, kept)
    results = [first_columns(out, width, group) for out, width in zip(outs, local_widths, strict=True)]
    if has_scales:
        pairs = zip(of_blocks, local_widths, strict=True)
        results += [returned[:, : width // BLOCK] for (_, returned), width in pairs]
    return x if kept is None else first_columns(kept, depth, group), results


def all_gather_pairs(
    types: ProductTypes, operands: CallOperands, shards: Shards, group: Group, keep: bool, visitor: Visitor
) -> tuple[Tensor, list[Tensor]]:
    """Runs `all_gather_gemm` with two weights and an epilogue of pairs, as one product. Collective.

    The kernel reads both weights as one operand B: `PAIR` rows of one, `PAIR` rows of the other, and so on.
    The weight at the lower address is first.

    Args:
        types: Types of the product; scales are of rows.
        operands: Local shard `[shards.size(rank), K]`, two weights `[N, K]`, with N a multiple of `PAIR`.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        keep: Whether to return the gathered x.
        visitor: Epilogue of the pairs.

    Returns:
        The gathered x (without `keep`, and in a group of one, x itself), and a list of the result `[M, N]`.
    """
    x, weights, biases, scale_x, scales_w, inputs = operands
    rows, depth, width, of_bias = shards.total, x.shape[1], len(weights[0]), types.result
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
    if (layout := types.scales) is not None:
        of_x = layout.of_a(scale_x, x.shape) if alone else layout.of_shard(scale_x, len(x), depth)
        read = of_x, by_bands(scales_w)
    if biases:
        read += (by_bands(biases),)
    read += (*read_by_kernel(visitor, inputs, rows, width), *stored)
    kept = None
    with late_weights(any(one is not weight for one, weight in zip(pair, weights, strict=True))):
        if alone:
            shape = ExchangeShape.even(rows, 2 * width, 1)
            of_weight = types._replace(weight=weights[0].dtype)
            plain = plans.plan_for(group, x.device, of_weight, shape, "k", "k", visitors, depth)
            plain.launch(shard, (pair,), (out,), (read or None,))
        else:
            kept = shard.new_empty(rows, shard.stride(0)) if keep else None
            plan = plan_for(group, types, x.device, shard.shape[1], (pair,), visitors, shards, keep)
            plan.launch(shard, (pair,), (out,), (read or None,), kept)
    return x if kept is None else first_columns(kept, depth, group), [out, *more]


def _shard(x: Tensor, alone: bool) -> Tensor:
    """Returns the local shard as it is sent, or if there are peers and it is empty, a row of zeros.

    It is row-major; its pitch and K are `padded`, also those of one row, whose pitch torch does not check.
    """
    width = padded(x.shape[1], x.itemsize)
    if not (alone or len(x)):
        return x.new_zeros(1, width)
    x = x.contiguous()
    is_sent = x.shape[1] == width and x.stride() == (width, 1) and not any_misaligned(x)
    return x if is_sent else widened(x)


def _of_columns(layout: ScaleLayout, scale: Tensor, weight: Tensor, used: Tensor) -> Tensor:
    """Returns the scales of a weight, vectors padded to a multiple of 8; `used` has rows if it has none."""
    if layout.is_in_shard:
        return layout.of_b(scale, weight.shape)
    column = layout.of_b(scale if len(scale) else scale.new_zeros(1), used.shape)
    return padded_vector(column, padded(len(column)))


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
