"""Attentions of fewer key/value heads than ranks, and norms over all heads."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...dispatch.moves import for_each_rank, sum_over_ranks
from ...runtime.group import group_name, group_rank, group_size
from .kept_linears import KeptLinear
from .layouts import local
from .styles import ColwiseForward, OverlapColwiseParallel


class SharedHeadForward(ColwiseForward):
    """The forward of a k_proj or v_proj with fewer heads than ranks: each rank computes the one it shares.

    Its parameters are on every rank, whole, so that optimizers, norms and checkpoints know nothing of it.
    Their gradients are summed over the ranks; a rank's own is zero but for its head.

    Args:
        module: The linear, its parameters replicated.
        mesh: The ranks; their number is a multiple of the heads'.
        style: As for `ColwiseForward`.
        heads: Key/value heads.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: OverlapColwiseParallel, heads: int):
        super().__init__(module, mesh, style)
        self.heads, self.group = heads, group_name(mesh)

    def operands(self) -> tuple[Any, Tensor | None, int]:
        """The head's rows of weight and bias, and the columns of all ranks' together."""
        module, rows = self.module, self.rows()

        def own(parameter: Tensor) -> Tensor:
            if isinstance(parameter, DTensor):
                parameter = for_each_rank(parameter.to_local(), self.group)
            return parameter[rows.start : rows.stop]

        bias = None if module.bias is None else own(module.bias)
        kept = isinstance(self.source, KeptLinear)
        weight = self.source.stored(Replicate()) if kept else own(self.source.weight)
        return weight, bias, len(rows) * group_size(self.group)

    def rows(self) -> range:
        """Rows of the weight that are this rank's head."""
        width, ranks = self.module.out_features // self.heads, group_size(self.group)
        start = group_rank(self.group) // (ranks // self.heads) * width
        return range(start, start + width)


class SpreadNormForward:
    """An RMSNorm over the features of all heads, of which each rank has its own: the squares are summed.

    As OLMo2's: `weight * (x * rsqrt(mean(x^2) + eps))`, in float32 at least.

    Args:
        module: The norm, its weight sharded.
        group: The ranks.
        width: Features of all ranks together.
    """

    def __init__(self, module: Any, group: str, width: int):
        self.module, self.group, self.width = module, group, width

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Normalises this rank's features `[..., width / P]`."""
        module = self.module
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares = sum_over_ranks(x.pow(2).sum(-1, keepdim=True), self.group)
        # Every rank's output depends on the sum: its gradient is summed, too.
        variance = for_each_rank(squares, self.group) / self.width
        x = x * torch.rsqrt(variance + module.variance_epsilon)
        return (local(module.weight, Shard(0)) * x).to(hidden_states.dtype)
