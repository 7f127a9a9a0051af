"""Forwards of attentions with fewer key/value heads than ranks, and of norms over all heads."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...dispatch.shard_ops import for_each_rank, sum_over_ranks
from ...runtime.group import group_name, group_rank, group_size
from .kept_linears import KeptLinear
from .layouts import local
from .styles import ColwiseForward, OverlapColwiseParallel


class SharedHeadForward(ColwiseForward):
    """Forward of a k_proj or v_proj with fewer heads than ranks: each rank computes the head that it shares.

    Every rank has the full parameters, so that optimizers, norms and checkpoints need no special case.
    Rank r of P computes head `r * heads // P`; its part of the gradient is zero outside of this head. The
    parts are summed over the ranks, so every rank has the full gradient.

    Args:
        module: Linear with replicated parameters.
        mesh: Mesh of the ranks; the number of ranks is a multiple of `heads`.
        style: Style of the linear.
        heads: Number of key/value heads.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: OverlapColwiseParallel, heads: int):
        super().__init__(module, mesh, style)
        self.heads, self.group = heads, group_name(mesh)

    def operands(self) -> tuple[Any, Tensor | None, int]:
        """Returns the head's rows of weight and bias, and the number of columns over all ranks."""
        module, rows = self.module, self.rows()

        def rows_of_head(parameter: Tensor) -> Tensor:
            if isinstance(parameter, DTensor):
                parameter = for_each_rank(parameter.to_local(), self.group)
            return parameter[rows.start : rows.stop]

        bias = None if module.bias is None else rows_of_head(module.bias)
        kept = isinstance(self.source, KeptLinear)
        weight = self.source.stored(Replicate()) if kept else rows_of_head(self.source.weight)
        return weight, bias, len(rows) * group_size(self.group)

    def rows(self) -> range:
        """Returns the rows of the weight that are this rank's head."""
        width, ranks = self.module.out_features // self.heads, group_size(self.group)
        start = group_rank(self.group) // (ranks // self.heads) * width
        return range(start, start + width)


class SpreadNormForward:
    """Forward of an RMSNorm over the features of all heads, which are sharded: squares are summed over ranks.

    It is OLMo2's norm, `weight * (x * rsqrt(mean(x^2) + eps))`, in float32 at least.

    Args:
        module: Norm with a sharded weight.
        group: Name of the process group.
        width: Number of features over all ranks.
    """

    def __init__(self, module: Any, group: str, width: int):
        self.module, self.group, self.width = module, group, width

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Normalizes this rank's features `[..., width / P]`."""
        module = self.module
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares = sum_over_ranks(x.pow(2).sum(-1, keepdim=True), self.group)
        # Every rank's output depends on the sum: its gradient is summed, too.
        variance = for_each_rank(squares, self.group) / self.width
        x = x * torch.rsqrt(variance + module.variance_epsilon)
        return (local(module.weight, Shard(0)) * x).to(hidden_states.dtype)
