"""torch's operations between products, such that a row's bits do not depend on the batch.

With ``invariant=`` a parallelized model runs its norms and its attention within these contexts. On one H200
(torch 2.11, 2026-11-28), rows of 4096 elements in batches of 1 to 4096, sequences in batches of 1 to 32:

| operation | bits |
|---|---|
| `rms_norm`, `layer_norm` and its mean, `silu`, `gelu`, `softmax`, `log_softmax` | the same in all batches |
| `mean` over a row, in norms of transformers | depend on the batch |
| `scaled_dot_product_attention` by cuDNN, by the memory-efficient kernel | the same, also for other heads |
| by flash attention | depend on the batch: few sequences divide the keys |
| by math attention | depend on the batch |
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ...backends.op_call import promises_of
from ...spec.promises import Invariant

ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends of attention in invariant models; the first that supports a call is used. Math attention, which
depends on the batch, is for calls that no other supports, such as float32 with grouped heads.

cuDNN is first: where torch prefers it, it puts it first when a process first runs attention, whatever the
order in this context.
"""


class RowMeans(TorchFunctionMode):
    """Replaces the mean over the last dimension by that of torch's layer norm, which reads each row alone.

    The kernel of `torch.mean` divides a row into parts whose number depends on the number of rows.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`; a mean over the last dimension that is kept is computed by `_RowMean`."""
        kwargs = kwargs or {}
        if func in (torch.mean, Tensor.mean):
            dim, keeps = kwargs.get("dim", args[1] if len(args) > 1 else None), kwargs.get("keepdim", False)
            if dim in (-1, (-1,), [-1]) and keeps and set(kwargs) <= {"dim", "keepdim"} and len(args) <= 2:
                return _RowMean.apply(args[0])
        return func(*args, **kwargs)


class _RowMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.native_layer_norm(x, x.shape[-1:], None, None, 0.0)[1].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] / ctx.shape[-1]).expand(ctx.shape)


def row_means(invariant: Invariant | None) -> AbstractContextManager[object]:
    """Returns the context of a norm: `RowMeans` in eager calls with a promise, by argument or by context."""
    if torch.compiler.is_compiling() or promises_of(None, invariant).invariant is None:
        return nullcontext()
    return RowMeans()


def attention(invariant: Invariant | None, x: Tensor) -> AbstractContextManager[object]:
    """Returns the context of an attention of x: on GPUs, with a promise, the backends in `ATTENTION`."""
    if not x.is_cuda or promises_of(None, invariant).invariant is None:
        return nullcontext()
    return sdpa_kernel(ATTENTION, set_priority=True)
