"""An op with an epilogue against the op alone and torch's operations after it: values and all gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import overlap_gemm
from overlap_gemm.epilogues import Applied
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS


def assert_applied(
    op: str,
    sizes: tuple[int, int, int],
    rank: int,
    size: int,
    ours: Callable[[Tensor, Tensor], Applied],
    theirs: Callable[[Tensor, Tensor, Tensor], Any],
    **options: Any,
) -> None:
    """Compares results and gradients in float64, eagerly and in a graph, and results without gradients.

    Args:
        op: Name of the op.
        sizes: M, N and K over all ranks.
        rank: This rank.
        size: Number of ranks.
        ours: Makes the epilogue of a matrix of the result's shape and a vector of its columns.
        theirs: The same on the op's result, and these two, by torch's operations.
        **options: Options of the op.
    """
    generator, (m, n, k) = torch.Generator().manual_seed(0), sizes
    full = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((m, k), (n, k), (m, n), (n,))
    ]
    layout = LAYOUTS[op]
    dims = layout.x, layout.weight, layout.out, 0 if layout.out == 1 else None
    leaves: Any = [layout.part(*pair, rank, size) for pair in zip(full, dims, strict=True)]
    plain = getattr(overlap_gemm, op)
    options |= OPS[op].arguments(m, n, k, least=True)

    def applied(x: Tensor, weight: Tensor, element: Tensor, column: Tensor) -> Any:
        return plain(x, weight, epilogue=ours(element, column), **options)

    with torch.no_grad():
        without = applied(*leaves)
    for leaf in leaves:
        leaf.requires_grad_()
    wanted = theirs(plain(*leaves[:2], **options), *leaves[2:])
    grads = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in wanted]
    expected = torch.autograd.grad(wanted, leaves, grads)
    for value, exact in zip(without, wanted, strict=True):
        torch.testing.assert_close(value, exact.detach())
    for call in (applied, torch.compile(applied, fullgraph=True, backend="aot_eager", dynamic=False)):
        results = call(*leaves)
        gradients = torch.autograd.grad(results, leaves, grads)
        for value, exact in zip((*results, *gradients), (*wanted, *expected), strict=True):
            torch.testing.assert_close(value, exact)
