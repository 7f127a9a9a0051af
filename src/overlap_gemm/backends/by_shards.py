"""Backend ``decomposed``'s all-gather GEMM between GPUs with peer access: copy engines and cuBLAS.

    second stream   local shard to r-1, flag; to r-2, flag; ...                        copy engines
    stream          x[r] w    gate(r+1)   x[r+1] w    gate(r+2)   x[r+2] w ...   end   cuBLAS

A gate is a kernel of one warp that waits for a shard's flag (:mod:`overlap_gemm.gather.gate`). Workspaces,
flags and the rules for their reuse are those of the fused all-gather GEMM
(:mod:`overlap_gemm.backends.fused.gather_plans`).

Unlike the fused kernel, this implementation supports any dtype and any extents. It supports only all-gather
GEMMs between CUDA devices that have been probed and have peer access, without scales and without promises of
bits. Otherwise `decomposed` uses torch.distributed's sends and receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from .fused.launch_plan import LocalShard, Plan
from .fused.plan_cache import exchange_arguments, keep_plan, peers_for
from .fused.transport_hosts import STORES
from .op_call import CallOperands
from .scales.product_types import ProductTypes

R = TypeVar("R")


def why_not(problem: Problem) -> str | None:
    """Returns the reason copy engines cannot send a problem's shards; None if they can."""
    if not problem.spec.gathers_operand or problem.device_type != "cuda":
        return "copy engines only send shards of an operand that is gathered, between GPUs"
    if problem.is_scaled:
        return "copy engines send shards without scales"
    if problem.promises.leaves:
        return f"its products of shards are torch's, not those of invariant={problem.promises.invariant!r}"
    if problem.peer_access is None:
        return "the ranks' GPUs have not been probed"
    return problem.peer_access.why_not


def pays_alongside(problem: Problem, shards: Shards) -> bool:
    """Returns whether copy engines should send shards alongside a fused kernel.

    True if they can and a full shard has at least the machine's `copy_bytes`.
    """
    if problem.world_size == 1 or why_not(problem) is not None or problem.peer_access is None:
        return False
    nbytes = shards.chunk * problem.width * problem.dtype.itemsize
    return nbytes >= constants(problem.peer_access.arch).copy_bytes


@dataclass(frozen=True)
class ByShards:
    """Plan of a gather whose caller multiplies the shards, one after the other, as they arrive.

    Attributes:
        plan: Plan that sends the local shard and waits for the others.
        rank: This rank.
        local_place: Address of the local shard's place in this rank's gather buffer.
        gathered: `[rows, K]`: all shards' places in this rank's gather buffer.
        blocks: (rank, place of its shard) in the order of arrival, of the shards that have rows.
    """

    plan: Plan
    rank: int
    local_place: int
    gathered: Tensor
    blocks: tuple[tuple[int, Tensor], ...]

    @property
    def is_open(self) -> bool:
        """Returns whether the plan may still be used; see `Plan.is_open`."""
        return self.plan.is_open

    def signed(self, options: str) -> ByShards:
        """Returns the plan of calls with these options; see `Plan.signed`."""
        return replace(self, plan=self.plan.signed(options))

    @contextmanager
    def call(self, shard: Tensor, *others: Tensor | None) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """Queues one call of this rank, after every other fused launch of its device.

        Yields an iterator over (source rank, shard), the local shard first. Each step queues a gate, so that
        work queued after it on the current stream may read the shard. Work queued after the block must not: a
        later call overwrites the buffer. If the block raises, the call is ended all the same, so that no peer
        waits for this rank.

        Args:
            shard: Local shard, `[rows, K]`, contiguous.
            *others: Other tensors that the caller's queued work reads or writes.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: An earlier call here failed.
        """
        with (
            self._active(shard, *others) as stream,
            self._sending(shard, stream),
            self._ending(shard, stream) as arrivals,
        ):
            yield arrivals

    @contextmanager
    def alongside(self, shard: Tensor, run: Callable[[], R], *others: Tensor) -> Iterator[tuple[R, Tensor]]:
        """Queues one call whose shards are sent alongside another fused call's kernel; copies need no SM.

        Yields the result of `run` and the gathered shards `[rows, K]`, a view of the gather buffer. Work
        queued in the block on the current stream may read the shards; work queued after the block must not.

        Args:
            shard: Local shard, `[rows, K]`, contiguous.
            run: Function that queues the other call or calls.
            *others: Other tensors that the caller's queued work reads.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: An earlier call here failed.
        """
        with self._active(shard, *others) as stream:
            try:
                with self._sending(shard, stream) as second:
                    if len(shard):
                        nbytes = shard.numel() * shard.element_size()
                        self.plan.executor.copy(second, self.local_place, shard.data_ptr(), nbytes)
                    result = run()
            except BaseException:
                with self._ending(shard, stream):
                    raise
            with self._ending(shard, stream) as arrivals:
                deque(arrivals, maxlen=0)
                yield result, self.gathered

    @contextmanager
    def _active(self, *used: Tensor | None) -> Iterator[int]:
        """Yields the stream's handle; raises if an earlier call has failed."""
        assert self.plan.workspace is not None
        with self.plan.executor.active(*used) as stream:
            self.plan.workspace.raise_if_failed()
            yield stream

    @contextmanager
    def _sending(self, shard: Tensor, stream: int) -> Iterator[int]:
        """Sends the local shard during the block; yields the handle of the sending stream."""
        plan = self.plan
        assert plan.workspace is not None and plan.side_work is not None
        with plan.executor.order.lock:
            plan.workspace.captured |= plan.executor.order.follow(stream)
        plan.workspace.group.progress.events += 1
        with plan.executor.fork(stream) as second:
            plan.side_work.send(plan.executor, second, (shard.data_ptr(), 0), plan.exchange)
            yield second

    @contextmanager
    def _ending(self, shard: Tensor, stream: int) -> Iterator[Iterator[tuple[int, Tensor]]]:
        """Yields the arriving shards; after the block, waits for the rest and ends the call."""
        with self.plan.executor.order.lock, ExitStack() as at_the_end:
            exchange = self.plan.next_call(stream)
            arrivals = self._arrivals(shard, exchange, stream)
            at_the_end.callback(self.plan.gate, END, 0, exchange, stream)  # also where a gate fails
            at_the_end.callback(deque, arrivals, 0)
            yield arrivals

    def _arrivals(self, shard: Tensor, exchange: Any, stream: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (rank, shard): the local shard, then each peer's after its gate on ``stream``."""
        if len(shard):
            yield self.rank, shard
        for i, (source, block) in enumerate(self.blocks):
            self.plan.gate(source, int(i == 0), exchange, stream)
            yield source, block


def bind(
    problem: Problem, operands: CallOperands, shards: Shards, group: Group
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the bound function, see `Backend.bind`; keeping the gathered x costs a copy of each shard."""
    rows, depth, keep = shards.total, operands.x.shape[1], problem.keep
    widths = [len(weight) for weight in operands.weight]

    def run(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        (x, weights, *_), biases = operands, operands.bias or ()
        outs = [x.new_empty(rows, n) for n in widths]
        if not rows or not depth:
            for i, out in enumerate(outs):
                out.copy_(biases[i]) if biases else out.zero_()
            return x.new_empty(rows, depth) if keep else x, outs
        shard, kept = x.contiguous(), x.new_empty(rows, depth) if keep else None
        with plan_for(group, x, shards).call(shard, *weights, *biases, *outs, kept) as arrivals:
            for source, block in arrivals:
                place = slice(*shards.range(source))
                for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
                    gemm(block, weight, biases[i] if biases else None, out=out[place])
                if kept is not None:
                    kept[place].copy_(block)
        return x if kept is None else kept, outs

    return run


def plan_for(group: Group, x: Tensor, shards: Shards) -> ByShards:
    """Returns the plan of a call; the first call of a signature compiles and allocates it.

    Args:
        group: Ranks that take part.
        x: Local shard, for its device, dtype and K.
        shards: Division of the rows.

    Raises:
        DisagreementError, SymmetricMemoryError: On every rank, if one of them cannot make the plan.
        CaptureError: The plan does not exist yet, and a CUDA graph is being captured.
    """
    peers, depth = peers_for(group, x.device), x.shape[1]
    key = ("all_gather_gemm by copies", x.dtype, depth, shards, group.signed)
    return keep_plan(peers, group, key, lambda: _make_plan(peers, x.dtype, depth, shards))


def _make_plan(peers: Peers, dtype: torch.dtype, depth: int, shards: Shards) -> ByShards:
    """Returns the plan of a gather by copy engines; collective, since it may allocate."""
    executor, group = peers.executor, peers.group
    layout, rank = gather.BufferLayout.of(shards, depth, dtype.itemsize), group.rank
    row_bytes, full, size = layout[:3]
    nbytes = shards.size(rank) * row_bytes
    workspace = obtain(peers, STORES.shards_class(size))
    if not workspace.has_p2p:
        raise RuntimeError(
            f"copy engines need peer access between all ranks of group {group.name!r}, but some have none; "
            "use another backend"
        )
    exchange = exchange_arguments(workspace, STORES, shards.chunk, peers.agreed.timeout_ns, executor)
    start = workspace.size.zeroed
    buffer = workspace.memory.local[start : start + shards.total * row_bytes].view(dtype).view(-1, depth)
    others = [(rank + i) % group.size for i in range(1, group.size)]
    blocks = tuple((s, buffer[slice(*shards.range(s))]) for s in others if shards.size(s))
    local_place = buffer.data_ptr() + rank * full
    gate = gather.prepared_gate(peers)
    (pattern,) = patterns_of(ALL_GATHER_GEMM.name)
    plan = Plan(
        executor,
        pattern,
        workspace=workspace,
        exchange=exchange,
        side_work=gather.copies_of(workspace, full, LocalShard(nbytes)),
        gate=gate,
        signature=gather.signature_of(ProductTypes(dtype), layout, shards),
    )
    return ByShards(plan, rank, local_place, buffer, blocks)
