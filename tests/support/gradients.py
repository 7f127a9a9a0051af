"""One op and its gradients on one rank: the rank's part of each result, to be judged against the whole."""

from typing import Any, NamedTuple

from torch import Tensor

import overlap_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Operands


class Share(NamedTuple):
    """A rank's part of one result.

    Attributes:
        name: "out", or the operand whose gradient it is: "x", "weight", "bias".
        value: The part; None for the gradient of a bias that is not there.
        dim: Along which dimension the whole is sharded; None: every rank has all of it.
        roundings: How many values of its size were rounded to its dtype on the way: where a sum over ranks
            made it, the ranks' summands; and with backend "torch" each sum of two as well.
    """

    name: str
    value: Tensor | None
    dim: int | None
    roundings: int


def forward_and_backward(
    op: str, given: Operands, rank: int, size: int, backend: str, exchange: bool = False
) -> tuple[Share, ...]:
    """Calls an op on the rank's part of the operands, and backward with its part of the output's gradient.

    With `exchange` the ranks find out themselves how long the sharded extent is.
    """
    layout = LAYOUTS[op]
    m, n = given.grad.shape
    lengths: dict[str, Any] = OPS[op].arguments(m, n, given.x.shape[1], least=True)
    if exchange:
        lengths = dict.fromkeys(lengths, "exchange")
    x, weight, bias = (
        None if part is None else part.detach().requires_grad_()  # a reference may track the whole
        for part in (
            layout.part(given.x, layout.x, rank, size),
            layout.part(given.weight, layout.weight, rank, size),
            layout.part(given.bias, layout.bias, rank, size),
        )
    )
    assert x is not None and weight is not None
    out = getattr(overlap_gemm, op)(x, weight, bias=bias, backend=backend, **lengths)
    out.backward(layout.part(given.grad, layout.out, rank, size))
    # In forward the summands of an output, in backward those of the input gradient, are rounded on each rank.
    roundings = 2 * size if backend == "torch" else size
    reduces_out = OPS[op].sums
    return (
        Share("out", out.detach(), layout.out, roundings if reduces_out else 0),
        Share("x", x.grad, layout.x, 0 if reduces_out else roundings),
        Share("weight", weight.grad, layout.weight, 0),
        Share("bias", None if bias is None else bias.grad, layout.bias, 0),
    )
