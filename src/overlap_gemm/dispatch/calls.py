"""Keys of calls, and the cache of prepared calls in each group.

The first call of a key computes everything that does not depend on the tensors' values. The group caches it
(`Group.calls`) until the group is destroyed. A key contains all facts that determine a prepared call:

- shapes, strides, dtypes and devices of the tensors (`layouts`),
- the arguments of the call,
- the state of the process that the choice of a backend reads (`state`).

Data pointers and environment variables are not in the key. In debug mode nothing is cached.
"""

from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..runtime import agree, executor
from ..runtime.group import Group, GroupLike, find
from ..tuning.settings import settings

T = TypeVar("T")

LIMIT = 8192
"""Maximum number of prepared calls in a group's cache, 8192; a full cache is emptied."""


def enter(ranks: Group, op: str, x: Any, run: Callable[..., T], *arguments: Any) -> T:
    """Returns `run(*arguments)`. Users, torch's dispatcher and backward passes all call ops through it.

    A call that raises before its launch is counted, also if its arguments are invalid. Later calls compare
    the count with the peers' (:mod:`overlap_gemm.runtime.identity`).

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


def enter_unless_compiled(group: GroupLike, op: str, x: Any, run: Callable[..., T], *arguments: Any) -> T:
    """Returns `run(*arguments)`, by `enter` if no compiler records the call, which it cannot count.

    `is_plain` also says so in frames of a caller that the compiler could not record completely.
    """
    if not is_plain(x, as_op=False):
        return run(*arguments)
    return enter(find(group), op, x, run, *arguments)


def layouts(*tensors: Any) -> Hashable:
    """Returns shapes, strides, dtypes and devices as a hashable key.

    Args:
        *tensors: Tensors, lists of tensors, and None.

    Raises:
        TypeError, RuntimeError: An argument is none of these, or a tensor has no strides.
    """
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
    """Returns the process state that a call depends on, as a hashable key.

    It consists of the settings (`configured`), torch's deterministic mode, and for CUDA tensors whether the
    current stream is being captured. For CPU tensors it contains the identity of the open emulator instead.
    """
    if x.is_cuda:
        where: object = torch.cuda.is_current_stream_capturing()
    else:
        where = id(executor.emulation)
    return settings(), torch._C._get_deterministic_algorithms(), where


def keep(group: Group, key: Hashable, value: T) -> T:
    """Stores `value` in the group's cache under `key`, unless debug mode is on; returns `value`."""
    if not agree.checking():  # in debug mode every call is compared
        if len(group.calls) >= LIMIT:
            group.calls.clear()
        group.calls[key] = value
    return value


def is_plain(x: Tensor, *others: Tensor | Sequence[Tensor] | None, as_op: bool = True) -> bool:
    """Returns whether a call can run without torch's dispatcher, because only autograd observes it.

    Returns False under torch.compile, make_fx, FakeTensorMode, torch.func and forward-mode AD, and for
    DTensors and other subclasses of Tensor.

    Args:
        x: First tensor of the call.
        *others: Tensors, lists of tensors, and None.
        as_op: Whether the dispatcher must be used under the profiler, which shows ops by name, and under
            autocast, which casts there.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or type(x) not in _PLAIN
        or not (x.is_cuda or x.is_cpu)
        or (
            as_op
            and (
                torch.autograd._profiler_enabled()
                or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
            )
        )
    ):
        return False
    for argument in others:
        kind = type(argument)
        if argument is None or kind in _PLAIN:
            continue
        if kind not in (list, tuple) or not _PLAIN.issuperset(map(type, argument)):
            return False
    return True


def needs_grad(*tensors: Any) -> bool:
    """Returns whether autograd must record a call with these arguments.

    Args:
        *tensors: Tensors and lists of tensors; other values need no gradient.
    """
    if torch.is_grad_enabled():
        for one in tensors:
            if isinstance(one, Tensor):
                if one.requires_grad:
                    return True
            elif isinstance(one, (list, tuple)):
                for part in one:
                    if isinstance(part, Tensor) and part.requires_grad:
                        return True
    return False


_PLAIN: frozenset[type] = frozenset({Tensor, Parameter})
