"""One op on one shape: its operands on this rank, and every way to spend time on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import overlap_gemm

from ..backends.base import Op
from ..backends.collectives import all_gather_rows, gemm, reduce_scatter_rows
from ..runtime.group import Group
from ..sharding import Shards
from ..testing.cases import LAYOUTS


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
    op: Op
    m: int
    n: int
    k: int
    dtype: torch.dtype

    def flops(self, ranks: int) -> float:
        """Floating-point operations of one rank."""
        return 2.0 * self.m * self.n * self.k / ranks

    def operands(self, group: Group, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's x and weight, random normal, the weight scaled so that results stay near 1."""

        def local(shape: tuple[int, int], sharded: int | None) -> list[int]:
            return [
                Shards.even(extent, group.size).size(group.rank) if dim == sharded else extent
                for dim, extent in enumerate(shape)
            ]

        layout = LAYOUTS[self.op]
        x_shape, weight_shape = local((self.m, self.k), layout.x), local((self.n, self.k), layout.weight)
        generator = torch.Generator(device).manual_seed(group.rank)
        x = torch.randn(x_shape, generator=generator, device=device, dtype=self.dtype)
        weight = torch.randn(weight_shape, generator=generator, device=device, dtype=self.dtype)
        return x, weight / self.k**0.5

    def variants(
        self, backends: Sequence[str], group: Group, device: torch.device
    ) -> dict[str, Callable[[], object]]:
        """The op by each of `backends`, beside the product alone ("gemm") and the transfer alone ("comm")."""
        x, weight = self.operands(group, device)
        rows = Shards.even(self.m, group.size)
        columns = Shards.even(self.n, group.size)
        op = getattr(overlap_gemm, self.op)
        # The extents over all ranks are known here, as they are in a model: no call needs to exchange them.
        extents = {"all_gather_gemm": {"rows": self.m}, "gemm_all_gather": {"columns": self.n}}.get(
            self.op, {}
        )
        whole = all_gather_rows(x, rows, group) if self.op == "all_gather_gemm" else x
        product = gemm(whole, weight)

        def comm() -> object:
            if self.op == "all_gather_gemm":
                return all_gather_rows(x, rows, group)
            if self.op == "gemm_all_gather":
                return all_gather_rows(product.t().contiguous(), columns, group)
            own = reduce_scatter_rows(product, None, rows, group)
            return own if self.op == "gemm_reduce_scatter" else all_gather_rows(own, rows, group)

        def by(backend: str) -> Callable[[], object]:
            return lambda: op(x, weight, group=group.process_group, backend=backend, **extents)

        return {
            "gemm": lambda: gemm(whole, weight),
            "comm": comm,
            **{backend: by(backend) for backend in backends},
        }
