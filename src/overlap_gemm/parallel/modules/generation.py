"""`generate` of a parallelized model: every rank draws, and stops, as rank 0 does."""

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

OF_THE_IDS = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
"""transformers' criteria that the ids alone decide, so that all ranks come to the same."""


def generate(model: Any, group_name: str, *args: Any, **kwargs: Any) -> Any:
    """`model.generate`, begun with rank 0's random numbers on every rank.

    Logits are the same on all ranks, so from there on sampled tokens are, too, whatever the ranks' generators
    were before; afterwards they are in step.

    Args:
        model: A parallelized model.
        group_name: Its ranks.
        *args: As for transformers' `generate`.
        **kwargs: The same.
    """
    group = resolve(group_name)
    if group.size > 1:
        take_random_state(group, model.device)
    with _replicated_logits(model):
        return type(model).generate(model, *args, **kwargs)


@contextmanager
def _replicated_logits(model: nn.Module) -> Iterator[None]:
    """Within the block logits are replicated, which `generate` wants, of `logits="sharded"`, too."""
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


def take_random_state(group: Group, device: torch.device) -> None:
    """Makes rank 0's generators (the CPU's, and the device's) every rank's. Collective."""
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    states = group.all_gather_object(own)[0]
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def stopping_criteria(model: Any, group_name: str, *args: Any, **kwargs: Any) -> Any:
    """`model._get_stopping_criteria`; of those that may differ between ranks, a clock's, rank 0's holds."""
    criteria = type(model)._get_stopping_criteria(model, *args, **kwargs)
    group = resolve(group_name)
    if group.size == 1:
        return criteria
    own = [c if type(c).__name__ in OF_THE_IDS else AsRankZero(c, group) for c in criteria]
    return type(criteria)(own)


class AsRankZero:
    """A stopping criterion, decided by rank 0 for all: one broadcast of a byte per sequence and token.

    Args:
        criterion: Of transformers, or of the user.
        group: The model's ranks.
    """

    def __init__(self, criterion: Any, group: Group):
        self.criterion, self.group = criterion, group

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which sequences are done, `[b]`."""
        own = torch.as_tensor(self.criterion(input_ids, scores, **kwargs), device=input_ids.device)
        done = own.to(torch.uint8).expand(input_ids.shape[0]).contiguous()
        dist.broadcast(done, group=self.group.process_group, group_src=0)
        return done.bool()
