"""`generate` of a parallelized model: every rank draws and stops as rank 0 does."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from ...runtime.group import Group, resolve
from .styles import ColwiseForward

DECIDED_BY_IDS = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
"""transformers' criteria that depend on the ids only, so that all ranks get the same result."""


def generate(model: Any, group_name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs `model.generate` from rank 0's random state on every rank.

    Logits are the same on all ranks, so sampled tokens are the same, whatever the states of the ranks'
    generators were before. Afterwards the generators are in the same state.

    Args:
        model: Parallelized model.
        group_name: Name of the process group.
        *args: Positional arguments of transformers' `generate`.
        **kwargs: Keyword arguments of transformers' `generate`.
    """
    group = resolve(group_name)
    if group.size > 1:
        copy_random_state_of_rank_zero(group, model.device)
    with _replicated_logits(model):
        return type(model).generate(model, *args, **kwargs)


@contextmanager
def _replicated_logits(model: nn.Module) -> Iterator[None]:
    """Replicates logits within the block, as `generate` requires, also with `logits="sharded"`."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    heads = [
        each for each in forwards if isinstance(each, ColwiseForward) and not each.style.use_local_output
    ]
    styles = [head.style for head in heads]
    for head in heads:
        head.style = copy(head.style)
        head.style.output_layout, head.style.use_local_output = Replicate(), True
    try:
        yield
    finally:
        for head, style in zip(heads, styles, strict=True):
            head.style = style


def copy_random_state_of_rank_zero(group: Group, device: torch.device) -> None:
    """Sets the generators (the CPU's, and the device's) to rank 0's state on every rank. Collective."""
    local_states = [torch.get_rng_state()]
    if device.type == "cuda":
        local_states.append(torch.cuda.get_rng_state(device))
    states = group.all_gather_object(local_states)[0]
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def stopping_criteria(model: Any, group_name: str, *args: Any, **kwargs: Any) -> Any:
    """Returns `model._get_stopping_criteria`; rank 0 decides criteria that may differ by rank (a clock)."""
    criteria = type(model)._get_stopping_criteria(model, *args, **kwargs)
    group = resolve(group_name)
    if group.size == 1:
        return criteria
    wrapped = [c if type(c).__name__ in DECIDED_BY_IDS else AsRankZero(c, group) for c in criteria]
    return type(criteria)(wrapped)


class AsRankZero:
    """Stopping criterion decided by rank 0 for all: one broadcast of a byte per sequence and token.

    Args:
        criterion: Criterion of transformers or of the user.
        group: Process group of the model.
    """

    def __init__(self, criterion: Any, group: Group):
        self.criterion, self.group = criterion, group

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns `[b]`: True for the sequences that are complete."""
        local = torch.as_tensor(self.criterion(input_ids, scores, **kwargs), device=input_ids.device)
        done = local.to(torch.uint8).expand(input_ids.shape[0]).contiguous()
        dist.broadcast(done, group=self.group.process_group, group_src=0)
        return done.bool()
