"""Random numbers of tensor-parallel ranks: equal for replicated tensors, different for sharded ones.

torch's generators are replicated: with `torch.manual_seed(seed)` and the same seed on every rank of the group
they draw equal numbers, if every rank draws equally many. Draws for one rank's part (dropout of its rows or
features) belong in `per_rank_random`, which takes one number from each generator.
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
    """Makes torch's generators (the CPU's, and with CUDA the current GPU's) differ by rank within the block.

    After the block they continue equally on every rank, as if one number had been drawn, however much the
    ranks drew in it. Recomputation (`torch.utils.checkpoint`) draws the same numbers again, since it restores
    the generators. Generators belong to the process: two threads that draw, in blocks or outside, change each
    other's numbers.

    Args:
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Yields:
        None.

    Raises:
        RuntimeError: torch.compile traces it, or a CUDA graph is being captured: the host draws the seed.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "per_rank_random seeds generators, which torch.compile cannot trace: call it eagerly"
        )
    rank = find(tp_group).rank
    seed = (int(torch.randint(2**62, (), device="cpu")) + rank) % 2**62
    generators = _generators()
    _enclosing.states.append([generator.get_state() for generator in generators])
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, _enclosing.states.pop(), strict=True):
            generator.set_state(state)


@contextmanager
def replicated_random() -> Iterator[None]:
    """Restores, within a block inside `per_rank_random`, the replicated state of torch's generators."""
    per_rank_states = [generator.get_state() for generator in _generators()]
    states, _enclosing.states = _enclosing.states, []
    try:
        for generator, state in zip(_generators(), states[0], strict=True):
            generator.set_state(state)
        yield
    finally:
        states[0] = [generator.get_state() for generator in _generators()]
        _enclosing.states = states
        for generator, state in zip(_generators(), per_rank_states, strict=True):
            generator.set_state(state)


class _Enclosing(threading.local):
    """States of the generators outside of each open `per_rank_random`, the outermost first."""

    def __init__(self) -> None:
        self.states: list[list[Tensor]] = []


_enclosing = _Enclosing()


def _generators() -> list[torch.Generator]:
    """Returns torch's generators of the CPU and, if CUDA is in use, of the current device."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def dropout(x: Tensor, p: float, per_rank: bool, tp_group: GroupLike) -> Tensor:
    """Zeroes elements of x, drawn per rank or equally on all ranks, and scales the others."""
    if not per_rank and (torch.compiler.is_compiling() or not _enclosing.states):
        return F.dropout(x, p)
    with per_rank_random(tp_group) if per_rank else replicated_random():
        return F.dropout(x, p)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` for models with tensor-parallel layers.

    Args:
        p: Probability of a zero.
        per_rank: True: the input is this rank's part (rows of the sequence, or features), and each rank draws
            its own numbers. False: all ranks have the same input and draw the same numbers, if their
            generators have the same state.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
    """

    def __init__(self, p: float = 0.5, *, per_rank: bool, tp_group: GroupLike = None):
        super().__init__(p)
        self.per_rank, self.tp_group = per_rank, group_name(tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes elements of x and scales the others; returns x outside of training."""
        if not self.training or not self.p:
            return x
        return dropout(x, self.p, self.per_rank, self.tp_group)

    def extra_repr(self) -> str:
        """Returns the arguments for `print(module)`."""
        return f"p={self.p}, per_rank={self.per_rank}"
