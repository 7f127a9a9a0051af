"""Mixtures of experts, sharded by features: every rank has a part of every expert. Correct, but slow.

Every rank routes all tokens and multiplies them by its part of the experts' features; the partial results are
summed. Under sequence parallelism the tokens are gathered before, and each rank keeps its rows after. The
products are transformers' own, so that nothing overlaps, and small experts become smaller.

transformers stores gates and ups in one tensor, 2I wide. Here they have a dimension of their own, [2, I], of
which I is sharded. A rank's part of 2I would be two ranges, which torch's distributed checkpoints refuse.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ...dispatch.shard_ops import for_each_rank, keep_shard, sum_over_ranks
from ..assignment import PAIRED, expert_shapes, features_dim
from .layouts import as_output
from .parts import SEQUENCE_DIM, LengthFor, Localized, gather_sequence


def placements(experts: Any) -> dict[str, Placement]:
    """Returns the placements of the experts' parameters after `split_gates_and_ups`."""
    dim = features_dim(experts)
    return {PAIRED: Shard(dim + 1), "down_proj": Shard(3 - dim)}


def split_gates_and_ups(experts: Any) -> None:
    """Gives gates and ups a dimension of their own."""
    dim, old = features_dim(experts), experts.gate_up_proj
    if old.ndim > len(expert_shapes(experts)[PAIRED]):  # already split, by an assignment
        return
    if isinstance(old, DTensor):
        full_shape = torch.Size(expert_shapes(experts)[PAIRED])
        split_shape = torch.Size((*full_shape[:dim], 2, full_shape[dim] // 2, *full_shape[dim + 1 :]))
        _replace(experts, old.to_local().unflatten(dim, (2, -1)), Shard(dim + 1), split_shape)
    else:
        experts.gate_up_proj = nn.Parameter(gates_and_ups(experts, old), requires_grad=old.requires_grad)


def gates_and_ups(experts: Any, paired: Tensor) -> Tensor:
    """Returns the unsharded model's `gate_up_proj` with gates and ups as a dimension of their own."""
    return paired.detach().unflatten(features_dim(experts), (2, -1))


def merge_gates_and_ups(experts: Any) -> None:
    """Reverts `split_gates_and_ups` on sharded parameters, for loaders that expect the shapes of files."""
    dim, full_shape = features_dim(experts), torch.Size(expert_shapes(experts)[PAIRED])
    local = experts.gate_up_proj.to_local().flatten(dim, dim + 1)
    _replace(experts, local, _StridedShard(dim, split_factor=2), full_shape)


def _replace(experts: Any, local: Tensor, placement: Placement, full_shape: torch.Size) -> None:
    old = experts.gate_up_proj
    new = as_output(local.detach(), full_shape, old.device_mesh, placement, use_local_output=False)
    experts.gate_up_proj = nn.Parameter(new, requires_grad=old.requires_grad)


class _LocalExperts(Localized):
    """This rank's part of the experts, in the layout of their own forward."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == PAIRED:
            dim = features_dim(self._module)
            return value.flatten(dim, dim + 1)
        return value


class _LocalRouter(Localized):
    """This rank's copy of a router.

    Its `__class__` is the router's, so that `super()` works (Llama 4's router is a linear).
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)


uncompiled = torch.compiler.disable(reason="mixtures of experts of a parallelized model are not compiled")
"""Decorator of forwards that torch.compile leaves out; with `fullgraph=True` it raises the reason."""


class RouterForward:
    """Forward of a router: the module's own, on all tokens.

    Args:
        module: Router with a replicated weight.
    """

    def __init__(self, module: nn.Module):
        self.module = module

    @uncompiled
    def __call__(self, x: Tensor) -> Any:
        """Routes `[tokens, H]`."""
        return type(self.module).forward(_LocalRouter(self.module, None), x)


class ExpertsForward:
    """Forward of the experts: their own, on this rank's features, summed over the ranks.

    Args:
        module: Experts, their parameters placed as `placements` returns.
        group: Name of the process group.
    """

    def __init__(self, module: nn.Module, group: str):
        self.module, self.group = module, group

    @uncompiled
    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the experts' output `[tokens, H]` for inputs that are the same on every rank."""
        local = [for_each_rank(x, self.group) if x.is_floating_point() else x for x in inputs]
        partial = type(self.module).forward(_LocalExperts(self.module, None), *local)
        return sum_over_ranks(partial, self.group)


class GatherTokens:
    """Pre-forward hook of a mixture of experts: gathers its input, which is sharded by rows."""

    def __init__(self, group: str, length: LengthFor):
        self.group, self.length = group, length

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gathers the input. Called by torch before the mixture."""
        rows, *others = args
        return gather_sequence("a mixture of experts", rows, self.length(), self.group), *others


class KeepTokens:
    """Forward hook of a mixture of experts: each rank keeps its rows of the output."""

    def __init__(self, group: str):
        self.group = group

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Slices the output.

        Called by torch after the mixture; Llama 4's returns `[tokens, H]` and router logits.
        """
        tokens, *others = out if isinstance(out, tuple) else (out,)
        rows = keep_shard(tokens.view(args[0].shape), SEQUENCE_DIM, self.group)
        return (rows, *others) if others else rows
