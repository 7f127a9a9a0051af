"""First the collective, then the product (or the other way round): the baseline and the last resort."""

from collections.abc import Sequence

from torch import Tensor

from ..runtime.group import Group
from ..sharding import Shards
from .base import VIRTUAL, Problem
from .collectives import all_gather_rows, gemm, reduce_scatter_rows


class Sequential:
    """torch.distributed's collectives beside torch's matmul, on any device and group. Nothing overlaps."""

    name = "sequential"

    def why_not(self, problem: Problem) -> str | None:
        """Carries out everything that torch.distributed has a group for."""
        return VIRTUAL if problem.virtual else None

    def why_slower(self, problem: Problem) -> str | None:
        """The last resort is always worth taking when it is reached."""
        return None

    def all_gather_gemm(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], shards: Shards, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Backend.all_gather_gemm`."""
        gathered = all_gather_rows(x, shards, group)
        return gathered, [
            gemm(gathered, weight, biases[i] if biases else None) for i, weight in enumerate(weights)
        ]

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """See `Backend.gemm_reduce_scatter`."""
        return reduce_scatter_rows(gemm(x, weight), bias, shards, group)

    def gemm_all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        """See `Backend.gemm_all_reduce`."""
        shards = Shards.even(x.shape[0], group.size)
        return all_gather_rows(self.gemm_reduce_scatter(x, weight, bias, shards, group), shards, group)

    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """See `Backend.gemm_all_gather`: the blocks travel transposed, as whole rows."""
        local = gemm(x, weight, bias)
        return all_gather_rows(local.t().contiguous(), shards, group).t().contiguous()
