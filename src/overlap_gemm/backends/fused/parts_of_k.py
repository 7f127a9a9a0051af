"""Calls of `all_to_all_gemm` with a list along K, whose products are added: one launch and one exchange.

The gradient of x of a list of weights is such a call (`gradient_products.SumOfExchanges`). The kernel reads
every matrix from its own memory; none is copied to join them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...runtime.group import Group
from ...spec.sharding import Shards
from ...tuning.settings import late_weights, settings, within
from ..op_call import Joined
from ..scales.tma_operands import aligned, major, padded
from .exchange_plans import plan_for
from .gather_calls import first_columns


def bind(shards: Shards, group: Group, keep: bool) -> Callable[..., tuple[Joined, list[Tensor]]]:
    """Returns the bound function of a list along K; the settings are those of the caller.

    Args:
        shards: Division of the rows; each rank has some.
        group: Ranks that take part, more than one.
        keep: Whether the function returns this rank's rows of every rank's columns.
    """

    def run(x: Joined, weights: Sequence[Joined], biases: Sequence[Tensor]) -> tuple[Joined, list[Tensor]]:
        return exchanged_sum(x, weights[0], shards, group, keep)

    return within(settings(), run)


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
    matrices = [aligned(one) for one in weight.parts]
    if len({major(one, "n") for one in matrices}) > 1:
        matrices = [aligned(one.contiguous()) for one in matrices]
    out, kept = x.new_empty(rows, padded(columns)), None
    if keep:
        kept = tuple([x.new_empty(rows, width * group.size) for width in x.widths])
    with late_weights():
        plan = plan_for(group, local, matrices[:1], (), shards, keep)
    plan.launch(local, (tuple(matrices),), (out[:, :columns],), (None,), kept)
    return x if kept is None else Joined(kept), [first_columns(out, columns, group)]
