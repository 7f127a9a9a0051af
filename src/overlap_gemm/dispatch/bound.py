"""How a call goes from its user to its op: checked and bound once, then known by its key."""

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.scales.scaling import OUT_DTYPES
from ..runtime import agree
from ..runtime.group import Group, GroupLike, find, group_name
from ..runtime.order import is_capturing
from ..spec import OPS
from .autocast import autocast_call
from .calls import is_plain, keep, layouts, needs_grad, state
from .lowering import LOWERINGS, Lowered
from .operands import Scales
from .options import ASKED, CallOptions
from .registered import Bound, Registered
from .scaled import NO_GRADIENT
from .scaled import OPS as SCALED


def with_scales(options: CallOptions, scale_x: Any, scale_w: Any) -> tuple[CallOptions, Scales]:
    """Options and scales of a call as they go on; without scales of either operand it is a plain one."""
    if scale_x is None and scale_w is None:
        return options, ()
    if options.out_dtype is None:
        options = options._replace(out_dtype=OUT_DTYPES[0])
    return options, (scale_x, scale_w)


class _Prepared(NamedTuple):
    """All that calls of one kind have in common: a call is this and its tensors."""

    bound: Bound
    lowered: Lowered

    def __call__(self, x: Tensor, weight: Any, bias: Any, *scales: Any) -> Any:
        bound, lowered = self
        if lowered.dim is not None:
            x = lowered.flatten(x)
        if scales:  # which have no gradient
            result = bound.run(x, weight, bias, *lowered.vectors(*scales))
        else:
            run = bound.with_gradient if needs_grad(x, weight, bias) else bound.run
            result = run(x, weight, bias)
        return result if lowered.finish is None else lowered.finish(result)


class _Asking(NamedTuple):
    """The same for calls whose sharded extent the ranks must ask each other for, every time."""

    op: Registered
    group: Group
    options: CallOptions
    facts: agree.Facts

    def __call__(self, x: Tensor, weight: Any, bias: Any, *scales: Any) -> Any:
        length = x.shape[self.options.dim] if OPS[self.op.name].gathers_operand else weight.shape[0]
        name, what = self.op.name, ASKED[self.op.name]
        total = agree.total_length(name, what, length, x.device, self.group, self.facts)
        told = self.options.told(what, total)
        return call_op(self.op, x, weight, bias, self.group.name, told, *scales)


def call_op(
    op: Registered,
    x: Tensor,
    weight: Any,
    bias: Any,
    group: GroupLike,
    options: CallOptions,
    scale_x: Any = None,
    scale_w: Any = None,
) -> Any:
    """Calls an op: at once where nobody but autograd looks, else through torch's dispatcher.

    Args:
        op: It.
        x: The user's.
        weight: The user's, or a list.
        bias: The user's, or a list.
        group: The user's.
        options: The user's.
        scale_x: The user's.
        scale_w: The user's, or a list.
    """
    scales: Scales = ()
    if scale_x is not None or scale_w is not None:
        options, scales = with_scales(options, scale_x, scale_w)
    if not is_plain(x, weight, bias, *scales):
        if not scales:
            x, weight, bias, copied = autocast_call(x, weight, bias)
            options = options._replace(copied_weight=options.copied_weight or copied)
        lowered = LOWERINGS[op.name](group_name(group), x, weight, bias, options, scales)
        through = getattr(torch.ops.overlap_gemm, _registered(op, scales).name)
        # AOTInductor turns an empty list of tensors into None on its way to an op.
        operands = lowered.operands(x, weight, None if isinstance(bias, list) and not bias else bias, scales)
        if scales:
            _refuse_gradient(op, x, weight, bias, *scales)
        result = through(*operands, *lowered.arguments)
        return result if lowered.finish is None else lowered.finish(result)
    ranks = find(group)
    progress = ranks.progress
    before = progress.events
    try:
        if progress.thread != get_ident():
            progress.admit(op.name, x)
        try:
            key = (op.name, layouts(x, weight, bias, *scales), options, state(x))
            prepared = ranks.calls.get(key)
        except (TypeError, RuntimeError):  # tensors without strides, arguments without a hash: ours to name
            _lower_unasked(op, ranks, x, weight, bias, options, scales)
            raise
        if prepared is None:
            prepared = keep(ranks, key, _prepare(op, x, weight, bias, ranks, options, scales))
        if scales:
            _refuse_gradient(op, x, weight, bias, *scales)
        return prepared(x, weight, bias, *scales)
    except BaseException:
        progress.raised(before, op.name, x)
        raise


def _refuse_gradient(op: Registered, *tensors: Any) -> None:
    if needs_grad(*tensors):
        raise TypeError(f"{op.name}: {NO_GRADIENT}")


def _registered(op: Registered, scales: Scales) -> Registered:
    return SCALED[op.name] if scales else op


def _lower_unasked(
    op: Registered, group: Group, x: Tensor, weight: Any, bias: Any, options: CallOptions, scales: Scales
) -> Lowered:
    """The call as it is checked before ranks ask each other for its extent."""
    return LOWERINGS[op.name](group.name, x, weight, bias, options.unasked(op.name), scales)


def _prepare(
    op: Registered,
    x: Tensor,
    weight: Any,
    bias: Any,
    group: Group,
    options: CallOptions,
    scales: Scales,
) -> _Prepared | _Asking:
    asks = op.name in ASKED and getattr(options, ASKED[op.name]) == "exchange"
    if asks and group.size > 1 and not is_capturing(x.device):
        facts = _lower_unasked(op, group, x, weight, bias, options, scales).facts
        return _Asking(op, group, options, facts)
    lowered = LOWERINGS[op.name](group.name, x, weight, bias, options, scales)
    operands = lowered.operands(x, weight, bias, scales)
    return _Prepared(_registered(op, scales).bound(operands, lowered.arguments), lowered)
