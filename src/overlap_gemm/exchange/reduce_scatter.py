"""GEMM reduce-scatter as an op of the fused kernel.

Rank ``r`` computes ``a @ b.T`` for all rows, with its own share of K; shard ``p`` of the rows, summed over
the ranks, is the output of rank ``p``.

    epilogue        rounds each tile to the slot type -> ring; waits for no peer
    comm lane       bulk store into the owner's slot[source][tile]; when it is written, releases
                    flag[tile][source]. The own tiles go the same way, into the own workspace
    receive role    per own tile: waits for every source's flag, sums the slots in fp32 in rank order, adds
                    the bias, rounds once, stores

Progress. The load, MMA, epilogue and comm roles wait only for each other, and for the ring, which the comm
lane empties without waiting for anybody: so every tile of every resident CTA is computed, sent and published,
in whatever order, also where publication lags, since the ring's end flushes it. The receive role, for which
nobody waits but the call's end, then finds everything it waits for. Needs: all CTAs of a launch co-resident
(a cooperative launch: one that does not fit is refused), all ranks' launches eventually running.

Reuse of slots and flags: see :mod:`overlap_gemm.exchange.call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.config.orders import DealtShards
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.receive import Receiver
from overlap_gemm.exchange.send import OwnerSender
from overlap_gemm.exchange.sums import Sums
from overlap_gemm.exchange.tile_exchange import PartialExchange
from overlap_gemm.kernel.surface import Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.spec import GEMM_REDUCE_SCATTER


@dataclass(frozen=True)
class ReduceScatter(PartialExchange):
    """``out = sum over ranks of (a @ b.T), rows of this rank's shard (+ bias)``.

    Attributes:
        config: the kernel's configuration.
        transport: how a partial reaches its owner, for example ``transports.peer_bulk.PeerBulk``.
    """

    code = GEMM_REDUCE_SCATTER.code

    @property
    def order(self) -> DealtShards:
        """Owners in turn, the own tiles among the others."""
        return DealtShards(self.config.raster_group)

    @property
    def receive(self) -> Receiver:
        """Sums the own tiles."""
        sums = Sums(self.config, self.order, self.code, self.transport)
        return Receiver(self.config, (sums,))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """All rows, by the owners' shards."""
        return Share.by_rows(rows, exchange.rank, exchange.shard_rows, cols)

    def sender(self, stages: Stages, work: Work, call: Call, output: Output) -> OwnerSender:
        """Sends every tile to its owner."""
        return OwnerSender(self, work, call, stages, call.epoch)
