"""Keys of calls, and what a group keeps for calls with equal keys.

The first call of a key computes all that does not depend on the tensors' values. The group keeps it
(`Group.calls`) until the group ends. The key has everything that may change the result: shapes, strides,
dtypes and devices, the arguments, and the state of the process that a choice reads.
"""

from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..runtime import agree, executor
from ..runtime.group import Group
from ..tuning.settings import settings

T = TypeVar("T")

LIMIT = 8192
"""Number of calls that a group keeps; when it is reached, all are dropped."""


def enter(ranks: Group, op: str, x: Any, run: Callable[..., T], *arguments: Any) -> T:
    """Returns `run(*arguments)`: the single entry of calls by users, torch's dispatcher and gradients.

    A call that raises before its launch is counted, also if its arguments are invalid. Later calls signal the
    count to the peers, which may have made that call (:mod:`overlap_gemm.runtime.identity`).

    Args:
        ranks: Group of the call.
        op: Name of the op.
        x: First tensor of the call.
        run: Function that runs the call.
        *arguments: Arguments of `run`.

    Raises:
        GroupThreadError: Another thread than the group's first one calls.
    """
    progress = ranks.progress
    before = progress.events
    try:
        if progress.thread != get_ident():
            progress.admit(op, x)
        return run(*arguments)
    except BaseException:
        progress.raised(before, op, x)
        raise


def layouts(*tensors: Any) -> Hashable:
    """Returns shapes, strides, dtypes and devices of tensors, of lists of tensors and of None, as a key."""
    key: list[Hashable] = []
    for one in tensors:
        if one is None:
            key.append(None)
        elif isinstance(one, Tensor):
            key += (one.shape, one.stride(), one.dtype, one.device)
        else:
            key.append(len(one))
            for part in one:
                if isinstance(part, Tensor):
                    key += (part.shape, part.stride(), part.dtype, part.device)
                else:
                    key.append(layouts(part))
    return tuple(key)


def state(x: Tensor) -> Hashable:
    """Returns the state that a call reads: `configured`, torch's switch, a capture, an open emulator."""
    if x.is_cuda:
        where: object = torch.cuda.is_current_stream_capturing()
    else:
        where = id(executor.emulation)
    return settings(), torch._C._get_deterministic_algorithms(), where


def keep(group: Group, key: Hashable, value: T) -> T:
    """Keeps `value` for calls of this key; returns it."""
    if not agree.checking():  # in debug mode every call is compared
        if len(group.calls) >= LIMIT:
            group.calls.clear()
        group.calls[key] = value
    return value


def is_plain(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *others: Tensor | Sequence[Tensor] | None,
    as_op: bool = True,
) -> bool:
    """Returns whether only autograd observes the call, so that it need not use torch's dispatcher.

    Other observers are torch.compile, make_fx, FakeTensorMode, torch.func, forward-mode AD, DTensors and
    other subclasses. For an op (``as_op``) autocast, and the profiler, which shows the ops' names, are, too.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or type(x) not in _PLAIN
        or (where := x.device.type) not in ("cpu", "cuda")
        or (as_op and (torch.autograd._profiler_enabled() or torch.is_autocast_enabled(where)))
    ):
        return False
    for argument in (weight, *others):
        kind = type(argument)
        if argument is None or kind in _PLAIN:
            continue
        if kind not in (list, tuple) or not _PLAIN.issuperset(map(type, argument)):
            return False
    return True


def needs_grad(*tensors: Any) -> bool:
    """Returns whether autograd must record a call with these tensors, lists of tensors and None."""
    if torch.is_grad_enabled():
        for one in tensors:
            if isinstance(one, Tensor):
                if one.requires_grad:
                    return True
            elif one is not None:
                for part in one:
                    if part.requires_grad:
                        return True
    return False


_PLAIN: frozenset[type] = frozenset({Tensor, Parameter})
