"""Epilogues of products that autograd functions compute, such as those that quantize their operands.

A layer calls `apply_to_product`, which applies the epilogue in the autograd function or after it. The
function calls `save` in forward and `gradients` in backward.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..backends.epilogues import TensorKind, author_gradient
from ..backends.op_call import CallOperands, OpCall
from ..epilogues import Applied, epilogue_of
from ..runtime.group import GroupLike
from .calls import is_plain, needs_grad
from .epilogue_checks import check_epilogue, refuse_gradient, with_tensors
from .ops import GemmOp
from .with_epilogue import apply_to_results, with_gathered_rows


class InProduct(NamedTuple):
    """Epilogue in an autograd function, without its inputs, which are the function's last tensors.

    Attributes:
        key: Key of the epilogue; None: there is none.
        otherwise: As in `epilogues.Applied`.
    """

    key: str | None = None
    otherwise: Callable[..., Any] | None = None

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Applied | None]:
        """Returns the tensors without the epilogue's inputs, and the epilogue with these, or None."""
        if self.key is None:
            return tensors, None
        epilogue = epilogue_of(self.key)
        first = len(tensors) - len(epilogue.inputs)
        return tensors[:first], Applied(epilogue, tuple(tensors[first:]), self.otherwise)


NOTHING = InProduct()


def apply_to_product(
    op: GemmOp,
    operands: CallOperands,
    group: GroupLike,
    call: OpCall,
    applied: Any,
    product: Callable[[OpCall, InProduct, Sequence[Tensor]], Sequence[Tensor]],
) -> list[Tensor]:
    """Applies an epilogue in an autograd function, or after it as in `with_epilogue.call_with_epilogue`.

    It follows where a gradient is needed and the epilogue has no gradient function, and where compilers fuse
    what replaces it (`Applied.otherwise`).

    Args:
        op: Op that the autograd function calls.
        operands: Operands before they are quantized; shapes, dtypes and `requires_grad` are read.
        group: Group of the call.
        call: Options and extents of the caller.
        applied: Epilogue with its inputs.
        product: Calls the autograd function; the tensors are the epilogue's inputs.

    Returns:
        The result, then the outputs.

    Raises:
        TypeError, ValueError: The conditions of `call_with_epilogue`.
    """
    applied = with_tensors(op, operands.x, applied)
    check_epilogue(op, operands, call, applied)
    if applied.epilogue.has_gathered_rows:
        call, applied = with_gathered_rows(op, operands, group, call, applied)
    epilogue, inputs, otherwise = applied
    if epilogue.gradient is None and needs_grad(*operands, inputs):
        refuse_gradient(op, epilogue)
    elif otherwise is None or is_plain(*operands, inputs, as_op=False):
        return list(product(call, InProduct(epilogue.key, otherwise), inputs))
    return apply_to_results(op, product(call, NOTHING, ()), applied)


def save(
    ctx: Any, tensors: Sequence[Tensor], of: InProduct, applied: Applied | None, results: Sequence[Tensor]
) -> None:
    """Saves tensors of a product, and those that the epilogue's gradient reads, for `gradients`.

    Args:
        ctx: Context of the autograd function.
        tensors: Tensors that the gradient of the product reads.
        of: Epilogue.
        applied: The same with its inputs, or None.
        results: Results of the function.
    """
    read: list[Tensor] = []
    ctx.epilogue_key, ctx.epilogue_inputs, ctx.num_saved = of.key, [], len(tensors)
    if applied is not None:
        epilogue, inputs = applied.epilogue, applied.inputs
        read += inputs if epilogue.reads_inputs else ()
        read += results if epilogue.reads_outputs else ()
        ctx.epilogue_inputs = [(one.shape, one.dtype) for one in inputs]
    ctx.save_for_backward(*tensors, *read)


def gradients(
    ctx: Any, weights: int, grads: tuple[Tensor, ...]
) -> tuple[Sequence[Tensor], tuple[Tensor, ...], list[Tensor | None]]:
    """Returns the saved tensors of a product, the gradients of its sums, and those of the epilogue's inputs.

    Args:
        ctx: Context of the autograd function, after `save`.
        weights: Number of weights.
        grads: Gradients of the results of the function.
    """
    tensors = ctx.saved_tensors  # read once, as recomputation requires
    saved, read = tensors[: ctx.num_saved], tensors[ctx.num_saved :]
    if ctx.epilogue_key is None:
        return saved, grads, []
    epilogue = epilogue_of(ctx.epilogue_key)
    number = len(epilogue.inputs) if epilogue.reads_inputs else 0
    of_results = ["element", *(kind for _, kind in epilogue.returned)]
    of_inputs = [kind for _, kind in epilogue.inputs]

    def flat(tensors: Sequence[Tensor], kinds: Sequence[str]) -> list[Tensor]:
        pairs = zip(tensors, kinds[: len(tensors)], strict=True)
        return [tensor.reshape(_flat(tensor.shape, kind)) for tensor, kind in pairs]

    kinds = [
        TensorKind(_flat(shape, kind), dtype)
        for (shape, dtype), kind in zip(ctx.epilogue_inputs, of_inputs, strict=True)
    ]
    inputs, results = flat(read[:number], of_inputs), flat(read[number:], of_results)
    of_sums, grads_of_inputs = author_gradient(epilogue, flat(grads, of_results), results, inputs, kinds)
    shaped = of_sums.reshape(*grads[0].shape[:-1], of_sums.shape[-1])
    back = [
        None if grad is None else grad.reshape(shape)
        for grad, (shape, _) in zip(grads_of_inputs, ctx.epilogue_inputs, strict=True)
    ]
    return saved, epilogue.operands(shaped) if weights > 1 else (shaped,), back


def _flat(shape: Sequence[Any], kind: str) -> Sequence[Any]:
    """Returns the shape with all rows in one dimension, as authors' gradients take tensors."""
    if kind == "element":
        return prod(shape[:-1]), shape[-1]
    return shape if kind in ("columns", "scalar") else (prod(shape),)
