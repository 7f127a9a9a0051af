"""Backend `decomposed`: one GEMM per shard, overlapped with point-to-point transfers of torch.distributed.

    all_gather_gemm, rank r                        gemm_reduce_scatter, rank r
    compute  x[r]   x[r+1]  x[r+2] ...             compute  for r+1  for r+2 ...   for r (local)
    receive     x[r+1]  x[r+2] ...                 send            to r+1  to r+2 ...
    send        to r-1  to r-2 ...                 receive         from r-1  from r-2 ...

In each step every rank sends to one peer and receives from one, so no link is used twice in a step. A step is
one `batch_isend_irecv`: NCCL runs its send and its receive together. As separate transfers they could
deadlock, because two ranks might both receive first on one stream. gloo runs transfers on threads.

A wait is a stream dependency with NCCL, and blocks until the group's timeout with gloo. An empty block is
neither sent nor awaited; sender and receiver both compute that from the shards.

Between GPUs with peer access, copy engines send the shards of all_gather_gemm instead
(:mod:`overlap_gemm.backends.by_shards`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.group import Group
from ..spec import ALL_GATHER_GEMM, GEMM_ALL_GATHER, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER, OpSpec
from ..spec.sharding import Shards
from ..tuning.space import constants
from ..tuning.spans import Waitable, watch
from . import by_shards
from .base import Portable, Problem
from .op_call import CallOperands, Joined
from .portable_arithmetic import Arithmetic

_TAG_BASE = 1 << 30
"""First tag of this module, 1 << 30, above the tags that users are likely to use; a tag is a C int."""


class _Exchange:
    """Transfers of one call, posted step by step.

    gloo matches messages by (peer, tag), and each call of a group uses the next tag. A call therefore cannot
    receive messages of an earlier call that failed midway. NCCL matches messages by order alone. Within a
    call, messages of a pair of ranks match in the order in which they are posted.

    The constructor compares the call with the peers' (`Group.enter`): DisagreementError on every rank if they
    differ. Construct it after all memory of the call is allocated: from then on peers wait for this rank's
    messages, and nothing may raise on this rank alone.

    Args:
        op: Name of the op, for messages.
        group: Ranks that take part.
    """

    def __init__(self, op: str, group: Group):
        if group.enter is not None and group.size > 1:
            group.enter("exchange")
        self._op = op
        self._group = group
        self._tag = _TAG_BASE + group.progress.exchanges % _TAG_BASE
        group.progress.exchanges += 1

    def post(self, send: Tensor, to: int, receive: Tensor, source: int) -> "Transfer":
        """Starts one step and returns its transfer; empty blocks are skipped.

        Args:
            send: Contiguous block to send.
            to: Rank in the group that receives it.
            receive: Contiguous block to receive into.
            source: Rank in the group that sends it.
        """
        transfers = [
            dist.P2POp(move, block, group=self._group.process_group, tag=self._tag, group_peer=peer)
            for move, block, peer in ((dist.isend, send, to), (dist.irecv, receive, source))
            if block.numel()
        ]
        works = dist.batch_isend_irecv(transfers) if transfers else []
        return Transfer(self._op, self._group, to, source, watch(f"to {to}, from {source}", works))


@dataclass(frozen=True)
class Transfer:
    """Posted step of an exchange.

    Attributes:
        op: Name of the op, for messages.
        group: Ranks that take part.
        to: Rank to which this rank sends.
        source: Rank from which this rank receives.
        works: Transfers to wait for.
    """

    op: str
    group: Group
    to: int
    source: int
    works: Sequence[Waitable]

    def wait(self) -> None:
        """Waits until the block has arrived and the sent block may be overwritten; on CUDA in stream order.

        Raises:
            RuntimeError: A peer has ended, or did not send or receive within the group's timeout.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            group = self.group
            raise RuntimeError(
                f"{self.op} on rank {group.global_rank(group.rank)}: the exchange with rank "
                f"{group.global_rank(self.source)} (sends to us) and rank {group.global_rank(self.to)} "
                f"(receives from us) failed: {error}"
            ) from error


class Decomposed(Portable):
    """Backend of P GEMMs and transfers in ring order, for any device and process group."""

    name = "decomposed"

    def why_slower(self, problem: Problem) -> str | None:
        """Returns the reason `auto` excludes this backend.

        Returns None only if copy engines send the shards and their times are known.
        """
        if problem.world_size == 1:
            return "one rank has nothing to transfer"
        if problem.device_type == "cuda":
            if by_shards.why_not(problem):
                return "its transfers take more host time than the overlap saves (benchmarks/README.md, H200)"
            assert problem.peer_access is not None, "by_shards.why_not says so"
            if problem.world_size > constants(problem.peer_access.arch).copies_world:
                return "it has not been measured between so many GPUs; request it with backend='decomposed'"
            return problem.peer_access.uncalibrated
        return "on CPUs it takes more time than the overlap saves (benchmarks/README.md, 2 CPU ranks)"

    def bind(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Returns the bound function, see `Backend.bind`; if possible, copy engines send the shards."""
        if by_shards.why_not(problem) is None:
            return by_shards.bind(problem, operands, shards, group)
        return super().bind(problem, operands, shards, group)

    def all_gather_gemm(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> tuple[Tensor, list[Tensor]]:
        """Multiplies the local shard first, then the others in ring order, the order of arrival.

        See `Portable.all_gather_gemm`.
        """
        x, weights, biases, *_ = operands
        if group.size == 1:
            return x, how.products(x, weights, biases)
        gathered = x.new_empty(shards.total, x.shape[1])
        outs = [x.new_empty(shards.total, weight.shape[0]) for weight in weights]

        def rows(of: Tensor, rank: int) -> Tensor:
            return of[slice(*shards.range(rank))]

        def compute(block: Tensor, rank: int) -> None:
            for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
                how.product(block, weight, biases[i] if biases else None, out=rows(out, rank))

        exchange = _Exchange(ALL_GATHER_GEMM.name, group)
        steps = [
            (source, exchange.post(x, to, rows(gathered, source), source))
            for to, source in _ring(group, towards=-1)
        ]
        compute(x, group.rank)
        rows(gathered, group.rank).copy_(x)
        for source, step in steps:
            step.wait()
            compute(rows(gathered, source), source)
        return gathered, outs

    def gemm_reduce_scatter(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Computes peers' shards first, in ring order, and the local shard last.

        See `Portable.gemm_reduce_scatter`.
        """
        out = operands.x.new_empty(shards.size(group.rank), operands.weight.shape[0])
        self._reduce_scatter(GEMM_REDUCE_SCATTER.name, operands, shards, group, how, out)
        return out

    def gemm_all_reduce(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Runs the reduce-scatter, then sends the local sums to every peer.

        See `Portable.gemm_all_reduce`.
        """
        out = operands.x.new_empty(shards.total, operands.weight.shape[0])
        local = out[slice(*shards.range(group.rank))]
        exchange = self._reduce_scatter(GEMM_ALL_REDUCE.name, operands, shards, group, how, local)
        steps = [
            exchange.post(local, to, out[slice(*shards.range(source))], source)
            for to, source in _ring(group, towards=-1)
        ]
        for step in steps:
            step.wait()
        return out

    def gemm_all_gather(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Computes P panels of rows: one is sent while the next one is computed.

        See `Portable.gemm_all_gather`.
        """
        x, weight, bias, *_ = operands
        out = x.new_empty(x.shape[0], shards.total)
        local = x.new_empty(x.shape[0], weight.shape[0])
        received = [x.new_empty(x.shape[0], shards.size(source)) for source in range(group.size)]
        panels = Shards.even(x.shape[0], group.size)
        exchange = _Exchange(GEMM_ALL_GATHER.name, group)
        arrivals = []
        for panel in range(group.size):
            rows = slice(*panels.range(panel))
            how.product(x[rows], weight, bias, out=local[rows])
            for to, source in _ring(group, towards=-1):
                block = received[source][rows]
                step = exchange.post(local[rows], to, block, source)
                arrivals.append((step, block, out[rows, slice(*shards.range(source))]))
            out[rows, slice(*shards.range(group.rank))] = local[rows]
        for step, block, place in arrivals:
            step.wait()
            place.copy_(block)
        return out

    def by_collective(
        self, spec: OpSpec, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> tuple[Any, list[Tensor]]:
        """Runs an op with a replicated weight; an all-to-all is overlapped, an all-gather is not."""
        (move,) = spec.sent
        if move.kind != "all_to_all":
            return super().by_collective(spec, operands, shards, group, how)
        if move == spec.operand_move:
            return self._by_panels(spec.name, operands, shards, group, how)
        return operands.x, self._by_columns(spec.name, operands, shards, group, how)

    def _by_columns(
        self, op: str, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> list[Tensor]:
        """Computes each rank's columns in ring order: one block is sent while the next is computed."""
        x, weights, biases, *_ = operands
        columns = [Shards.even(weight.shape[0], group.size) for weight in weights]
        outs = [x.new_empty(shards.total, of.size(group.rank)) for of in columns]
        blocks = [
            [x.new_empty(x.shape[0], of.size(to)) for to, _ in _ring(group, towards=1)] for of in columns
        ]
        exchange = _Exchange(op, group)
        steps = []
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):

            def compute(rank: int, block: Tensor) -> Tensor:
                place = slice(*columns[i].range(rank))  # noqa: B023
                bias = biases[i][place] if biases else None  # noqa: B023
                return how.product(x, weight[place], bias, out=block)  # noqa: B023

            for (to, source), block in zip(_ring(group, towards=1), blocks[i], strict=True):
                steps.append(exchange.post(compute(to, block), to, out[slice(*shards.range(source))], source))
            compute(group.rank, out[slice(*shards.range(group.rank))])
        for step in steps:
            step.wait()
        return outs

    def _by_panels(
        self, op: str, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> tuple[Any, list[Tensor]]:
        """Cuts local rows into P panels; a panel is multiplied while the next ones arrive.

        Matrices of a list along K are sent side by side.
        """
        x, weights, biases, *_ = operands
        of_weight, rows = weights[0], shards.size(group.rank)
        depths = of_weight.widths if isinstance(x, Joined) else of_weight.shape[1:]
        columns = [Shards.even(depth, group.size) for depth in depths]
        widths = [[of.size(source) for of in columns] for source in range(group.size)]
        received = [x.new_empty(rows, sum(of_source)) for of_source in widths]
        matrices = tuple([x.new_empty(rows, depth) for depth in depths])
        gathered = Joined(matrices) if isinstance(x, Joined) else matrices[0]
        sent = torch.cat(x.parts, 1) if isinstance(x, Joined) else x
        outs = [x.new_empty(rows, weight.shape[0]) for weight in weights]
        exchange = _Exchange(op, group)

        def panel_of(rank: int, panel: int) -> slice:
            """Returns the rows of a panel among the rows of `rank`."""
            return slice(*Shards.even(shards.size(rank), group.size).range(panel))

        def columns_for(rank: int) -> Tensor:
            return sent[slice(*shards.range(rank))]

        panels = []
        for panel in range(group.size):
            place = panel_of(group.rank, panel)
            panels.append(
                [
                    exchange.post(columns_for(to)[panel_of(to, panel)], to, received[source][place], source)
                    for to, source in _ring(group, towards=1)
                ]
            )
        received[group.rank] = columns_for(group.rank)
        for panel, steps in enumerate(panels):
            place = panel_of(group.rank, panel)
            for step in steps:
                step.wait()
            for source, block in enumerate(received):
                of_each = zip(matrices, columns, block[place].split(widths[source], 1), strict=True)
                for matrix, of, part in of_each:
                    matrix[place, slice(*of.range(source))] = part
            for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
                how.product(gathered[place], weight, biases[i] if biases else None, out=out[place])
        return gathered, outs

    def _reduce_scatter(
        self,
        op: str,
        operands: CallOperands,
        shards: Shards,
        group: Group,
        how: Arithmetic,
        out: Tensor,
    ) -> _Exchange:
        """Fills `out` with this rank's rows of the sum; returns the exchange, for further steps."""
        x, weight, bias, *_ = operands
        dtype, columns = how.type_of(x), weight.shape[0]
        received = x.new_empty(group.size, shards.size(group.rank), columns, dtype=dtype)
        partials = x.new_empty(shards.total - len(out), columns, dtype=dtype)
        blocks = iter(partials.split([shards.size(to) for to, _ in _ring(group, towards=1)]))
        exchange = _Exchange(op, group)
        steps = []
        for to, source in _ring(group, towards=1):
            partial = how.partial(x[slice(*shards.range(to))], weight, out=next(blocks))
            steps.append(exchange.post(partial, to, received[source], source))
        how.partial(x[slice(*shards.range(group.rank))], weight, out=received[group.rank])
        for step in steps:
            step.wait()
        how.sum(received.unbind(), bias, x.dtype, out)
        return exchange


def _ring(group: Group, towards: int) -> list[tuple[int, int]]:
    """Returns (to, source) at steps 1 to P - 1; `towards` is 1 to send to higher ranks, -1 to lower ones."""
    return [
        ((group.rank + towards * step) % group.size, (group.rank - towards * step) % group.size)
        for step in range(1, group.size)
    ]
