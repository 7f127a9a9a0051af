"""The surface every backend has: the seam at which a new way to carry out the ops plugs in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..runtime.group import Group
from ..sharding import Shards

Op = Literal["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_gather"]
OPS: tuple[Op, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_gather")

DUAL: dict[Op, Op] = {
    "all_gather_gemm": "gemm_reduce_scatter",
    "gemm_reduce_scatter": "all_gather_gemm",
}
"""The op whose communication the gradient of an op needs."""

VIRTUAL = "virtual ranks exchange tiles inside kernels; torch.distributed does not know them"
"""Why a portable backend does not serve virtual ranks."""


@dataclass(frozen=True)
class Problem:
    """What a choice of backend may depend on.

    All of it is equal on every rank, so that all ranks choose alike. The local extents (N_local of
    all_gather_gemm, K_local of gemm_reduce_scatter) are left out on purpose: with uneven shards they differ
    between ranks.

    Attributes:
        op: The op's public name.
        rows: Rows M of the whole operand or result.
        features: Width of the tensor that travels: K of all_gather_gemm, N of the others.
        dtype: Of operands and result.
        device_type: "cpu" or "cuda".
        world_size: Ranks of the group, P.
        virtual: Whether the ranks are virtual (`runtime.virtual`), which torch.distributed does not know.
    """

    op: Op
    rows: int
    features: int
    dtype: torch.dtype
    device_type: str
    world_size: int
    virtual: bool = False

    @classmethod
    def of(cls, op: Op, rows: int, features: int, x: Tensor, group: Group) -> "Problem":
        """The problem of calling `op` with `x` in `group`."""
        return cls(op, rows, features, x.dtype, x.device.type, group.size, group.is_virtual)

    @property
    def bytes(self) -> int:
        """Size of the whole tensor that the collective moves (S in the usual (P - 1) / P * S accounting)."""
        return self.rows * self.features * self.dtype.itemsize


class Backend(Protocol):
    """One way to carry out the four ops.

    All tensors are 2-D, on one device and of one dtype; `x` is contiguous; a weight is `[N, K]` and may be
    the transpose of a contiguous matrix (the backward passes call with `weight.t()`). Shapes are validated
    before. Calls are collective over `group`, stream-ordered on CUDA, and return new tensors. Partial results
    are summed over the ranks in rank order in float32 (float64 for float64), then the bias is added, then
    converted once.
    """

    name: str

    def why_not(self, problem: Problem) -> str | None:
        """The reason this backend cannot carry out `problem`, None if it can."""

    def why_slower(self, problem: Problem) -> str | None:
        """The reason `auto` should look further, None if it is worth taking."""

    def all_gather_gemm(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], shards: Shards, group: Group
    ) -> tuple[Tensor, list[Tensor]]:
        """Gathers x `[shards.size(rank), K]` to `[M, K]` and multiplies it with each weight `[N_i, K]`.

        `biases` holds one `[N_i]` per weight, or nothing. Returns the gathered x (x itself in a group of one)
        and the products `[M, N_i]`.
        """

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """X `[M, K_local]`, weight `[N, K_local]` -> this rank's rows `[shards.size(rank), N]` of the sum."""

    def gemm_all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        """X `[M, K_local]`, weight `[N, K_local]` -> `[M, N]`, bitwise equal on all ranks."""

    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """X `[M, K]`, weight `[shards.size(rank), K]` -> `[M, N]`: `shards` divides the output columns.

        `bias` `[shards.size(rank)]` goes with the weight's rows.
        """
