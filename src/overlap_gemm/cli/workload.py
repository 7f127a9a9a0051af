"""One op on one shape: its operands on this rank, and the calls that carry it out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import overlap_gemm

from ..backends.plans import DTYPES
from ..runtime.group import Group
from ..spec import OPS, OpSpec
from ..spec.sharding import Shards
from ..tuning.prediction import Facts

Call = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """An op on the unsharded product `[M, K] x [N, K]^T`.

    Attributes:
        name: What it is in a model, for tables.
        op: The op's public name.
        m: Rows M over all ranks.
        n: Output features N over all ranks.
        k: Input features K over all ranks.
        dtype: Of operands and result.
    """

    name: str
    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype

    @property
    def spec(self) -> OpSpec:
        """The op."""
        return OPS[self.op]

    def flops(self, ranks: int) -> float:
        """Floating-point operations of one rank."""
        return 2.0 * self.m * self.n * self.k / ranks

    def facts(self, ranks: int) -> Facts:
        """The same for the model."""
        return Facts(self.op, self.m, self.n, self.k, DTYPES.get(self.dtype, "f32"), ranks)

    def shapes(self, group: Group) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of this rank's x and weight."""
        return self.spec.shapes(self.m, self.n, self.k, Shards.owned_by(group.size, group.rank))

    def operands(self, group: Group, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's x and weight, random normal, the weight scaled so that results stay near 1."""
        x_shape, weight_shape = self.shapes(group)
        generator = torch.Generator(device).manual_seed(group.rank)
        x = torch.randn(x_shape, generator=generator, device=device, dtype=self.dtype)
        weight = torch.randn(weight_shape, generator=generator, device=device, dtype=self.dtype)
        return x, weight / self.k**0.5

    @property
    def extents(self) -> dict[str, Any]:
        """The extents over all ranks that an op takes as arguments, known here as they are in a model."""
        return self.spec.arguments(self.m, self.n, self.k)

    def by(self, backend: str, x: Tensor, weight: Tensor, group: Group) -> Call:
        """The op by a backend of this library."""
        op = getattr(overlap_gemm, self.op)
        return lambda: op(x, weight, group=group.process_group, backend=backend, **self.extents)

    def taken_by(self, backend: str, x: Tensor, weight: Tensor, group: Group) -> str:
        """The backend that carries it out when asked for `backend`, which may be "auto"."""
        how: dict[str, Any] = {"group": group.process_group, "backend": backend, **self.extents}
        choice = overlap_gemm.explain(self.op, x, weight, **how)
        return choice.backend.name
