"""`explain`: which backend a call would take, and why."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import BackendName, Problem
from ..backends.scales.scaling import Block
from ..backends.select import Choice, choose, with_backward
from ..dispatch.autocast import autocast
from ..dispatch.bound import with_scales
from ..dispatch.lowering import LOWERINGS
from ..dispatch.options import CallOptions, Length, promises_of
from ..runtime.group import GroupLike, group_name, resolve
from ..spec import op_named
from ..spec.promises import Invariant, Partials

__all__ = ["explain"]


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
    scale_x: Tensor | None = None,
    scale_w: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    **_: Any,
) -> Choice:
    """Which backend would carry out `op(x, weight, ...)`, and why.

    Asks the other ranks for no length: shards are equal, where the whole extent is not given. It communicates
    where `auto` finds out what the group's GPUs reach, once.

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
        scale_x: As for the op.
        scale_w: As for the op.
        out_dtype: As for the op.
        block: As for the op.
        partials: As for the op.
        invariant: As for the op.
        **_: The op's other arguments, on which the choice does not depend.

    Returns:
        A `Choice`; print it.

    Raises:
        ValueError, TypeError: As the op.
    """
    spec = op_named(op if isinstance(op, str) else getattr(op, "__name__", op))
    weights: list[Tensor] = list(weight) if isinstance(weight, (list, tuple)) else [weight]  # type: ignore[list-item]
    ranks, several = group_name(group), spec.gathers_operand
    dim = dim if "m" in (spec.x, spec.out) else 0
    lengths = rows, columns, k
    options = CallOptions(
        backend, deterministic, None, dim, *lengths, out_dtype=out_dtype, block=block,
        partials=partials, invariant=invariant,
    )  # fmt: skip
    options = options.unasked(spec.name)
    options, scales = with_scales(options, scale_x, scale_w)
    if not scales:
        x, weights, _biases = autocast(x, weights, [])
    bare: Any = (weights, []) if several else (weights[0], None)
    lowered = LOWERINGS[spec.name](ranks, x, *bare, options, scales)
    scaled: tuple[Any, ...] = (None, None)
    if scales:
        scaled = weights[0].dtype, options.out_dtype, options.blocks
    extents = lowered.extents
    promises = promises_of(partials, invariant)
    if promises.has_tree and spec.sums:
        m, n, _k = extents
        extents = m, n, x.shape[-1] * resolve(ranks).size
    of_call = spec.name, *extents, x, resolve(ranks), deterministic, backend
    problem = Problem.of(*of_call, scaled=scaled, promises=promises)
    choice = choose(problem, backend)
    return choice if scales else with_backward(choice)
