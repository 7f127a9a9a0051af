"""Backend ``decomposed``'s all-gather GEMM where GPUs reach each other's memory: copy engines and cuBLAS.

    second stream   own shard to r-1, flag; to r-2, flag; ...                          copy engines
    stream          x[r] w    gate(r+1)   x[r+1] w    gate(r+2)   x[r+2] w ...   end   cuBLAS

A gate is a warp that waits for a shard's flag (:mod:`overlap_gemm.kernels.gate`). Buffers, flags and their
reuse are the fused all-gather GEMM's (:mod:`overlap_gemm.backends.gather`), in the same workspaces.

The fused kernel's rival, and what there is for operands that it does not take: any dtype and extents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.geometry import END
from ..runtime.executor import Executor
from ..runtime.group import Group
from ..runtime.peers import Peers
from ..runtime.workspace import Workspace, obtain
from ..sharding import Shards
from . import gather
from .base import Problem
from .collectives import gemm
from .compiled import compiled_gate
from .plans import exchange_arguments, keep_plan, peers_for


def why_not(problem: Problem) -> str | None:
    """Why shards of a problem cannot go by copy engines, None if they can."""
    if problem.op != "all_gather_gemm" or problem.device_type != "cuda":
        return "copy engines send the shards of all_gather_gemm, between GPUs"
    if problem.reach is None:
        return "nobody asked what the ranks' GPUs reach"
    return problem.reach.why_not


@dataclass(frozen=True)
class CopyPlan:
    """All that calls of one kind have in common.

    Attributes:
        executor: where.
        workspace: the gather buffer.
        exchange: what gates take, without what belongs to a call.
        gate: the compiled gate kernel.
        rank: this one.
        nbytes: of the own shard.
        places: see `gather.places_at_peers`; none where the own shard is empty.
        blocks: (rank, where its shard comes to lie) in the order of arrival, of those that have rows.
    """

    executor: Executor
    workspace: Workspace
    exchange: Any
    gate: Any
    rank: int
    nbytes: int
    places: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, Tensor], ...]

    @property
    def is_open(self) -> bool:
        """Whether it may still be launched: until its workspace is closed, or its emulator ends."""
        return self.executor.is_open and self.workspace.is_open

    @contextmanager
    def call(self, own: Tensor, *others: Tensor | None) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """One call of this rank, behind every other fused launch of its device.

        Gives (rank, its shard), the own one first, each when what is queued next on the current stream may
        read it. If the block fails, the call ends all the same: peers do not wait for it.

        Args:
            own: The own shard, `[rows, K]`, contiguous.
            *others: What else is read or written by what the caller queues.

        Raises:
            CommTimeoutError, OverlappingCallsError: an earlier call on this workspace failed.
        """
        executor, order = self.executor, self.executor.order
        with executor.active(own, *others) as stream:
            assert self.workspace.is_open, "a plan of a closed workspace"
            self.workspace.raise_if_failed()
            with order.lock:
                self.workspace.captured |= order.follow(stream)
                exchange = self.exchange._replace(call=order.next_call())
                with executor.fork() as second:
                    gather.send(executor, second, self.workspace, self.places, own, self.nbytes)
                    arrivals = self._arrivals(own, exchange, stream)
                    try:
                        yield arrivals
                    finally:
                        deque(arrivals, maxlen=0)
                        self.gate(END, exchange, stream)

    def _arrivals(self, own: Tensor, exchange: Any, stream: int) -> Iterator[tuple[int, Tensor]]:
        if len(own):
            yield self.rank, own
        for source, block in self.blocks:
            self.gate(source, exchange, stream)
            yield source, block


def bind(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    shards: Shards,
    group: Group,
    keep: bool,
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """See `Backend.bind`; keeping the gathered x costs a copy of each shard."""
    rows, depth, widths = shards.total, x.shape[1], [len(weight) for weight in weights]

    def run(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        outs = [x.new_empty(rows, n) for n in widths]
        if not rows or not depth:
            for i, out in enumerate(outs):
                out.copy_(biases[i]) if biases else out.zero_()
            return x.new_empty(rows, depth) if keep else x, outs
        own, kept = x.contiguous(), x.new_empty(rows, depth) if keep else None
        with plan_for(group, x, shards).call(own, *weights, *biases, *outs, kept) as arrivals:
            for source, block in arrivals:
                place = slice(*shards.range(source))
                for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
                    gemm(block, weight, biases[i] if biases else None, out=out[place])
                if kept is not None:
                    kept[place].copy_(block)
        return x if kept is None else kept, outs

    return run


def plan_for(group: Group, x: Tensor, shards: Shards) -> CopyPlan:
    """The plan of a call; made, which compiles and allocates, at the first one of its kind.

    Args:
        group: the ranks.
        x: for its device, dtype and K.
        shards: of the rows.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
        CaptureError: something had to be made during CUDA graph capture.
    """
    peers, depth = peers_for(group, x.device), x.shape[1]
    key = ("all_gather_gemm by copies", x.dtype, depth, shards)
    return keep_plan(peers, key, lambda: _make_plan(peers, x.dtype, depth, shards))


def _make_plan(peers: Peers, dtype: torch.dtype, depth: int, shards: Shards) -> CopyPlan:
    executor, group = peers.executor, peers.group
    row_bytes, rank = depth * dtype.itemsize, group.rank
    full, nbytes = shards.chunk * row_bytes, shards.size(rank) * row_bytes
    workspace = obtain(peers, gather.size_class(group.size * full))
    if not workspace.reaches_all:
        raise RuntimeError("copy engines send shards, and some ranks do not reach each other's memory")
    places = gather.places_at_peers(workspace, full) if nbytes else ()
    exchange = exchange_arguments(workspace, shards.chunk, peers.agreed.timeout_ns, executor)
    exchange = exchange._replace(buffer_bytes=0)  # one buffer, whatever the epoch
    blocks = []
    for source in ((rank + i) % group.size for i in range(1, group.size)):
        start = workspace.size.zeroed + source * full
        block = workspace.memory.local[start : start + shards.size(source) * row_bytes]
        if shards.size(source):
            blocks.append((source, block.view(dtype).view(-1, depth)))
    gate = compiled_gate(executor)
    return CopyPlan(executor, workspace, exchange, gate, rank, nbytes, places, tuple(blocks))
