"""Calls with a list along K, whose products are added: one launch and one exchange.

The gradient of x of a list of weights is such a call, by `all_to_all_gemm` or `gemm_reduce_scatter`
(`gradient_products.SumOfParts`). The kernel reads every matrix from its own memory; only those that TMA
cannot load are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...runtime.group import Group
from ...spec.sharding import Shards
from ...tuning.settings import late_weights, settings, within
from ..base import Problem
from ..op_call import CallOperands, Joined
from ..scales.product_types import ProductTypes
from ..scales.tma_operands import ROW_BYTES, aligned, major, of_one_major, padded
from .exchange_plans import plan_for as exchange_plan_for
from .exchange_plans import with_elements
from .extents import sizes
from .gather_calls import first_columns
from .launch_plan import Plan
from .plan_cache import plan_for


def bind(
    problem: Problem, operands: CallOperands, shards: Shards, group: Group
) -> Callable[..., tuple[Joined, list[Tensor]]] | Callable[..., Tensor]:
    """Returns the bound function of a list along K; the settings are those of the caller.

    Args:
        problem: Problem of the call.
        operands: Operands, of which x and the weight are lists.
        shards: Division of the rows.
        group: Ranks that take part.
    """
    if problem.spec.sums:
        return _bind_sum(problem, operands, shards, group)

    def run(operands: CallOperands) -> tuple[Joined, list[Tensor]]:
        return exchanged_sum(operands.x, operands.weight[0], shards, group, problem.keep)

    return within(settings(), run)


def _bind_sum(
    problem: Problem, operands: CallOperands, shards: Shards, group: Group
) -> Callable[..., Tensor]:
    """Returns the bound function of an op that sums over ranks; it launches the plan if nothing is copied.

    x has the local columns of all rows, `[M, K_i]`, and the weight the local `[N, K_i]`. A matrix without
    columns is replaced by zeros, so that all ranks have kernels of equally many.
    """
    extents = sizes(problem.spec, operands.x, operands.weight, shards, group)
    shape, _, (rows, columns) = extents

    def plan_of(a: Sequence[Tensor], b: Sequence[Tensor]) -> Plan:
        majors = major(a[0], "m"), major(b[0], "n")
        with late_weights():
            return plan_for(group, a[0].device, problem.types, shape, *majors, (), problem.k, parts=len(a))

    def launch(plan: Plan, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
        written, result = extents.made_by(plan)
        out = a[0].new_empty(written, columns)
        plan.launch(a, (b,), (out,), (None,))
        return out[result]

    def loaded(x: Joined, weight: Joined) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(of_one_major(x.parts, extents.shard)), tuple(of_one_major(weight.parts))

    if shape.rows == 0 or columns == 0:
        return lambda operands: operands.x.new_empty(rows, columns)
    a, b = loaded(operands.x, operands.weight)
    plan = plan_of(a, b)  # on all ranks now, whichever of them must copy
    passed = *operands.x.parts, *operands.weight.parts
    is_copied = any(one is not other for one, other in zip((*a, *b), passed, strict=True))

    def run(operands: CallOperands) -> Tensor:
        a, b = loaded(operands.x, operands.weight)
        return launch(plan_of(a, b), a, b)

    run = within(settings(), run)  # later calls use the settings of this one

    def run_as_planned(operands: CallOperands) -> Tensor:
        addresses, a, b = 0, operands.x.parts, operands.weight.parts
        for one in (*a, *b):
            addresses |= one.data_ptr()
        if addresses % ROW_BYTES or not plan.is_open:
            return run(operands)
        return launch(plan, a, b)

    return run if is_copied else run_as_planned


def exchanged_sum(
    x: Joined, weight: Joined, shards: Shards, group: Group, keep: bool
) -> tuple[Joined, list[Tensor]]:
    """Runs an all-to-all GEMM of a list along K on matrices of any strides and alignment. Collective.

    Args:
        x: Local columns of all rows, `[M, K_i / P]`.
        weight: Full weights `[N, K_i]`, the same on all ranks.
        shards: Division of the rows; each rank has some, or there are none.
        group: Ranks that take part, each of which must call.
        keep: Whether to return the exchanged matrices, which the kernel copies.

    Returns:
        The exchanged x `[shards.size(rank), K_i]` (without `keep` x itself), and a list of the sum of the
        products, `[shards.size(rank), N]`.
    """
    rows, columns = shards.size(group.rank), len(weight)
    if not shards.total:
        return x, [x.new_empty(0, columns)]
    local = tuple([aligned(one.contiguous()) for one in x.parts])
    depths = [one.shape[1] * group.size for one in local]
    read = [with_elements(one, depth) for one, depth in zip(weight.parts, depths, strict=True)]
    matrices = tuple(of_one_major(read))
    out, kept = x.new_empty(rows, padded(columns)), None
    if keep:
        kept = tuple([x.new_empty(rows, depth) for depth in depths])
    with late_weights():
        plan = exchange_plan_for(group, ProductTypes(x.dtype), local, matrices[:1], (), shards, keep)
    plan.launch(local, (matrices,), (out[:, :columns],), (None,), kept)
    if kept is not None:
        kept = tuple([one[:, : width * group.size] for one, width in zip(kept, x.widths, strict=True)])
    return x if kept is None else Joined(kept), [first_columns(out, columns, group)]
