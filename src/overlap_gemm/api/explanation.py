"""`explain`: the backend that a call would use, or the fused epilogues of a model, with reasons."""

import re
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..backends.base import Problem
from ..backends.op_call import CallOperands, OpCall
from ..backends.select import Choice, check_order, explained
from ..dispatch.autocast import autocast_call
from ..dispatch.epilogue_checks import why_not_invariant
from ..dispatch.lowering import lower
from ..epilogues import Applied
from ..runtime.group import GroupLike, group_name, resolve
from ..runtime.memory.workspace import workspace_limit
from ..spec import op_named
from .ahead import LayerOp
from .layer_epilogues import Fusion
from .registration import function_of

__all__ = ["explain"]


class Fusions(list[Fusion]):
    """Operations of a model's layers that may be epilogues, with reasons; its text is for printing.

    Attributes:
        symmetric_bytes: (module, op) -> bytes of workspaces that its calls need, if `max_rows` was passed.
        total_bytes: Bytes that all of them need: ops share workspaces.
        limit: Limit of all workspaces in bytes.

    Args:
        fusions: Operations of all layers.
        needs: Ops of the layers, with the bytes of each kind of workspace.
    """

    def __init__(self, fusions: Iterable[Fusion], needs: Iterable[tuple[LayerOp, dict[str, int]]]) -> None:
        super().__init__(fusions)
        self.symmetric_bytes: dict[tuple[str, str], int] = {}
        self.limit = workspace_limit()
        largest: dict[tuple[str, str], int] = {}
        for one, needed in needs:
            self.symmetric_bytes[one.module, one.op] = sum(needed.values())
            for kind, nbytes in needed.items():
                place = group_name(one.group), kind
                largest[place] = max(largest.get(place, 0), nbytes)
        self.total_bytes = sum(largest.values())

    def __str__(self) -> str:
        """Returns a line for each kind of layer, with `*` for layer numbers."""
        lines = [str(one) for one in self]
        for (module, op), nbytes in self.symmetric_bytes.items():
            lines.append(f"{module}: {op} needs {nbytes} bytes of symmetric memory{self._excess(nbytes)}")
        lines = list(dict.fromkeys(re.sub(r"\.\d+\b", ".*", line) for line in lines))
        if self.symmetric_bytes:
            total = self.total_bytes
            lines.append(f"all ops need {total} bytes of symmetric memory{self._excess(total)}")
        return "\n".join(lines)

    def _excess(self, nbytes: int) -> str:
        exceeds = nbytes > self.limit
        return f": more than the limit {self.limit} (OVERLAP_GEMM_WORKSPACE_LIMIT)" if exceeds else ""


@overload
def explain(op: nn.Module, *, max_rows: int | None = None) -> Fusions: ...


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
    max_rows: int | None = None,
    **options: Any,
) -> Any:
    """Returns the backend that `op(x, weight, ...)` would use, with the reasons.

    For a model it returns the operations of its layers that are epilogues of ops, with the reasons. It does
    not exchange lengths with the other ranks: shards are assumed equal unless the total extent is passed.
    `auto` communicates once per group, to exchange the facts about the ranks' GPUs.

    Args:
        op: An op or its name; or, as the only argument, a model with layers of `nn`, or a parallelized one.
        x: First operand of the op.
        weight: Weight of the op, or list of weights.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        scale_x: Scales of x, as for the op.
        scale_w: Scales of the weight, as for the op.
        epilogue: Epilogue of the call, with its inputs.
        max_rows: Maximum of M over all ranks, for a model: its ops' bytes of symmetric memory are computed,
            without allocation, and ops above the limit are named. 8-bit operands of 16-bit weights need less.
        **options: Other arguments of the op. Those that do not affect the choice are ignored.

    Returns:
        `Choice`, or `Fusions` for a model. The text of a `Choice` lists every backend with its reason.
        For a fused op and a list of weights it has the reason for several kernels.

    Raises:
        ValueError, TypeError: The op would raise for these arguments, or has no argument of such a name.
    """
    if isinstance(op, nn.Module):
        parts = [
            (name, part)
            for name, module in op.named_modules()
            for part in (module, vars(module).get("forward"))
        ]
        fusions = [one for name, part in parts if hasattr(part, "fusions") for one in part.fusions(name)]
        if max_rows is None:
            return Fusions(fusions, [])
        ops = [one for name, part in parts if hasattr(part, "layer_ops") for one in part.layer_ops(name)]
        return Fusions(fusions, [(one, one.symmetric_bytes(max_rows)) for one in ops])
    spec = op_named(op if isinstance(op, str) else getattr(op, "__name__", op))
    weights: list[Tensor] = list(weight) if isinstance(weight, (list, tuple)) else [weight]  # type: ignore[list-item]
    arguments = signature(function_of(spec.name)).parameters
    if unknown := options.keys() - arguments.keys() - set(OpCall._fields):
        raise TypeError(
            f"explain: {spec.name} has no argument {', '.join(sorted(unknown))}; "
            f"it has {', '.join(arguments)}"
        )
    known_options = {name: value for name, value in options.items() if name in OpCall._fields}
    if "m" not in (spec.x, spec.out):
        known_options.pop("dim", None)
    call = OpCall(**known_options).without_exchange(spec)
    operands = CallOperands(x, weights if spec.takes_lists else weights[0], None, scale_x, scale_w)
    operands, call = autocast_call(operands, call)
    x, (weights, _), name = operands.x, operands.lists(spec), group_name(group)
    lowered = lower(spec, name, operands, call)
    ranks = resolve(name)
    problem = Problem.of(spec.name, lowered.call.summed(spec, x.shape[-1], ranks.size), operands, ranks)
    if epilogue is not None:
        promised = problem.promises.invariant
        if why := why_not_invariant(spec.name, epilogue.epilogue, x.dtype, promised):
            raise ValueError(f"explain: invariant={promised!r} allows no {epilogue.epilogue.name}: {why}")
        dtypes = [one.dtype if isinstance(one, Tensor) else torch.float32 for one in epilogue.inputs]
        problem = problem.with_epilogue(epilogue.epilogue, dtypes)
    choice = explained(problem, call.backend, len(weights[0]))
    check_order(choice, operands)
    return choice
