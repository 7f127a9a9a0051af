"""Local products of gradients, in the order of summation that a call promises.

`ordered_gemm` multiplies x `[M, K]` and weight `[N, K]` in an order that K alone determines.
"""

from typing import Any

from torch import Tensor

from ..backends.op_call import promises_of
from ..backends.portable_arithmetic import ordered_product
from .registered import Registered

ordered_gemm: Registered = Registered(
    "ordered_gemm(Tensor x, Tensor weight, str group) -> Tensor",
    bind=lambda x, weight, group: lambda x, weight: ordered_product(x, weight).to(x.dtype),
    fake=lambda x, weight, group: x.new_empty(x.shape[0], weight.shape[0]),
    backward=lambda ctx, call, needs, grad: (
        ordered_gemm(grad, ctx.saved_tensors[1].t(), call.group) if needs[0] else None,
        ordered_gemm(grad.t(), ctx.saved_tensors[0].t(), call.group) if needs[1] else None,
    ),
    saves=2,
)


def along_rows(x: Tensor, y: Tensor, how: Any) -> Tensor:
    """Returns `x.t() @ y`, the gradient of a weight, in the order of summation that the call promises.

    Args:
        x: `[M, N]`.
        y: `[M, K]`.
        how: Arguments of the op with `partials`, `invariant` and `group`.
    """
    is_ordered = promises_of(how.partials, how.invariant).leaves
    return ordered_gemm(x.t(), y.t(), how.group) if is_ordered else x.t() @ y


def sum_of_rows(x: Tensor, how: Any) -> Tensor:
    """Returns the sum over the rows of x `[M, N]`, the gradient of a bias; `how` as in `along_rows`."""
    if not promises_of(how.partials, how.invariant).leaves:
        return x.sum(0)
    sums: Tensor = ordered_gemm(x.new_ones(1, x.shape[0]), x.t(), how.group)
    return sums[0]
