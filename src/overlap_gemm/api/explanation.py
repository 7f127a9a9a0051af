"""`explain`: which backend a call would take, and why."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..backends.base import Problem
from ..backends.op_call import OpCall
from ..backends.select import Choice, choose, with_backward
from ..dispatch.autocast import autocast
from ..dispatch.bound import with_scales
from ..dispatch.lowering import lower
from ..runtime.group import GroupLike, group_name, resolve
from ..spec import op_named

__all__ = ["explain"]


def explain(
    op: str | Callable[..., Any],
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | Sequence[Tensor] | None = None,
    **options: Any,
) -> Choice:
    """Which backend would carry out `op(x, weight, ...)`, and why.

    Asks the other ranks for no length: shards are equal, where the whole extent is not given. It communicates
    where `auto` finds out what the group's GPUs reach, once.

    Args:
        op: An op or its name.
        x: As for the op.
        weight: As for the op.
        group: As for the op.
        scale_x: As for the op.
        scale_w: As for the op.
        **options: The op's other arguments; those on which no choice depends are ignored.

    Returns:
        A `Choice`; print it.

    Raises:
        ValueError, TypeError: As the op.
    """
    spec = op_named(op if isinstance(op, str) else getattr(op, "__name__", op))
    weights: list[Tensor] = list(weight) if isinstance(weight, (list, tuple)) else [weight]  # type: ignore[list-item]
    said = {name: value for name, value in options.items() if name in OpCall._fields}
    if "m" not in (spec.x, spec.out):
        said.pop("dim", None)
    call, scales = with_scales(OpCall(**said).unasked(spec), scale_x, scale_w)
    if not scales:
        x, weights, _biases = autocast(x, weights, [])
    lists, name = spec.takes_lists, group_name(group)
    lowered = lower(spec, name, x, weights if lists else weights[0], [] if lists else None, call, scales)
    ranks = resolve(name)
    problem = Problem.of(spec.name, lowered.call.summed(spec, x.shape[-1], ranks.size), x, ranks, weights)
    choice = choose(problem, call.backend)
    return choice if scales else with_backward(choice)
