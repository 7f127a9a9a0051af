"""New weights of a parallelized model, straight into shards: from a seed the numbers of the unsharded model.

transformers initialises module after module. Each gets full parameters for that time, one module's at once,
into which every rank draws the same numbers; of these it keeps its part. So a rank holds its shards and the
largest parameters of a module, and draws as much as the unsharded model would.
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
from ..modules.generation import take_random_state
from ..modules.parts import PackedLinear
from ..places import Sharding, place_of

DONE = "_is_hf_initialized"
"""transformers' mark of modules and parameters that are not to be initialised."""


def initialize_in_shards(model: Any, sharding: Sharding) -> None:
    """Makes transformers' `init_weights` of a parallelized model, and of models in it, draw into shards.

    Args:
        model: A parallelized model of transformers; of others nothing is changed.
        sharding: Of the model.
    """
    for module in model.modules():
        if hasattr(type(module), "_initialize_weights"):
            module._initialize_weights = partial(_initialize, module)
            module.initialize_weights = partial(_initialize_all, module, sharding)


def _initialize_all(model: Any, sharding: Sharding) -> None:
    """`initialize_weights`, begun with rank 0's random numbers on every rank. Collective."""
    ranks = resolve(sharding.group)
    if ranks.size > 1 and any(_is_open(parameter) for parameter in model.parameters()):
        take_random_state(ranks, model.device)
    type(model).initialize_weights(model)


def _initialize(model: Any, module: nn.Module, *others: Any) -> None:
    """In the place of `_initialize_weights`, which transformers calls for each module."""
    if getattr(module, DONE, False):
        return
    with _in_full(module):
        type(model)._initialize_weights(model, module, *others)


def _is_open(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and not parameter.is_meta and not getattr(parameter, DONE, False)


@contextmanager
def _in_full(module: nn.Module) -> Iterator[None]:
    """Within the block a module has full parameters where they are drawn; afterwards its shards of them.

    A packed linear has one weight there, as in the unsharded model. The head draws, too, where it is tied,
    though what it draws is not taken: the embedding's is.
    """
    place = place_of(module)
    is_tied = place is not None and place.role == "head" and place.sharding.are_tied
    owners = list(module.children()) if isinstance(module, PackedLinear) else [module]
    before, drawn = dict(module._parameters), []
    for key in owners[0]._parameters:
        parts: list[Any] = [owner._parameters[key] for owner in owners]
        if all(map(_is_open, parts)):
            like, rows = parts[0].to_local(), sum(len(part) for part in parts)
            full = torch.empty(rows, *parts[0].shape[1:], dtype=like.dtype, device=like.device)
            drawn.append((parts, full))
            module._parameters[key] = nn.Parameter(full, requires_grad=False)
    yield
    module._parameters.clear()
    module._parameters.update(before)
    for parts, full in drawn if not is_tied else ():
        for part, own in zip(parts, full.split([len(part) for part in parts]), strict=True):
            part.to_local().copy_(_own_part(part, own))


def _own_part(parameter: DTensor, full: Tensor) -> Tensor:
    """This rank's part of what lies as `parameter` does; FSDP cuts what was cut before."""
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
