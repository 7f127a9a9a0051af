"""Problems to try the ops on, the same ones everywhere: sizes, dtypes, and the operands for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..api import all_to_all as _  # noqa: F401 (registers its ops)
from ..spec import OPS
from ..spec.sharding import Shards


@dataclass(frozen=True)
class Case:
    """One op on one set of global sizes.

    Attributes:
        op: The op's public name.
        m: Rows over all ranks.
        n: Output features over all ranks.
        k: Input features over all ranks.
        dtype: Of operands and result.
        bias: Whether there is one.
        seed: Of the operands.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.float32
    bias: bool = True
    seed: int = 0

    def __str__(self) -> str:
        """Short enough for a pytest id."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op}-{self.m}x{self.n}x{self.k}-{dtype}{'' if self.bias else '-nobias'}"

    def with_seed(self, seed: int) -> "Case":
        """The same sizes with other data."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Operands:
    """The whole, unsharded operands of a case.

    x is `[M, K]`, weight `[N, K]`, bias `[N]` or None, grad `[M, N]`; `grad` is the gradient of the whole
    output, for backward.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    grad: Tensor

    def to(self, device: torch.device) -> "Operands":
        """The same operands on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return Operands(self.x.to(device), self.weight.to(device), bias, self.grad.to(device))


def operands(case: Case) -> Operands:
    """The operands of a case: normal, scaled so that results are of order one; the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed * 1000003 + case.m * 31 + case.n * 17 + case.k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Operands(
        x=normal(case.m, case.k).to(case.dtype),
        weight=(normal(case.n, case.k) / max(case.k, 1) ** 0.5).to(case.dtype),
        bias=normal(case.n).to(case.dtype) if case.bias else None,
        grad=normal(case.m, case.n).to(case.dtype),
    )


@dataclass(frozen=True)
class Layout:
    """Along which dimension each operand and the result are sharded; None: every rank has all of it."""

    x: int | None
    weight: int | None
    bias: int | None
    out: int | None

    def part(self, whole: Tensor | None, dim: int | None, rank: int, size: int) -> Tensor | None:
        """The rank's own copy of its part."""
        if whole is None or dim is None:
            return None if whole is None else whole.clone()
        start, stop = Shards.even(whole.shape[dim], size).range(rank)
        return whole.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


class _Layouts(Mapping[str, Layout]):
    """Layouts of all ops, also of those registered later."""

    def __getitem__(self, op: str) -> Layout:
        return Layout(*OPS[op].dims)

    def __iter__(self) -> Iterator[str]:
        return iter(OPS)

    def __len__(self) -> int:
        return len(OPS)


LAYOUTS = _Layouts()
"""What of an op is sharded along which dimension."""
