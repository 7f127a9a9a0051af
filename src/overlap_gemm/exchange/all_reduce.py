"""GEMM all-reduce as ops of the fused kernel, in one shot or in two.

Rank ``r`` computes ``a @ b.T`` for all rows, with its share of K. The sum over the ranks is the output of
every rank, bit for bit the same.

**One-shot** (few rows: the number of trips is decisive):

    comm lane       bulk stores of each partial tile into every rank's slot[source][tile]; then the flags
    receive role    per tile: waits for every source's flag, sums the slots in fp32 in rank order, adds the
                    bias, rounds once, stores. All ranks add the same numbers in the same order;
                    then, if the epilogue visits complete rows, see :mod:`overlap_gemm.exchange.complete_rows`

**Two-shot** (more rows: the number of bytes is decisive): a GEMM reduce-scatter along the columns whose sums
are sent on. No caller sees the shards, so they suit the tiles: columns, in multiples of the narrowest tile's.
With few rows, shards of rows would be smaller than a tile, and every rank would multiply P tiles for one.

    comm lane       each partial tile to the slot[source][tile] of the owner of its columns; then its flag
    receive role    1. per unit of a local tile: the sum, as in reduce-scatter, stored in the output and,
                       in the same chunks of 16 bytes, in result slot[owner][tile] of every peer; then a flag
                       per unit at every peer
                    2. per unit of another owner's tile: waits for its flag, copies it into the output
                    The sum is made once, so all ranks have the same

The copy costs one more write and one more read of M x N elements in local memory. There would be no copy if
the output were symmetric memory. But such an output belongs to the workspace; the next call overwrites it.

Progress. The load, MMA, epilogue and comm roles wait for no peer: every partial of every resident CTA is
sent and published (:mod:`overlap_gemm.exchange.reduce_scatter`). A sum waits for partials and nothing else. A
copy waits for sums of other ranks. It is taken only when all sums of its CTA are taken
(:mod:`overlap_gemm.exchange.receive`). Each warp that took a sum finishes it before it takes anything else.
So every sum of every CTA of every rank is made without waiting for any copy, and every copy sees its flag.

Reuse of slots and flags: the rule of :mod:`overlap_gemm.exchange.call`. In both, partial slots are written by
bulk stores and read by ordinary loads, as in reduce-scatter. Result slots are written by ordinary stores of
the owners' receive roles, in the buffer of the call's parity, and read by ordinary loads. An owner's call
``e + 2`` begins after every rank's call ``e`` has ended, so the rule holds for them, too. One call may use
bytes for results that another call uses for partials:

- Bulk stores after ordinary accesses: the storing thread first executes `order_async_writes`.
- Ordinary stores after bulk stores: a bulk store is complete before its flag is raised, and a rank sees the
  flags of a call before it ends the call.

With LL packets (:mod:`overlap_gemm.device.ll_words`) there are neither flags nor bulk stores: a warp that
sums or copies waits for the data. Progress and reuse are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.config.orders import LinearOrder
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.complete_rows import with_rows
from overlap_gemm.exchange.copies import ResultCopies, Results
from overlap_gemm.exchange.receive import Receiver
from overlap_gemm.exchange.reduce_scatter import ReduceScatter
from overlap_gemm.exchange.send import BroadcastSender
from overlap_gemm.exchange.sums import Sums
from overlap_gemm.exchange.tile_exchange import PartialExchange
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.spec import GEMM_ALL_REDUCE


@dataclass(frozen=True)
class OneShot(PartialExchange):
    """``out = sum over ranks of (a @ b.T) (+ bias)``: every rank sends all its tiles, every rank sums.

    Attributes:
        config: The kernel's configuration.
        transport: Transport of a partial to a rank.
    """

    code = GEMM_ALL_REDUCE.code

    @property
    def order(self) -> LinearOrder:
        """Returns the order of all rows, as if each rank owned them."""
        return LinearOrder(self.config.raster_group)

    @property
    def receive(self) -> Receiver:
        """Returns the receive role, which sums all tiles, then finishes rows if the epilogue does."""
        sums = Sums(self.config, self.order, self.code, self.transport)
        return Receiver(self.config, with_rows(sums))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns all rows, as one shard."""
        return Share.unsharded(rows, cols, cols)

    def sender(self, stages: Stages, work: Work, call: Call, output: Output) -> BroadcastSender:
        """Returns the sender of every tile to every rank."""
        return BroadcastSender(self, work, call, stages, call.epoch)


@dataclass(frozen=True)
class TwoShot(ReduceScatter):
    """``out = sum over ranks of (a @ b.T) (+ bias)``: the owners of columns sum, and send the sums.

    Attributes:
        config: The kernel's configuration.
        transport: Transport of a partial to its owner, and of a sum to the other ranks.
    """

    code = GEMM_ALL_REDUCE.code

    @property
    def receive(self) -> Receiver:
        """Returns the receive role, which sums the local tiles, then stores the others."""
        results = Results(self.config, self.transport)
        sums = Sums(self.config, self.order, self.code, self.transport, results)
        return Receiver(self.config, (sums, ResultCopies(results, self.order, self.code)))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns the full product, divided by the owners' columns."""
        return Share.by_columns(rows, exchange.rank, exchange.shard_rows, cols)
