"""Random numbers of tensor-parallel ranks: the same where they hold the same, others where they do not.

torch's own generators are the replicated ones: seeded alike (`torch.manual_seed(seed)` with one seed on every
rank of the group) they draw alike, as long as every rank draws as much. What belongs to one rank, dropout of
its rows or its features, is drawn within `per_rank_random`, which costs each rank one number of them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime.group import GroupLike, find, group_name


@contextmanager
def per_rank_random(tp_group: GroupLike = None) -> Iterator[None]:
    """Within the block torch's generators (the CPU's, and the current GPU's) draw other numbers on each rank.

    After it they go on, on every rank alike, as if one number had been drawn, however much the ranks drew
    within. Recomputation (`torch.utils.checkpoint`) draws the same again, since it restores the generators.

    Args:
        tp_group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.

    Yields:
        None.

    Raises:
        RuntimeError: torch.compile traces it, or a CUDA graph is being captured: the host draws the seed.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("per_rank_random seeds generators, which torch.compile cannot trace")
    rank = find(tp_group).rank
    seed = (int(torch.randint(2**62, (), device="cpu")) + rank) % 2**62
    generators = _generators()
    _around.states.append([generator.get_state() for generator in generators])
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, _around.states.pop(), strict=True):
            generator.set_state(state)


@contextmanager
def replicated_random() -> Iterator[None]:
    """Within the block, inside `per_rank_random`, torch's generators draw alike on every rank, as outside."""
    own = [generator.get_state() for generator in _generators()]
    states, _around.states = _around.states, []
    try:
        for generator, state in zip(_generators(), states[0], strict=True):
            generator.set_state(state)
        yield
    finally:
        states[0] = [generator.get_state() for generator in _generators()]
        _around.states = states
        for generator, state in zip(_generators(), own, strict=True):
            generator.set_state(state)


class _Around(threading.local):
    """States of the generators outside of each `per_rank_random` that is open, the outermost first."""

    def __init__(self) -> None:
        self.states: list[list[Tensor]] = []


_around = _Around()


def _generators() -> list[torch.Generator]:
    """Returns torch's generators of the CPU and, where CUDA is in use, of the current device."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def dropout(x: Tensor, p: float, per_rank: bool, tp_group: GroupLike) -> Tensor:
    """Zeroes elements of x, drawn by each rank for itself or by all alike, and scales the others."""
    if not per_rank and (torch.compiler.is_compiling() or not _around.states):
        return F.dropout(x, p)
    with per_rank_random(tp_group) if per_rank else replicated_random():
        return F.dropout(x, p)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` alongside tensor-parallel layers.

    Args:
        p: Probability of a zero.
        per_rank: The input is this rank's part, rows of the sequence or features: each rank draws for itself.
            Otherwise all ranks have the same input and must draw the same, which they do if their generators
            are in step.
        tp_group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
    """

    def __init__(self, p: float = 0.5, *, per_rank: bool, tp_group: GroupLike = None):
        super().__init__(p)
        self.per_rank, self.tp_group = per_rank, group_name(tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes elements of x, and scales the others; x itself outside of training."""
        if not self.training or not self.p:
            return x
        return dropout(x, self.p, self.per_rank, self.tp_group)

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"p={self.p}, per_rank={self.per_rank}"
