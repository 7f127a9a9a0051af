"""Mixtures of experts, cut by features: every rank has a part of every expert. Right, and not fast.

Every rank routes all tokens, alike, and multiplies them by its part of the experts' features; the partial
results are summed. Under sequence parallelism the tokens are gathered before, and each rank keeps its rows
after. The products are transformers' own: nothing overlaps, and small experts become smaller ones.

transformers has gates and ups in one tensor, 2I wide. Here they are a dimension of their own, [2, I], of
which I is sharded: a rank's part of 2I would be two ranges, which torch's distributed checkpoints refuse.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ...dispatch.moves import for_each_rank, keep_shard, sum_over_ranks
from ..assignment import PAIRED, expert_shapes, features_dim
from .layouts import as_output
from .parts import SEQUENCE_DIM, LengthFor, Localized, whole_sequence


def placements(experts: Any) -> dict[str, Placement]:
    """How the parameters lie on the ranks, once gates and ups are apart."""
    dim = features_dim(experts)
    return {PAIRED: Shard(dim + 1), "down_proj": Shard(3 - dim)}


def set_apart(experts: Any) -> None:
    """Gives gates and ups a dimension of their own."""
    dim, old = features_dim(experts), experts.gate_up_proj
    if old.ndim > len(expert_shapes(experts)[PAIRED]):  # assigned since, and set apart then
        return
    if isinstance(old, DTensor):
        whole = torch.Size(expert_shapes(experts)[PAIRED])
        apart = torch.Size((*whole[:dim], 2, whole[dim] // 2, *whole[dim + 1 :]))
        _replace(experts, old.to_local().unflatten(dim, (2, -1)), Shard(dim + 1), apart)
    else:
        experts.gate_up_proj = nn.Parameter(gates_and_ups(experts, old), requires_grad=old.requires_grad)


def gates_and_ups(experts: Any, paired: Tensor) -> Tensor:
    """Returns the unsharded model's `gate_up_proj` with gates and ups as a dimension of their own."""
    return paired.detach().unflatten(features_dim(experts), (2, -1))


def put_together(experts: Any) -> None:
    """Takes `set_apart` back, on sharded parameters: for a loader that goes by the shapes in files."""
    dim, whole = features_dim(experts), torch.Size(expert_shapes(experts)[PAIRED])
    local = experts.gate_up_proj.to_local().flatten(dim, dim + 1)
    _replace(experts, local, _StridedShard(dim, split_factor=2), whole)


def _replace(experts: Any, local: Tensor, placement: Placement, whole: torch.Size) -> None:
    old = experts.gate_up_proj
    new = as_output(local.detach(), whole, old.device_mesh, placement, use_local_output=False)
    experts.gate_up_proj = nn.Parameter(new, requires_grad=old.requires_grad)


class _LocalExperts(Localized):
    """This rank's part of the experts, as their own forward wants it."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == PAIRED:
            dim = features_dim(self._module)
            return value.flatten(dim, dim + 1)
        return value


class _LocalRouter(Localized):
    """This rank's copy of a router, which is of the router's class to `super()` (Llama 4's is a linear)."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)


class RouterForward:
    """The forward of a router, which sees all tokens: its own.

    Args:
        module: The router, its weight replicated.
    """

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, x: Tensor) -> Any:
        """Routes `[tokens, H]`."""
        return type(self.module).forward(_LocalRouter(self.module, None), x)


class ExpertsForward:
    """The forward of the experts: their own, on this rank's features, summed over the ranks.

    Args:
        module: The experts, their parameters placed as `placements` says.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, group: str):
        self.module, self.group = module, group

    def __call__(self, *inputs: Tensor) -> Tensor:
        """`[tokens, H]`, and what else a family's experts are given, the same on every rank."""
        mine = [for_each_rank(x, self.group) if x.is_floating_point() else x for x in inputs]
        own = type(self.module).forward(_LocalExperts(self.module, None), *mine)
        return sum_over_ranks(own, self.group)


class GatherTokens:
    """Pre-forward hook of a mixture of experts: its input, sharded by rows, becomes whole on every rank."""

    def __init__(self, group: str, length: LengthFor):
        self.group, self.length = group, length

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Called by torch before the mixture."""
        own, *others = args
        return whole_sequence("a mixture of experts", own, self.length(), self.group), *others


class KeepTokens:
    """Forward hook of a mixture of experts: of its output each rank keeps its rows."""

    def __init__(self, group: str):
        self.group = group

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Called by torch after the mixture; Llama 4's gives `[tokens, H]`, and the router's logits, too."""
        tokens, *others = out if isinstance(out, tuple) else (out,)
        own = keep_shard(tokens.view(args[0].shape), SEQUENCE_DIM, self.group)
        return (own, *others) if others else own
