"""`Arithmetic`: products and sums of the portable backends, in the order that the call's promises require.

Without a promise torch computes the products, and partial sums have the operands' dtype. With `invariant=`,
K alone determines the order in which an element's products are summed:

- product: blocks of `BLOCK` rows and columns, padded with zeros; each is one `torch.mm` of the same shape in
  float32. `why_no_order` checks once that an element's place in its block does not change the order.
- leaves: equal parts of K over all ranks, a product each.
- sum: a binary tree over the leaves: ((0 + 1) + (2 + 3)) + ..., in float32. A rank's part is a subtree; the
  sum over ranks is the top of the tree.
- result: the bias is added in float32, then the result is rounded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.order import is_capturing
from ..spec.promises import InvarianceError, Promises
from ..tuning.spans import span
from .collectives import accumulation_dtype, gemm, sum_in_rank_order, sum_in_tree

BLOCK = {"cpu": (32, 128), "cuda": (256, 1024)}
"""(rows, columns) of a block of the product, by device type."""


class Arithmetic:
    """Arithmetic without promises: torch's products, and partial sums in the operands' dtype.

    Ranks send partial sums in that dtype; `sum` adds them in float32 (float64 for float64).
    """

    is_ordered = False
    """Whether the order in which an element is summed is a function of K."""

    product = staticmethod(gemm)
    """`x @ weight.T + addend` of the operands' type, in `out` if passed; x and weight have all of K."""

    def products(self, x: Any, weights: Sequence[Any], biases: Sequence[Tensor] | None) -> list[Tensor]:
        """Returns `product` of x with each weight `[N_i, K]`; `biases` has `[N_i]` per weight, or none."""
        product, outs = self.product, []  # a list comprehension is one Python function more
        for i, weight in enumerate(weights):
            outs.append(product(x, weight, biases[i] if biases else None))  # noqa: PERF401
        return outs

    def partial(self, x: Any, weight: Any, out: Tensor | None = None) -> Tensor:
        """Returns a rank's part of the sum over K, of dtype `type_of(x)`, stored in `out` if passed."""
        return gemm(x, weight, out=out)

    def type_of(self, x: Any) -> torch.dtype:
        """Returns the dtype of partial sums of products of `x`."""
        return self.type_of_sum(x)

    def type_of_sum(self, x: Any) -> torch.dtype:
        """Returns the dtype of products of `x`."""
        dtype: torch.dtype = x.dtype
        return dtype

    def sum(
        self, partials: Sequence[Tensor], addend: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Returns the sum of every rank's partial `[m, N]` in rank order plus addend, in `dtype`."""
        return sum_in_rank_order(partials, addend, out, dtype)


class WidePartials(Arithmetic):
    """torch's products with partial sums in float32 (float64 for float64)."""

    def type_of(self, x: Any) -> torch.dtype:
        """Returns float32, or a wider dtype; see `Arithmetic.type_of`."""
        return accumulation_dtype(self.type_of_sum(x))

    def partial(self, x: Any, weight: Any, out: Tensor | None = None) -> Tensor:
        """Returns a rank's part of the sum over K in the wide dtype; see `Arithmetic.partial`."""
        return _rounded(wide_product(x, weight), self.type_of(x), out)


@dataclass(frozen=True)
class Ordered(Arithmetic):
    """Products and sums in an order that is a function of K alone.

    Attributes:
        promises: Promises of the call.
        world: Number of ranks of the group.
    """

    promises: Promises
    world: int

    is_ordered = True

    def product(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, addend: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns the ordered product, rounded once; see `Arithmetic.product`."""
        wide = ordered_product(x, weight)
        if addend is not None:
            wide += addend
        return _rounded(wide, x.dtype, out)

    def type_of(self, x: Any) -> torch.dtype:
        """Returns the dtype of partial sums; see `Arithmetic.type_of`."""
        return accumulation_dtype(x.dtype) if self.promises.has_wide_partials else self.type_of_sum(x)

    def partial(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the sum of this rank's leaves; see `Arithmetic.partial`."""
        number = self.promises.local_leaves(self.world)
        leaves = zip(x.chunk(number, 1), weight.chunk(number, 1), strict=True)
        return _rounded(sum_in_tree([ordered_product(*leaf) for leaf in leaves]), self.type_of(x), out)

    def sum(
        self, partials: Sequence[Tensor], addend: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Returns the sum by the top of the tree, if there is one; see `Arithmetic.sum`."""
        if not self.promises.has_tree:
            return super().sum(partials, addend, dtype, out)
        total = sum_in_tree(partials)
        return _rounded(total if addend is None else total + addend, dtype, out)


def arithmetic_of(promises: Promises, world: int = 1) -> Arithmetic:
    """Returns the arithmetic for these promises on `world` ranks."""
    if promises.leaves:
        return Ordered(promises, world)
    return WidePartials() if promises.has_wide_partials else Arithmetic()


def _rounded(wide: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return wide.to(dtype) if out is None else out.copy_(wide)


def factor_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which `x` is multiplied for a float32 result: GPUs have such 16-bit products."""
    return x.dtype if x.is_cuda and x.dtype.itemsize == 2 else accumulation_dtype(x.dtype)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T` in float32 (float64 for float64), in which 16-bit products are exact."""
    dtype = factor_dtype(x)
    if dtype.itemsize == 2:
        with span("compute", "GEMM"):
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return gemm(x.to(dtype), weight.to(dtype))


def ordered_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T` as `wide_product`; an element depends on its row, its column and K alone.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`.

    Raises:
        InvarianceError: torch's product of this dtype sums in an order that depends on an element's place.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    if reason := why_no_order(x.device, x.dtype, depth):
        raise InvarianceError(reason)
    out = x.new_empty(rows, columns, dtype=accumulation_dtype(x.dtype))
    tall, wide = BLOCK[x.device.type]
    blocks = list(_blocks(x, tall))
    for column, of_weight in _blocks(weight, wide):
        for row, of_x in blocks:
            place = out[row : row + tall, column : column + wide]
            place.copy_(wide_product(of_x, of_weight)[: place.shape[0], : place.shape[1]])
    return out


def _blocks(matrix: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row, block of `rows` rows), each in separate memory: products may depend on alignment."""
    for first in range(0, matrix.shape[0], rows):
        part = matrix[first : first + rows]
        block = matrix.new_zeros(rows, matrix.shape[1], dtype=factor_dtype(matrix))
        block[: part.shape[0]] = part
        yield first, block


_compared: dict[tuple[torch.device, torch.dtype, int], str | None] = {}


def why_no_order(device: torch.device, dtype: torch.dtype, depth: int) -> str | None:
    """Returns the reason a block's elements are not all summed in one order; None if they are.

    Checked once for each device, dtype and K: a block with equal rows and equal columns must have equal
    elements.
    """
    if device.type not in BLOCK:
        return f"invariant= is for {' and '.join(BLOCK)}, not for {device.type}"
    key = device, dtype, depth
    if key not in _compared:
        if is_capturing(device):
            return (
                "invariant= compares torch's products once for each K, which is impossible while a CUDA "
                "graph is captured: call once before the capture"
            )
        _compared[key] = _probe_order(device, dtype, depth)
    return _compared[key]


def _of_many_exponents(depth: int, generator: torch.Generator) -> Tensor:
    exponents = torch.randint(-3, 4, (1, depth), generator=generator)
    return torch.randn(1, depth, generator=generator) * 4.0**exponents


def _probe_order(device: torch.device, dtype: torch.dtype, depth: int) -> str | None:
    """Returns why equal rows and columns have unequal products in one block, or None."""
    generator = torch.Generator().manual_seed(depth)
    rows, columns = BLOCK[device.type]
    x, weight = (
        _of_many_exponents(depth, generator).to(device, dtype).repeat(extent, 1) for extent in (rows, columns)
    )
    product = wide_product(x.to(factor_dtype(x)), weight.to(factor_dtype(weight)))
    if not product.numel() or bool((product == product[0, 0]).all()):
        return None
    return (
        f"torch's product of {dtype} with K = {depth} on {device.type} sums elements of a block in orders "
        "that depend on their place: bits that depend on the row alone cannot be promised"
    )
