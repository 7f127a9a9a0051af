"""Generic implementation of ops with a replicated weight: a product with a collective before or after it.

Portable backends use it for ops for which they have no method.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ..runtime.group import Group
from ..spec import Move, OpSpec
from ..spec.sharding import Shards
from .collectives import all_gather_rows, columns_to_rows, parts_to_rows, rows_to_columns
from .op_call import CallOperands, Joined
from .portable_arithmetic import Arithmetic
from .scales.scaling import Scaled


def run_by_collectives(
    spec: OpSpec, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
) -> tuple[Any, list[Tensor]]:
    """Runs an op by its definition (`spec.OpSpec`): communicates x or slices it, multiplies, communicates.

    Args:
        spec: Definition of the op.
        operands: Local x, contiguous; weights `[N_i, K]` and biases, the same on every rank.
        shards: Division of the rows.
        group: Ranks that take part, each of which must call.
        how: Arithmetic of the products.

    Returns:
        This rank's rows of x, and the results.
    """
    weights = operands.weight
    rows = _redistribute(operands.x, spec.operand_move, weights[0], shards, group)
    products = how.products(rows, weights, operands.bias)
    move = spec.result_move
    if move is None:
        return rows, products
    if move.kind == "all_to_all":
        return rows, rows_to_columns(products, shards, group)
    return rows, [all_gather_rows(product, shards, group) for product in products]


def _redistribute(x: Any, move: Move | None, weight: Any, shards: Shards, group: Group) -> Any:
    depth = weight.shape[1]
    if move is None:
        return x
    if isinstance(x, Joined):  # only an all-to-all has lists along K
        return Joined(tuple(parts_to_rows(x.parts, weight.widths, shards, group)))
    if move.kind == "all_to_all":
        exchange = partial(columns_to_rows, shards=shards, group=group)
        return x.exchanged(exchange, depth) if isinstance(x, Scaled) else exchange(x, depth)
    return x[slice(*shards.range(group.rank))]
