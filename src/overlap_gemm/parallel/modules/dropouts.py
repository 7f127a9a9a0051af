"""Dropout in a parallelized model: ranks draw different numbers where they hold different elements."""

from typing import Any

import torch
from torch import Tensor, nn

from ...api.random_numbers import dropout, per_rank_random
from ..places import Sharding


class AttentionForward:
    """Forward of an attention.

    Dropout draws different numbers on each rank, because ranks hold different heads.

    Args:
        module: Attention; its `attention_dropout` may change at any time.
        group: Name of the process group.
    """

    def __init__(self, module: nn.Module, group: str):
        self.module, self.group = module, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward on this rank's heads."""
        module: Any = self.module
        if not (module.training and module.attention_dropout):
            return type(module).forward(module, *args, **kwargs)
        with per_rank_random(self.group):
            return type(module).forward(module, *args, **kwargs)


class DropoutForward:
    """Forward of a dropout of hidden states; its `p` may change at any time.

    Args:
        module: Dropout.
        sharding: State of the model.
        per_rank: True if the module gets this rank's rows, False if all ranks get the same x.
    """

    def __init__(self, module: nn.Dropout, sharding: Sharding, per_rank: bool):
        self.module, self.sharding, self.per_rank = module, sharding, per_rank

    def __call__(self, x: Tensor) -> Tensor:
        """Zeroes elements of x in training. If rows are sharded, each rank draws different numbers."""
        module = self.module
        if not (module.training and module.p):
            return x
        if not self.per_rank and not torch.compiler.is_compiling():
            self.sharding.replicated_dropout = True
        return dropout(x, module.p, self.per_rank, self.sharding.mesh)
