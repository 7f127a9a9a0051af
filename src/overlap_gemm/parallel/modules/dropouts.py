"""Dropout in a parallelized model: ranks draw different numbers where they hold different elements."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...api.random_numbers import dropout, per_rank_random
from ...spec.promises import Invariant
from ..places import Sharding
from .invariant import attention


class AttentionForward:
    """Forward of an attention.

    Dropout draws different numbers on each rank, because ranks hold different heads.

    Args:
        module: Attention; its `attention_dropout` may change at any time.
        group: Name of the process group.
        invariant: Bitwise invariance of the model, see `invariant.attention`.
    """

    def __init__(self, module: nn.Module, group: str, invariant: Invariant | None = None):
        self.module, self.group, self.invariant = module, group, invariant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward on this rank's heads."""
        module: Any = self.module
        draws = module.training and module.attention_dropout
        x: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        with per_rank_random(self.group) if draws else nullcontext(), attention(self.invariant, x):
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
