"""Entry of calls without an epilogue: `call_op` checks and binds a signature once, then looks it up."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.op_call import OpCall
from ..runtime import agree
from ..runtime.group import Group, GroupLike, find, group_name
from ..runtime.order import is_capturing
from ..spec import ARGUMENTS
from .autocast import autocast_call
from .calls import enter, is_plain, keep, layouts, needs_grad, state
from .lowering import Lowered, lower
from .operands import Scales
from .ops import NO_GRADIENT, GemmOp
from .registered import Bound


class _Prepared(NamedTuple):
    """Prepared call of one signature; calling it with tensors runs the op.

    Attributes:
        bound: Op bound to the signature.
        lowered: Lowered call, which reshapes operands and results.
    """

    bound: Bound
    lowered: Lowered

    def __call__(self, x: Tensor, weight: Any, bias: Any, *scales: Any) -> Any:
        bound, lowered = self
        if lowered.dim is not None:
            x = lowered.flatten(x)
        if scales:  # scales have no gradient
            result = bound.run(x, weight, bias, *lowered.vectors(*scales))
        else:
            run = bound.with_gradient if needs_grad(x, weight, bias) else bound.run
            result = run(x, weight, bias)
        return result if lowered.finish is None else lowered.result(result)


class _Exchanging(NamedTuple):
    """Prepared call of one signature with `rows="exchange"` or `columns="exchange"`.

    The ranks exchange their extents in every call, then the call with these extents is looked up or lowered.

    Attributes:
        op: Op to call.
        ranks: Group of the call.
        call: Options and extents of the caller.
        facts: (name, value) that the ranks compare when they exchange extents.
    """

    op: GemmOp
    ranks: Group
    call: OpCall
    facts: agree.Facts

    def __call__(self, x: Tensor, weight: Any, bias: Any, *scales: Any) -> Any:
        op, ranks, call, facts = self
        assert op.spec.unresolved_axis is not None
        length = x.shape[call.dim] if op.spec.unresolved_axis == "m" else weight.shape[0]
        extent = ARGUMENTS[op.spec.unresolved_axis]
        total = agree.total_length(op.name, extent, length, x.device, ranks, facts)
        return _run(op, ranks, x, weight, bias, call._replace(**{extent: total}), scales)  # type: ignore[arg-type]


def call_op(
    op: GemmOp,
    x: Tensor,
    weight: Any,
    bias: Any,
    group: GroupLike,
    call: OpCall,
    scale_x: Any = None,
    scale_w: Any = None,
) -> Any:
    """Calls an op: directly if only autograd observes it (`calls.is_plain`), else by torch's dispatcher.

    Under autocast operands are cast, except float64 and operands with scales.

    Args:
        op: Op to call.
        x: `[M, ..., K]`, as the caller passes it.
        weight: `[N, K]`; a list of weights if the op takes lists.
        bias: `[N]` or None; a list, which may be empty, if the op takes lists.
        group: Process group, device mesh, name of a group, or None for the default group.
        call: Options and extents of the caller.
        scale_x: Scales of x; None without scales.
        scale_w: Scales of the weight, or a list of them; None without scales.

    Returns:
        The op's result in the shape of the caller's x. An op that takes lists returns a list: the operand
        that was communicated, then a result for each weight.

    Raises:
        ValueError: Shapes, extents or options do not fit together, see `lowering.lower`.
        TypeError: A type, dtype, layout or device is not supported. Or operands have scales, and one of them
            requires a gradient: scales have none.
    """
    scales = () if scale_x is None and scale_w is None else (scale_x, scale_w)
    if is_plain(x, weight, bias, *scales):
        ranks = find(group)
        return enter(ranks, op.name, x, _run, op, ranks, x, weight, bias, call, scales)
    if not scales:
        x, weight, bias, call = autocast_call(x, weight, bias, call)
    lowered = lower(op.spec, group_name(group), x, weight, bias, call, scales)
    # AOTInductor turns an empty list of tensors into None on its way to an op.
    operands = lowered.operands(x, weight, None if isinstance(bias, list) and not bias else bias, scales)
    if scales:
        _refuse_gradient(op, x, weight, bias, *scales)
    else:
        operands = (*operands, None, None)
    return lowered.result(getattr(torch.ops.overlap_gemm, op.name)(*operands, *lowered.call))


def _run(op: GemmOp, ranks: Group, x: Tensor, weight: Any, bias: Any, call: OpCall, scales: Scales) -> Any:
    """Runs a call by its prepared form, which the group keeps by arguments, layouts and settings."""
    try:
        key = (op.name, layouts(x, weight, bias, *scales), call, state(x))
        prepared = ranks.calls.get(key)
    except (TypeError, RuntimeError):  # tensors without strides, unhashable arguments: `lower` names them
        _lower_without_exchange(op, ranks, x, weight, bias, call, scales)
        raise
    if prepared is None:
        prepared = keep(ranks, key, _prepare(op, ranks, x, weight, bias, call, scales))
    if scales:
        _refuse_gradient(op, x, weight, bias, *scales)
    return prepared(x, weight, bias, *scales)


def _refuse_gradient(op: GemmOp, *tensors: Any) -> None:
    """Raises TypeError if a gradient of operands with scales would be needed."""
    if needs_grad(*tensors):
        raise TypeError(f"{op.name}: {NO_GRADIENT}")


def _lower_without_exchange(
    op: GemmOp, ranks: Group, x: Tensor, weight: Any, bias: Any, call: OpCall, scales: Scales
) -> Lowered:
    """Returns the lowered call, checked before the ranks exchange its extent."""
    return lower(op.spec, ranks.name, x, weight, bias, call.without_exchange(op.spec), scales)


def _prepare(
    op: GemmOp, ranks: Group, x: Tensor, weight: Any, bias: Any, call: OpCall, scales: Scales
) -> _Prepared | _Exchanging:
    """Returns the prepared form of calls like this one; it may exchange lengths."""
    asks = (
        op.spec.unresolved_axis is not None
        and getattr(call, ARGUMENTS[op.spec.unresolved_axis]) == "exchange"
    )
    if asks and ranks.size > 1 and not is_capturing(x.device):
        facts = _lower_without_exchange(op, ranks, x, weight, bias, call, scales).facts
        return _Exchanging(op, ranks, call, facts)
    lowered = lower(op.spec, ranks.name, x, weight, bias, call, scales)
    operands = lowered.operands(x, weight, bias, scales)
    return _Prepared(op.bound(operands, lowered.call), lowered)
