"""Entry of calls without an epilogue: `call_op` checks and binds a signature once, then looks it up."""

from typing import Any, NamedTuple

from ..backends.op_call import CallOperands, OpCall
from ..runtime import agree
from ..runtime.group import Group, GroupLike, find, group_name
from ..runtime.order import is_capturing
from ..spec import ARGUMENTS
from .autocast import autocast_call
from .calls import enter, enter_unless_compiled, is_plain, keep, layouts, needs_grad, state
from .lowering import Lowered, lower
from .ops import NO_GRADIENT, GemmOp
from .registered import Bound


class Prepared(NamedTuple):
    """Prepared call of one signature.

    Attributes:
        bound: Op bound to the signature.
        lowered: Lowered call, which reshapes operands and results.
    """

    bound: Bound
    lowered: Lowered


class _Exchanging(NamedTuple):
    """Call of one signature with `rows="exchange"` or `columns="exchange"`.

    The ranks exchange their extents in every call, then the call with these extents is looked up or lowered.

    Attributes:
        extent: Name of the extent.
        facts: (name, value) that the ranks compare when they exchange extents.
    """

    extent: str
    facts: agree.Facts


def call_op(op: GemmOp, operands: CallOperands, group: GroupLike, call: OpCall) -> Any:
    """Calls an op: directly if only autograd observes it (`calls.is_plain`), else by torch's dispatcher.

    Under autocast operands are cast, except float64 and operands with scales.

    Args:
        op: Op to call.
        operands: Operands of the caller.
        group: Process group, device mesh, name of a group, or None for the default group.
        call: Options and extents of the caller.

    Returns:
        The op's result in the shape of the caller's x. An op that takes lists returns a list: the operand
        that was communicated, then a result for each weight.

    Raises:
        ValueError: Shapes, extents or options do not fit together, see `lowering.lower`.
        TypeError: A type, dtype, layout or device is not supported. Or operands have scales, and one of them
            requires a gradient: scales have none.
    """
    if is_plain(*operands):
        ranks = find(group)
        return enter(ranks, op.name, operands.x, run_call, op, ranks, operands, call)
    return enter_unless_compiled(group, op.name, operands.x, _by_dispatcher, op, operands, group, call)


def _by_dispatcher(op: GemmOp, operands: CallOperands, group: GroupLike, call: OpCall) -> Any:
    operands, call = autocast_call(operands, call)
    lowered = lower(op.spec, group_name(group), operands, call)
    if operands.scales and needs_grad(*operands):
        raise TypeError(f"{op.name}: {NO_GRADIENT}")
    return lowered.result(op.by_dispatcher(lowered.tensors(operands), lowered.call))


def run_call(
    op: GemmOp, ranks: Group, operands: CallOperands, call: OpCall, prepared: "Prepared | None" = None
) -> Any:
    """Runs a call by its prepared form, which the group keeps by arguments, layouts and settings.

    Args:
        op: Op to call.
        ranks: Group of the call.
        operands: Operands of the caller.
        call: Options and extents of the caller.
        prepared: Result of `prepared_call`, if that is known.
    """
    known: Prepared | _Exchanging | None = prepared
    if known is None:
        try:
            key = (op.name, layouts(*operands), call, state(operands.x))
            known = ranks.calls.get(key)
        except (TypeError, RuntimeError):  # tensors without strides, unhashable arguments: `lower` names them
            lower(op.spec, ranks.name, operands, call.without_exchange(op.spec))
            raise
        if known is None:
            known = keep(ranks, key, _prepare(op, ranks, operands, call))
    has_scales, has_gradient = operands.scale_x is not None, needs_grad(*operands)
    if has_scales and has_gradient:
        raise TypeError(f"{op.name}: {NO_GRADIENT}")
    if isinstance(known, _Exchanging):
        x, extent = operands.x, known.extent
        length = x.shape[call.dim] if op.spec.unresolved_axis == "m" else operands.weight.shape[0]
        total = agree.total_length(op.name, extent, length, x.device, ranks, known.facts)
        return run_call(op, ranks, operands, call._replace(**{extent: total}))  # type: ignore[arg-type]
    bound, lowered = known
    tensors = operands[:3] if lowered.dim is None and not has_scales else lowered.tensors(operands)
    result = (bound.with_gradient if has_gradient else bound.run)(*tensors)
    return result if lowered.finish is None else lowered.result(result)


def prepared_call(op: GemmOp, ranks: Group, operands: CallOperands, call: OpCall) -> Prepared | None:
    """Returns the prepared form of a call that has run; None if it is not kept, or the ranks exchange."""
    known = ranks.calls.get((op.name, layouts(*operands), call, state(operands.x)))
    return known if isinstance(known, Prepared) else None


def _prepare(op: GemmOp, ranks: Group, operands: CallOperands, call: OpCall) -> Prepared | _Exchanging:
    """Returns the prepared form of calls like this one; it may exchange lengths."""
    axis = op.spec.unresolved_axis
    exchanges = axis is not None and getattr(call, ARGUMENTS[axis]) == "exchange"
    if axis is not None and exchanges and ranks.size > 1 and not is_capturing(operands.x.device):
        # Checked before the ranks exchange the extent.
        lowered = lower(op.spec, ranks.name, operands, call.without_exchange(op.spec))
        return _Exchanging(ARGUMENTS[axis], lowered.facts)
    lowered = lower(op.spec, ranks.name, operands, call)
    return Prepared(op.bound(lowered.tensors(operands), lowered.call), lowered)
