"""Backend `sequential`: product, then collective, or the reverse, without overlap; sums in rank order."""

from torch import Tensor

from ..runtime.group import Group
from ..spec.sharding import Shards
from .base import Portable, Problem
from .collectives import all_gather_rows, scattered_rows
from .portable_arithmetic import Arithmetic
from .scales.scaling import why_no_scaled_mm


class Sequential(Portable):
    """Backend of torch.distributed's collectives and torch's products, for any device and process group."""

    name = "sequential"

    def why_slower(self, problem: Problem) -> str | None:
        """Returns None if sums must be deterministic, or if torch does not have the product."""
        if problem.is_scaled and why_no_scaled_mm(problem):
            return None
        return None if problem.deterministic else "its sums in rank order are slower than the collective's"

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies, exchanges and sums in rank order; see `Portable.gemm_reduce_scatter`."""
        return how.sum(scattered_rows(how.partial(x, weight), shards, group), bias, x.dtype)

    def gemm_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Runs the reduce-scatter and gathers its rows; see `Portable.gemm_all_reduce`."""
        return all_gather_rows(self.gemm_reduce_scatter(x, weight, bias, shards, group, how), shards, group)

    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Gathers the transposed blocks, whose columns are rows; see `Portable.gemm_all_gather`."""
        local = how.product(x, weight, bias)
        return all_gather_rows(local.t().contiguous(), shards, group).t().contiguous()
