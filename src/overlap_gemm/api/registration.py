"""`register`: adds an op, an architecture or a transport to the library.

An op is one object, an `OpSpec`: its name, and the axis of the product along which each of its tensors is
sharded. These follow from it:

- the custom op of ``torch.ops.overlap_gemm``: schema, fake kernel, gradient by the dual (`dispatch.ops`);
- the public function, ``overlap_gemm.<name>``, with the keywords of the other ops;
- the backends: `torch`, `sequential`, `decomposed` by its collective, `fused` by its pattern;
- `explain`, `warmup`, `reserve`, `stats`, the commands, comparison between ranks, errors.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from typing import Any, overload

import torch
from torch import Tensor

from ..backends.op_call import CallOperands, OpCall
from ..config.arch import Arch, Mma, add_arch
from ..dispatch.bound import call_op
from ..dispatch.ops import GemmOp
from ..dispatch.with_epilogue import EpilogueOp, call_with_epilogue
from ..runtime.group import GroupLike
from ..spec import (
    ARGUMENTS,
    OPS,
    PATTERNS,
    OpSpec,
    PatternSpec,
    TransportSpec,
    add_op,
    add_transport,
    check_patterns,
)
from ..tuning.machine import MACHINE_VARIABLE, machine_for
from . import functional

__all__ = ["Arch", "Mma", "OpSpec", "PatternSpec", "TransportSpec", "register"]

Function = Callable[..., Any]


@overload
def register(entry: OpSpec, *patterns: PatternSpec) -> Function: ...


@overload
def register(entry: Arch | TransportSpec) -> None: ...


def register(entry: OpSpec | Arch | TransportSpec, *patterns: PatternSpec) -> Function | None:
    """Adds an op, an architecture or a transport: once in a process, in the same order on every rank.

    Args:
        entry: The op. Every rank has all of its weight; x or the product is sent, by one collective. Or the
            architecture, before the first call. If it has devices, `OVERLAP_GEMM_MACHINE` names a file of
            constants for it. Or the transport of tiles, for `configured(tile_transport=name)`.
        *patterns: How the op's tiles are exchanged inside the fused kernels; without any it has none.

    Returns:
        The public function, which is `overlap_gemm.<name>` from now on: `(x, weight, *, group, bias, ...)`,
        whose keywords mean what they do in `gemm_reduce_scatter` (``rows``: in `all_gather_gemm`). A list
        of weights, and of biases, shares x; the result is a list then. None for other entries.

    Raises:
        TypeError: The entry is no op, architecture or transport, or there are patterns and no op.
        ValueError: There is an op of this name or number, or a pattern of this name; the name has another
            meaning in `overlap_gemm` or ``torch.ops.overlap_gemm``; the sharded axes are not
            those of an op that can be registered, or not those of its dual. There is an architecture of this
            name or compute capability, or its devices have no constants. There is a transport of this name,
            or it is none of tiles stored at peers, or has no device part.
    """
    if isinstance(entry, OpSpec):
        check_patterns(entry, patterns)
        if entry.name not in OPS and _is_taken(entry.name):
            raise ValueError(f"op {entry.name} needs a name of its own: overlap_gemm has such a name already")
        return register_op(entry, *patterns)
    if not isinstance(entry, (Arch, TransportSpec)):
        raise TypeError(f"register takes an OpSpec, an Arch or a TransportSpec, got {type(entry).__name__}")
    if patterns:
        raise TypeError(f"register: patterns are of ops, and {entry.name} is of type {type(entry).__name__}")
    if isinstance(entry, Arch):
        _register_arch(entry)
    else:
        add_transport(entry)
    return None


def _register_arch(arch: Arch) -> None:
    # Every fused call on a device reads constants (`tuning.space.constants`).
    if arch.capability is not None and machine_for(arch.name) is None:
        raise ValueError(
            f"arch {arch.name!r} has devices, and the model has no constants for it: {MACHINE_VARIABLE} must "
            f"name a file whose archs contain it, before the process starts"
        )
    add_arch(arch)


def _is_taken(name: str) -> bool:
    """Returns whether a name is that of a module or public object of the package, or of an op of torch."""
    package = import_module(__name__.partition(".")[0])
    if name in package.__all__ or hasattr(package, name) or find_spec(f"{package.__name__}.{name}"):
        return True
    return any(hasattr(torch.ops.overlap_gemm, op) for op in (name, f"{name}_with_epilogue"))


def register_op(op: OpSpec, *patterns: PatternSpec) -> Function:
    """Adds an op and its patterns, which are checked; see `register`."""
    add_op(op)
    PATTERNS.update({pattern.name: pattern for pattern in patterns})
    torch_op = GemmOp(op)
    EpilogueOp(torch_op)
    function = _function_of(torch_op)
    FUNCTIONS[op.name] = function
    return function


FUNCTIONS: dict[str, Function] = {}
"""Public functions of registered ops, by name."""


def function_of(op: str) -> Function:
    """Returns the public function of an op."""
    return FUNCTIONS.get(op) or getattr(functional, op)  # type: ignore[no-any-return]


_SET_HERE = ("group", "chunk", "keep", "copied_weight", "epilogue")
"""Fields of `OpCall` that are no keyword."""


def options_of(spec: OpSpec) -> tuple[str, ...]:
    """Keywords of an op's function, in addition to those of its tensors and `group`."""
    extents = {ARGUMENTS[axis] for axis in spec.unknown if axis is not None}
    unused = {*ARGUMENTS.values()} - extents | ({"dim"} if "m" not in (spec.x, spec.out) else set())
    return tuple(name for name in OpCall._fields if name not in {*unused, *_SET_HERE})


def _function_of(op: GemmOp) -> Function:
    """Returns the public function of an op, with its keywords as signature."""
    spec, known = op.spec, options_of(op.spec)

    def function(
        x: Tensor,
        weight: Any,
        *,
        group: GroupLike = None,
        bias: Any = None,
        scale_x: Tensor | None = None,
        scale_w: Any = None,
        epilogue: Any = None,
        **options: Any,
    ) -> Any:
        if unknown := options.keys() - {*known}:
            raise TypeError(
                f"{spec.name}: no keyword {', '.join(sorted(unknown))}; it has {', '.join(known)}"
            )
        has_scales = scale_x is not None or scale_w is not None  # then there is no gradient
        call = OpCall(**options, keep=spec.operand_is_sent and not has_scales)
        several = isinstance(weight, (list, tuple))
        if op.takes_lists:
            weight, bias = listed(weight), None if bias is None else listed(bias) or None
            scale_w = None if scale_w is None else listed(scale_w)
        operands = CallOperands(x, weight, bias, scale_x, scale_w)
        if epilogue is not None:
            results = call_with_epilogue(op, operands, group, call, epilogue)
            results = results[1:] if op.takes_lists else results
            return results[0] if len(results) == 1 else tuple(results)
        result = call_op(op, operands, group, call)
        if not op.takes_lists:
            return result
        return result[1:] if several else result[1]

    function.__name__ = function.__qualname__ = spec.name
    function.__doc__ = f"{spec.label}: x, sharded along {spec.x}, to a result sharded along {spec.out}."
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(OpCall(), name)) for name in known]
    named = [
        parameter
        for parameter in signature(function).parameters.values()
        if parameter.kind is not Parameter.VAR_KEYWORD
    ]
    function.__signature__ = Signature([*named, *keywords])  # type: ignore[attr-defined]
    return function


def listed(tensors: Any) -> list[Any]:
    """Returns the tensors of a list, or a list of the only one."""
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
