"""Initialization of a parallelized model's shards; a seed gives the numbers of the unsharded model.

transformers initializes one module after the other. While a module is initialized it has full parameters,
into which every rank draws the same numbers; then each rank keeps its shard. So a rank holds its shards and
the full parameters of one module, and draws as many numbers as the unsharded model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from ...runtime.group import resolve
from ...spec.sharding import Shards
from ..modules.generation import copy_random_state_of_rank_zero
from ..modules.parts import PackedLinear
from ..places import Sharding, place_of

DONE = "_is_hf_initialized"
"""Attribute by which transformers marks modules and parameters that need no initialization."""


def initialize_in_shards(model: Any, sharding: Sharding) -> None:
    """Makes transformers' `init_weights` of a parallelized model, and of models in it, draw into shards.

    Args:
        model: Parallelized model of transformers; other models are unchanged.
        sharding: State of the model.
    """
    for module in model.modules():
        if hasattr(type(module), "_initialize_weights"):
            module._initialize_weights = partial(_initialize, module)
            module.initialize_weights = partial(_initialize_all, module, sharding)


def _initialize_all(model: Any, sharding: Sharding) -> None:
    """Runs `initialize_weights` from rank 0's random state on every rank. Collective."""
    ranks = resolve(sharding.group)
    if ranks.size > 1 and any(_needs_values(parameter) for parameter in model.parameters()):
        copy_random_state_of_rank_zero(ranks, model.device)
    type(model).initialize_weights(model)


def _initialize(model: Any, module: nn.Module, *others: Any) -> None:
    """Replaces `_initialize_weights`, which transformers calls for each module."""
    if getattr(module, DONE, False):
        return
    with _in_full(module):
        type(model)._initialize_weights(model, module, *others)


def _needs_values(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and not parameter.is_meta and not getattr(parameter, DONE, False)


@contextmanager
def _in_full(module: nn.Module) -> Iterator[None]:
    """Gives a module full parameters within the block; stores the shards of their values afterwards.

    A packed linear has one weight in the block, as in the unsharded model. A tied head draws, too, so that
    the random state advances as in the unsharded model, but the embedding's values are kept.
    """
    place = place_of(module)
    is_tied = place is not None and place.role == "head" and place.sharding.are_tied
    owners = list(module.children()) if isinstance(module, PackedLinear) else [module]
    before, drawn = dict(module._parameters), []
    for key in owners[0]._parameters:
        parts: list[Any] = [owner._parameters[key] for owner in owners]
        if all(map(_needs_values, parts)):
            like, rows = parts[0].to_local(), sum(len(part) for part in parts)
            full = torch.empty(rows, *parts[0].shape[1:], dtype=like.dtype, device=like.device)
            drawn.append((parts, full))
            module._parameters[key] = nn.Parameter(full, requires_grad=False)
    yield
    module._parameters.clear()
    module._parameters.update(before)
    for parts, full in drawn if not is_tied else ():
        for part, part_of_full in zip(parts, full.split([len(part) for part in parts]), strict=True):
            part.to_local().copy_(_local_part(part, part_of_full))


def _local_part(parameter: DTensor, full: Tensor) -> Tensor:
    """Returns this rank's part of a full tensor by the layout of `parameter`.

    With FSDP (`_StridedShard`), the tensor-parallel dimension of the mesh was sharded first.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    order = list(range(mesh.ndim))
    if any(isinstance(placement, _StridedShard) for placement in placements):
        order.reverse()
    for i in order:
        placement: Any = placements[i]
        if not isinstance(placement, Replicate):
            shards = Shards.even(full.shape[placement.dim], mesh.size(i))
            start, stop = shards.range(mesh.get_local_rank(i))
            full = full.narrow(placement.dim, start, stop - start)
    return full
