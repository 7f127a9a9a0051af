"""First the collective, then the product (or the other way round), summed in rank order: the last resort."""

from torch import Tensor

from ..runtime.group import Group
from ..spec.sharding import Shards
from .base import Portable, Problem
from .collectives import all_gather_rows, scattered_rows
from .portable_arithmetic import Arithmetic
from .scales.scaling import why_no_scaled_mm


class Sequential(Portable):
    """torch.distributed's collectives and torch's matmul, on any device and group. Nothing overlaps."""

    name = "sequential"

    def why_slower(self, problem: Problem) -> str | None:
        """For who asks for deterministic sums, or for a product that torch has not."""
        if problem.is_scaled and why_no_scaled_mm(problem):
            return None
        return None if problem.deterministic else "its sums in rank order cost more than the collective's"

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """See `Portable.gemm_reduce_scatter`."""
        return how.sum(scattered_rows(how.partial(x, weight), shards, group), bias, x.dtype)

    def gemm_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """See `Portable.gemm_all_reduce`."""
        return all_gather_rows(self.gemm_reduce_scatter(x, weight, bias, shards, group, how), shards, group)

    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """See `Portable.gemm_all_gather`: the blocks travel transposed, as whole rows."""
        local = how.product(x, weight, bias)
        return all_gather_rows(local.t().contiguous(), shards, group).t().contiguous()
