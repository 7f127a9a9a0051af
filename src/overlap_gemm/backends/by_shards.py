"""Backend ``decomposed``'s all-gather GEMM where GPUs reach each other's memory: copy engines and cuBLAS.

    second stream   own shard to r-1, flag; to r-2, flag; ...                          copy engines
    stream          x[r] w    gate(r+1)   x[r+1] w    gate(r+2)   x[r+2] w ...   end   cuBLAS

A gate is a warp that waits for a shard's flag (:mod:`overlap_gemm.gather.gate`). Buffers, flags and their
reuse are the fused all-gather GEMM's (:mod:`overlap_gemm.backends.fused.gather_plans`), in the same
workspaces.

The fused kernel's rival, and what there is for operands that it does not take: any dtype and extents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..exchange.geometry import END
from ..runtime.group import Group
from ..runtime.memory.workspace import obtain
from ..runtime.peers import Peers
from ..spec import ALL_GATHER_GEMM, patterns_of
from ..spec.sharding import Shards
from ..tuning.space import constants
from .base import Problem
from .collectives import gemm
from .fused import gather_plans as gather
from .fused.compiled import compiled_gate
from .fused.launch_plan import OwnShard, Plan
from .fused.plan_cache import exchange_arguments, keep_plan, peers_for
from .fused.ways import STORES

R = TypeVar("R")


def why_not(problem: Problem) -> str | None:
    """Why shards of a problem cannot go by copy engines, None if they can."""
    if not problem.spec.gathers_operand or problem.device_type != "cuda":
        return "copy engines send shards of an operand, between GPUs"
    if problem.is_scaled:
        return "copy engines send shards without scales"
    if problem.promises.leaves:
        return f"its products of shards are torch's, not those of invariant={problem.promises.invariant!r}"
    if problem.reach is None:
        return "the ranks' GPUs have not been probed"
    return problem.reach.why_not


def pays_alongside(problem: Problem, shards: Shards) -> bool:
    """Whether shards should go by copy engines alongside a fused kernel: if they can, and are not small."""
    if problem.world_size == 1 or why_not(problem) is not None or problem.reach is None:
        return False
    nbytes = shards.chunk * problem.width * problem.dtype.itemsize
    return nbytes >= constants(problem.reach.arch).copy_bytes


@dataclass(frozen=True)
class ByShards:
    """A plan (`plan`) without a product: the caller multiplies, shard after shard.

    Attributes:
        plan: sends the own shard, and waits for the others.
        rank: this one.
        own_place: address of the own shard's place in the own buffer.
        gathered: `[rows, K]`: all shards' places in the own buffer.
        blocks: (rank, where its shard comes to lie) in the order of arrival, of those that have rows.
    """

    plan: Plan
    rank: int
    own_place: int
    gathered: Tensor
    blocks: tuple[tuple[int, Tensor], ...]

    @property
    def is_open(self) -> bool:
        """See `Plan.is_open`."""
        return self.plan.is_open

    @contextmanager
    def call(self, own: Tensor, *others: Tensor | None) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """One call of this rank, after every other fused launch of its device.

        Gives (rank, its shard), the own one first, each when what is queued next on the current stream may
        read it. If the block fails, the call ends all the same: peers do not wait for it.

        Args:
            own: The own shard, `[rows, K]`, contiguous.
            *others: What else is read or written by what the caller queues.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: an earlier call here failed.
        """
        with (
            self._active(own, *others) as stream,
            self._sending(own, stream),
            self._ending(own, stream) as arrivals,
        ):
            yield arrivals

    @contextmanager
    def alongside(self, own: Tensor, run: Callable[[], R], *others: Tensor) -> Iterator[tuple[R, Tensor]]:
        """One call whose shards travel alongside another fused one's kernel: copies take no SM.

        Gives what `run` returned, and the gathered shards `[rows, K]`, which what is queued in the block on
        the current stream may read. They lie in the gather buffer: nothing may read them after the block.

        Args:
            own: The own shard, `[rows, K]`, contiguous.
            run: Queues the other call, or several.
            *others: What else is read by what the caller queues.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: an earlier call here failed.
        """
        with self._active(own, *others) as stream:
            try:
                with self._sending(own, stream) as second:
                    if len(own):
                        nbytes = own.numel() * own.element_size()
                        self.plan.executor.copy(second, self.own_place, own.data_ptr(), nbytes)
                    result = run()
            except BaseException:
                with self._ending(own, stream):
                    raise
            with self._ending(own, stream) as arrivals:
                deque(arrivals, maxlen=0)
                yield result, self.gathered

    @contextmanager
    def _active(self, *used: Tensor | None) -> Iterator[int]:
        """Gives the stream's handle, unless an earlier call has failed."""
        assert self.plan.workspace is not None
        with self.plan.executor.active(*used) as stream:
            self.plan.workspace.raise_if_failed()
            yield stream

    @contextmanager
    def _sending(self, own: Tensor, stream: int) -> Iterator[int]:
        """In the block the own shard is under way; gives the handle of its stream."""
        plan = self.plan
        assert plan.workspace is not None and plan.travel is not None
        with plan.executor.order.lock:
            plan.workspace.captured |= plan.executor.order.follow(stream)
        plan.workspace.group.progress.events += 1
        with plan.executor.fork() as second:
            plan.travel.send(plan.executor, second, (own.data_ptr(), 0), plan.exchange)
            yield second

    @contextmanager
    def _ending(self, own: Tensor, stream: int) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """In the block the shards arrive; after it, those that have not yet, and the call's end."""
        with self.plan.executor.order.lock, ExitStack() as at_the_end:
            exchange = self.plan.next_call(stream)
            arrivals = self._arrivals(own, exchange, stream)
            at_the_end.callback(self.plan.gate, END, 0, exchange, stream)  # also where a gate fails
            at_the_end.callback(deque, arrivals, 0)
            yield arrivals

    def _arrivals(self, own: Tensor, exchange: Any, stream: int) -> Iterator[tuple[int, Tensor]]:
        if len(own):
            yield self.rank, own
        for i, (source, block) in enumerate(self.blocks):
            self.plan.gate(source, int(i == 0), exchange, stream)
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


def plan_for(group: Group, x: Tensor, shards: Shards) -> ByShards:
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


def _make_plan(peers: Peers, dtype: torch.dtype, depth: int, shards: Shards) -> ByShards:
    executor, group = peers.executor, peers.group
    row_bytes, rank = depth * dtype.itemsize, group.rank
    full, nbytes = shards.chunk * row_bytes, shards.size(rank) * row_bytes
    workspace = obtain(peers, STORES.shards_class(group.size * full))
    if not workspace.reaches_all:
        raise RuntimeError("copy engines send shards, and some ranks do not reach each other's memory")
    exchange = exchange_arguments(workspace, STORES, shards.chunk, peers.agreed.timeout_ns, executor)
    exchange = exchange._replace(buffer_bytes=0)  # one buffer, whatever the epoch
    start = workspace.size.zeroed
    buffer = workspace.memory.local[start : start + shards.total * row_bytes].view(dtype).view(-1, depth)
    others = [(rank + i) % group.size for i in range(1, group.size)]
    blocks = tuple((s, buffer[slice(*shards.range(s))]) for s in others if shards.size(s))
    own_place = buffer.data_ptr() + rank * full
    gate = peers.prepare("gate", "compiling the gate of all_gather_gemm", lambda: compiled_gate(executor))
    (pattern,) = patterns_of(ALL_GATHER_GEMM.name)
    plan = Plan(
        executor,
        pattern,
        workspace=workspace,
        exchange=exchange,
        travel=gather.copies_of(workspace, full, OwnShard(nbytes)),
        gate=gate,
        signature=gather.signature_of(dtype, row_bytes, shards),
    )
    return ByShards(plan, rank, own_place, buffer, blocks)
