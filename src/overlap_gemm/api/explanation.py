"""`explain`: which backend a call would take, and why; what of a model's layers is an epilogue of an op."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..backends.base import Problem
from ..backends.op_call import OpCall
from ..backends.select import Choice, choose, with_backward
from ..dispatch.autocast import autocast
from ..dispatch.bound import with_scales
from ..dispatch.lowering import lower
from ..epilogues import Applied
from ..runtime.group import GroupLike, group_name, resolve
from ..spec import op_named
from .layer_epilogues import Fusion

__all__ = ["explain"]


class Fusions(list[Fusion]):
    """Operations of a model's layers that are epilogues of ops, and those that are not; print it."""

    def __str__(self) -> str:
        """Writes a line for each kind of layer, numbers of layers as `*`."""
        return "\n".join(dict.fromkeys(re.sub(r"\.\d+\b", ".*", str(one)) for one in self))


@overload
def explain(op: nn.Module) -> Fusions: ...


@overload
def explain(
    op: str | Callable[..., Any],
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | Sequence[Tensor] | None = None,
    epilogue: Applied | None = None,
    **options: Any,
) -> Choice: ...


def explain(
    op: str | Callable[..., Any] | nn.Module,
    x: Any = None,
    weight: Any = None,
    *,
    group: GroupLike = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | Sequence[Tensor] | None = None,
    epilogue: Applied | None = None,
    **options: Any,
) -> Any:
    """Which backend would carry out `op(x, weight, ...)`, and why; of a model, what epilogues its ops have.

    Asks the other ranks for no length: shards are equal, where the whole extent is not given. It communicates
    where `auto` finds out what the group's GPUs reach, once.

    Args:
        op: An op or its name; or a model, alone: with layers of `nn`, or parallelized.
        x: As for the op.
        weight: As for the op.
        group: As for the op.
        scale_x: As for the op.
        scale_w: As for the op.
        epilogue: Epilogue of the call, with its inputs.
        **options: The op's other arguments; those on which no choice depends are ignored.

    Returns:
        A `Choice`, or `Fusions`; print it.

    Raises:
        ValueError, TypeError: As the op.
    """
    if isinstance(op, nn.Module):
        parts = ((name, (module, vars(module).get("forward"))) for name, module in op.named_modules())
        each = ((name, part.fusions) for name, both in parts for part in both if hasattr(part, "fusions"))
        return Fusions(fusion for name, fusions in each for fusion in fusions(name))
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
    if scales:
        return choice
    return with_backward(choice if epilogue is None else _with_epilogue(choice, epilogue, weights))


def _with_epilogue(choice: Choice, applied: Applied, weights: Sequence[Tensor]) -> Choice:
    """Adds who applies an epilogue."""
    epilogue, inputs, _ = applied
    problem = replace(
        choice.problem,
        call=choice.problem.call._replace(epilogue=epilogue.key),
        input_dtypes=tuple([one.dtype if isinstance(one, Tensor) else torch.float32 for one in inputs]),
    )
    why = choice.backend.why_after(problem, weights[0])
    line = "in the kernel" if why is None else f"by torch after the op, {why}"
    return replace(choice, epilogue=f"{epilogue.name}: {line}")
