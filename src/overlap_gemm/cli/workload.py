"""One op on one shape: its operands on this rank, and every way to spend time on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import overlap_gemm

from ..backends.base import Op
from ..backends.collectives import all_gather_rows, gemm, reduce_scatter_rows
from ..runtime.group import Group
from ..sharding import Shards
from ..testing.cases import LAYOUTS

TORCH = "torch"
"""Name of the baseline that uses nothing of this library."""


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
        """The op by each of `backends`, beside the product alone ("gemm") and the transfer alone ("comm").

        Among `backends`, `TORCH` is torch's product and torch.distributed's own collective, called one after
        the other: what a model without this library does.

        Raises:
            ValueError: `TORCH`, and shards of different lengths, which that collective does not take.
        """
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
            if backend == TORCH:
                return lambda: self._by_torch(x, weight, group)
            return lambda: op(x, weight, group=group.process_group, backend=backend, **extents)

        return {
            "gemm": lambda: gemm(whole, weight),
            "comm": comm,
            **{backend: by(backend) for backend in backends},
        }

    def _by_torch(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        if self.m % group.size or self.n % group.size:
            raise ValueError(
                f"baseline {TORCH!r} needs M={self.m} and N={self.n} divisible by P={group.size}"
            )
        if self.op == "all_gather_gemm":
            whole = x.new_empty(self.m, self.k)
            dist.all_gather_into_tensor(whole, x, group=group.process_group)
            return torch.mm(whole, weight.t())
        if self.op == "gemm_all_gather":
            columns = torch.mm(weight, x.t())
            gathered = x.new_empty(self.n, self.m)
            dist.all_gather_into_tensor(gathered, columns, group=group.process_group)
            return gathered.t().contiguous()
        product = torch.mm(x, weight.t())
        if self.op == "gemm_all_reduce":
            dist.all_reduce(product, group=group.process_group)
            return product
        own = x.new_empty(self.m // group.size, self.n)
        dist.reduce_scatter_tensor(own, product, group=group.process_group)
        return own
