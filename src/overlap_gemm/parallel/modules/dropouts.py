"""Dropout within a parallelized model: other numbers on each rank where each has other elements."""

from typing import Any

import torch
from torch import Tensor, nn

from ...api.random_numbers import dropout, per_rank_random
from ..places import Sharding


class AttentionForward:
    """The forward of an attention, whose dropout draws other numbers on each rank, which has other heads.

    Args:
        module: The attention; its `attention_dropout` may be set at any time.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, group: str):
        self.module, self.group = module, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on this rank's heads."""
        module: Any = self.module
        if not (module.training and module.attention_dropout):
            return type(module).forward(module, *args, **kwargs)
        with per_rank_random(self.group):
            return type(module).forward(module, *args, **kwargs)


class DropoutForward:
    """The forward of a dropout of hidden states, whose `p` may be set at any time.

    Args:
        module: The dropout.
        sharding: Of the model.
        per_rank: The module sees this rank's rows.
    """

    def __init__(self, module: nn.Dropout, sharding: Sharding, per_rank: bool):
        self.module, self.sharding, self.per_rank = module, sharding, per_rank

    def __call__(self, x: Tensor) -> Tensor:
        """Zeroes elements of x in training; rows of the sequence are drawn by their rank."""
        module = self.module
        if not (module.training and module.p):
            return x
        if not self.per_rank and not torch.compiler.is_compiling():
            self.sharding.replicated_dropout = True
        return dropout(x, module.p, self.per_rank, self.sharding.mesh)
