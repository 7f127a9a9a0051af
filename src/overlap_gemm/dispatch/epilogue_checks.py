"""Checks of calls with an epilogue: the number of weights, the inputs' types and shapes, and promises."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.epilogues import tensor_of
from ..backends.op_call import CallOperands, OpCall
from ..backends.scales.scaling import FLOAT8
from ..epilogues import PAIR, Applied, Epilogue, add_bias, add_residual, apply_relu
from ..spec import ALL_GATHER_GEMM, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER
from .calls import is_plain
from .operands import DTYPES, shape_of
from .ops import GemmOp


def with_tensors(op: GemmOp, x: Tensor, applied: Any) -> Applied:
    """Returns the epilogue with its inputs, with tensors in place of numbers."""
    if not isinstance(applied, Applied):
        got = f"{applied.name} without" if isinstance(applied, Epilogue) else type(applied).__name__
        raise TypeError(
            f"{op.name}: epilogue must be an epilogue with its inputs, as add_bias(bias=b) or apply_silu(); "
            f"got {got}"
        )
    for number, ((_, kind), value) in enumerate(zip(applied.epilogue.inputs, applied.inputs, strict=True)):
        if kind == "scalar" and isinstance(value, (int, float)):
            one = tensor_of(value, x.device, keep=is_plain(x, as_op=False))
            inputs = *applied.inputs[:number], one, *applied.inputs[number + 1 :]
            applied = applied._replace(inputs=inputs)
    return applied


def refuse_gradient(op: GemmOp, epilogue: Epilogue) -> None:
    """Raises TypeError for an epilogue whose function on tensors gives no gradient."""
    if epilogue.result is not None:
        raise TypeError(
            f"{op.name}: epilogue {epilogue.name} has an 8-bit result and no gradient; call the op under "
            "torch.no_grad()"
        )
    if epilogue.is_partial(op.spec.sums):
        raise TypeError(
            f"{op.name}: epilogue {epilogue.name} of partial sums has no gradient; call the op under "
            "torch.no_grad(), or declare of='complete'"
        )


def check_epilogue(op: GemmOp, operands: CallOperands, call: OpCall, applied: Applied) -> None:
    """Raises TypeError or ValueError for inputs, weights or promises that no call with the epilogue supports.

    It reads what is in the key of a prepared call.
    """
    x, weight, epilogue = operands.x, operands.weight, applied.epilogue
    if op.takes_lists and len(weight) != 1:
        shapes = [shape_of(one) for one in weight]
        if not (epilogue.pairs and len(weight) == 2 and shapes[0] == shapes[1]):
            raise ValueError(
                f"{op.name}: epilogue {epilogue.name} needs one weight"
                f"{', or two of equal shape' * epilogue.pairs}, "
                f"got {len(weight)}: {', '.join(map(str, shapes))}"
            )
    for (name, _), value in zip(epilogue.inputs, applied.inputs, strict=True):
        if not isinstance(value, Tensor) or value.dtype not in DTYPES or value.device != x.device:
            got = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{op.name}: input {name} of epilogue {epilogue.name} must be a Tensor of one of "
                f"{', '.join(map(str, DTYPES))} on {x.device}, got {got}"
            )
    promised = call.promises.invariant
    if why := why_not_invariant(op.name, epilogue, x.dtype, promised):
        raise ValueError(
            f"{op.name}: invariant={promised!r} allows no epilogue {epilogue.name}: {why}; omit epilogue=, "
            "and apply the function to the result"
        )


def why_not_invariant(
    op: str, epilogue: Epilogue, dtype: torch.dtype | None, promised: str | None
) -> str | None:
    """Returns the reason a call with an epilogue cannot keep a promise of bits; None if it can, or has none.

    A function is invariant if it rounds once, as hardware and torch do alike, and is applied to the same sum
    with and without gradients.

    Args:
        op: Name of the op.
        epilogue: The epilogue.
        dtype: Type of the operands; None: none of 8 bits.
        promised: `invariant` of the call.
    """
    if promised is None:
        return None
    proved = ALL_GATHER_GEMM.name, GEMM_REDUCE_SCATTER.name, GEMM_ALL_REDUCE.name
    if op not in proved:
        return f"it has been proved of {', '.join(proved)} only"
    if epilogue.key not in (add_bias.key, add_residual.key, apply_relu.key):
        return "only add_bias, add_residual and apply_relu round once, with and without gradients"
    if promised != "batch" and op == ALL_GATHER_GEMM.name:
        return "whether its kernel or torch applies it depends on a rank's columns, so on the number of ranks"
    return None if dtype not in FLOAT8 else "with scales, it follows the op where inputs need gradients"


def check_shapes(
    op: GemmOp, epilogue: Epilogue, inputs: Sequence[Tensor], shape: Sequence[Any], weights: int
) -> None:
    """Raises ValueError for inputs that do not fit sums of `shape`, with the columns of all weights."""
    *leading, columns = shape
    if epilogue.pairs:
        if columns % (2 * PAIR) and weights == 1:
            raise ValueError(
                f"{op.name}: epilogue {epilogue.name} takes pairs of columns, {PAIR} and {PAIR} of each "
                f"{2 * PAIR}; N={columns} of this rank must be a multiple of {2 * PAIR}"
            )
        columns = columns // 2
    if epilogue.block and columns % epilogue.block:
        raise ValueError(
            f"{op.name}: epilogue {epilogue.name} scales blocks of {epilogue.block} columns; the {columns} "
            f"columns of this rank's result must be a multiple of {epilogue.block}"
        )
    of = "product" if epilogue.is_partial(op.spec.sums) else "result"
    shapes: dict[str, list[Any]] = {
        "element": [*leading, columns], "rows": leading, "columns": [columns],
    }  # fmt: skip
    for (name, kind), tensor in zip(epilogue.inputs, inputs, strict=True):
        if kind in shapes and list(tensor.shape) != shapes[kind]:
            raise ValueError(
                f"{op.name}: input {name} of epilogue {epilogue.name} is for each "
                f"{kind.removesuffix('s')} of this rank's {of} and must be {shapes[kind]}, "
                f"got {shape_of(tensor)}"
            )
        if kind == "scalar" and tensor.numel() != 1:
            raise ValueError(
                f"{op.name}: input {name} of epilogue {epilogue.name} is a scalar and must have one element, "
                f"got {shape_of(tensor)}"
            )
