"""Torch's matrix products of half precision on the emulated device: sums in the order of a tensor core.

A kernel with `mma.sync` adds 16 products of K at a time to a float32 sum. cuBLAS does the same, so scripts
compare the two bit for bit. Torch's products on a CPU add in another order, which changes 1 of 1000 elements
by one unit in the last place. Here each block of 16 is summed exactly, as in `units.mma`, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 16
"""Products of K that one `mma.sync` adds."""

HALF = (torch.float16, torch.bfloat16)
NAMES = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear"}
"""Functions of torch that dispatch to the products below."""

_aten = torch.ops.aten


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns `a [.., m, k] @ b [.., k, n]` in float32, rounded once for each block of K."""
    a, b = a.double(), b.double()
    out = torch.zeros(*a.shape[:-1], b.shape[-1])
    for k in range(0, a.shape[-1], BLOCK):
        out = (out + a[..., k : k + BLOCK] @ b[..., k : k + BLOCK, :]).float()
    return out


def _plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b).to(a.dtype)


def _sum(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return product(a, b) * alpha + (c.float() * beta if beta else 0)


def _added(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: float) -> torch.Tensor:
    return _sum(c, a, b, **scales).to(a.dtype)


def _plain_as(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return product(a, b).to(out_dtype)


def _added_as(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, **scales: float
) -> torch.Tensor:
    return _sum(c, a, b, **scales).to(out_dtype)


_PRODUCTS: dict[Any, Any] = {
    _aten.mm.default: _plain,
    _aten.bmm.default: _plain,
    _aten.addmm.default: _added,
    _aten.baddbmm.default: _added,
}


_PRODUCTS_AS: dict[Any, Any] = {
    _aten.mm.dtype: _plain_as,
    _aten.bmm.dtype: _plain_as,
    _aten.addmm.dtype: _added_as,
    _aten.baddbmm.dtype: _added_as,
}
"""Products with `out_dtype=`, which torch implements for CUDA only."""


class HalfProducts(TorchDispatchMode):
    """Dispatch mode that replaces products of half precision by those of this module."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS_AS:
            return _PRODUCTS_AS[func](*args, **(kwargs or {}))
        ours = _PRODUCTS.get(func)
        if ours is not None and args[-1].dtype in HALF:
            return ours(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
