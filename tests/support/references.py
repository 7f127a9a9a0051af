"""What the ops must come to: the whole product in float64, and the same product in the case's own dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_gemm.testing.cases import Operands


@dataclass(frozen=True)
class Result:
    """Output `[M, N]` and the gradients of the whole operands."""

    out: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def reference(given: Operands, dtype: torch.dtype = torch.float64) -> Result:
    """`x @ weight.T + bias` and its gradients on one process, computed in `dtype`."""
    x = given.x.detach().to(dtype, copy=True).requires_grad_()
    weight = given.weight.to(dtype).requires_grad_()
    bias = None if given.bias is None else given.bias.to(dtype).requires_grad_()
    out = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
    out.backward(given.grad.to(dtype))
    assert x.grad is not None and weight.grad is not None
    return Result(out.detach(), x.grad, weight.grad, None if bias is None else bias.grad)
