"""GEMM reduce-scatter as an op of the fused kernel.

Rank ``r`` computes ``a @ b.T`` for all rows, with its share of K; shard ``p`` of the rows, summed over
the ranks, is the output of rank ``p``.

    epilogue        rounds each tile to the slot type -> ring; waits for no peer
    comm lane       bulk store into the owner's slot[source][tile]; when it is written, releases
                    flag[tile][source]. Local tiles are sent the same way, into the local workspace
    receive role    per local tile: waits for every source's flag, sums the slots in fp32 in rank order, adds
                    the bias, rounds once, stores

Progress. The load, MMA, epilogue and comm roles wait only for each other, and for the ring. The comm lane
empties the ring without waiting for a peer. So every tile of every resident CTA is computed, sent and
published, in any order, even if publication lags, since the ring's end flushes it. Only the call's end waits
for the receive role, which then sees every flag that it waits for. Requirements: all CTAs of a launch
co-resident (a cooperative launch: one that does not fit is refused), all ranks' launches eventually running.

Reuse of slots and flags: see :mod:`overlap_gemm.exchange.call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.config.orders import InterleavedShards
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.complete_rows import with_rows
from overlap_gemm.exchange.receive import Receiver
from overlap_gemm.exchange.send import OwnerSender
from overlap_gemm.exchange.sums import Sums
from overlap_gemm.exchange.tile_exchange import PartialExchange
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.spec import GEMM_REDUCE_SCATTER


@dataclass(frozen=True)
class ReduceScatter(PartialExchange):
    """``out = sum over ranks of (a @ b.T), rows of this rank's shard (+ bias)``.

    Attributes:
        config: The kernel's configuration.
        transport: Transport of a partial to its owner, for example ``transports.peer_bulk.PeerBulk``.
    """

    code = GEMM_REDUCE_SCATTER.code

    @property
    def order(self) -> InterleavedShards:
        """Returns the order of the tiles: owners in turn, the local tiles among the others."""
        return InterleavedShards(self.config.raster_group)

    @property
    def receive(self) -> Receiver:
        """Returns the receive role, which sums the local tiles, then finishes rows if the epilogue does."""
        sums = Sums(self.config, self.order, self.code, self.transport)
        return Receiver(self.config, with_rows(sums))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns all rows, divided by the owners' shards."""
        return Share.by_rows(rows, exchange.rank, exchange.shard_rows, cols)

    def sender(self, stages: Stages, work: Work, call: Call, output: Output) -> OwnerSender:
        """Returns the sender of every tile to its owner."""
        return OwnerSender(self, work, call, stages, call.epoch)
