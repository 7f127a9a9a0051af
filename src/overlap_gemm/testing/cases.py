"""Test cases of the ops: sizes, dtypes, reproducible operands, and the sharding of each operand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..api import all_to_all as _  # noqa: F401 (registers its ops)
from ..spec import OPS
from ..spec.sharding import Shards


@dataclass(frozen=True)
class Case:
    """An op with its sizes over all ranks.

    Attributes:
        op: Public name of the op.
        m: Number of rows of x.
        n: Number of output features.
        k: Number of input features.
        dtype: Dtype of operands and result.
        bias: Whether the op gets a bias.
        seed: Seed of the operands' random values.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.float32
    bias: bool = True
    seed: int = 0

    def __str__(self) -> str:
        """Returns a short text that identifies the case but not its seed, for example as a pytest id."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op}-{self.m}x{self.n}x{self.k}-{dtype}{'' if self.bias else '-nobias'}"

    def with_seed(self, seed: int) -> "Case":
        """Returns the case with the seed replaced: same sizes, other values."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Operands:
    """Unsharded operands of a case.

    Attributes:
        x: `[M, K]`.
        weight: `[N, K]`.
        bias: `[N]`, or None.
        grad: `[M, N]`, the gradient of the unsharded result.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    grad: Tensor

    def to(self, device: torch.device) -> "Operands":
        """Returns the operands copied to a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return Operands(self.x.to(device), self.weight.to(device), bias, self.grad.to(device))


def operands(case: Case) -> Operands:
    """Returns the unsharded operands of a case on the CPU, with the same values on every rank.

    Values are drawn in float64 from the standard normal distribution and rounded to the case's dtype. The
    weight is divided by sqrt(K), so the results' standard deviation is near 1.

    The generator is seeded from seed, m, n and k, not from op and dtype. The bias is drawn before `grad`, so
    `grad` has other values without a bias.
    """
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
    """Dimension along which each tensor of an op is sharded; None: every rank has the unsharded tensor.

    Attributes:
        x: Sharded dimension of x.
        weight: Sharded dimension of the weight.
        bias: Sharded dimension of the bias.
        out: Sharded dimension of the result.
    """

    x: int | None
    weight: int | None
    bias: int | None
    out: int | None

    def part(self, tensor: Tensor | None, dim: int | None, rank: int, size: int) -> Tensor | None:
        """Returns a contiguous copy of a rank's shard, or None for None.

        Args:
            tensor: Unsharded tensor, or None.
            dim: Sharded dimension; None copies the unsharded tensor.
            rank: Rank of the shard.
            size: Number of ranks. Shards are cut as by `torch.chunk`.
        """
        if tensor is None or dim is None:
            return None if tensor is None else tensor.clone()
        start, stop = Shards.even(tensor.shape[dim], size).range(rank)
        return tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


class _Layouts(Mapping[str, Layout]):
    """Read-only mapping from an op's name to its layout; ops registered later are included."""

    def __getitem__(self, op: str) -> Layout:
        return Layout(*OPS[op].dims)

    def __iter__(self) -> Iterator[str]:
        return iter(OPS)

    def __len__(self) -> int:
        return len(OPS)


LAYOUTS = _Layouts()
"""Layout of each registered op, by public name."""
