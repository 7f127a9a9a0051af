"""Mixtures of experts, cut by features: every rank has a part of every expert. Right, and not fast.

Every rank routes all tokens, alike, and multiplies them by its part of the experts' features; the partial
results are summed. Under sequence parallelism the tokens are gathered before, and each rank keeps its rows
after. The products are transformers' own: nothing overlaps, and small experts become smaller ones.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..lowering import total_extent
from ..moves import for_each_rank, join_shards, keep_shard, sum_over_ranks
from .parts import SEQUENCE_DIM, LengthFor, Localized

PLACEMENTS: dict[str, Placement] = {
    "gate_up_proj": _StridedShard(1, split_factor=2),  # [E, 2I, H]: of the gates and of the ups each a part
    "down_proj": Shard(2),  # [E, H, I]
}
"""How the parameters of a family's experts lie."""


class ExpertsForward:
    """The forward of the experts: their own, on this rank's features, summed over the ranks.

    Args:
        module: The experts, their parameters placed as `PLACEMENTS` says.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, group: str):
        self.module, self.group = module, group

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, H]` and the experts and weights of each token, the same on every rank."""
        hidden_states, top_k_weights = (for_each_rank(x, self.group) for x in (hidden_states, top_k_weights))
        own = type(self.module).forward(
            Localized(self.module, None), hidden_states, top_k_index, top_k_weights
        )
        return sum_over_ranks(own, self.group)


class GatherTokens:
    """Pre-forward hook of a mixture of experts: its input, sharded by rows, becomes whole on every rank."""

    def __init__(self, group: str, length: LengthFor):
        self.group, self.length = group, length

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Called by torch before the mixture."""
        own, *others = args
        rows = own.shape[SEQUENCE_DIM]
        facts = (("op", "a mixture of experts"),)
        total = total_extent("a mixture of experts", "rows", self.length(), rows, own, self.group, facts)
        return join_shards(own, SEQUENCE_DIM, total, self.group), *others


class KeepTokens:
    """Forward hook of a mixture of experts: of its output each rank keeps its rows."""

    def __init__(self, group: str):
        self.group = group

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Called by torch after the mixture."""
        return keep_shard(out, SEQUENCE_DIM, self.group)
