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

Reuse of slots and flags: see :mod:`overlap_gemm.kernels.call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, cute

from overlap_gemm.device.failure import Op, Role
from overlap_gemm.device.route import Route
from overlap_gemm.kernels.call import (
    Call,
    announce,
    await_peers,
    end_warp,
    enter,
    order_async_writes,
)
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import Bias
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.geometry import FLAG_BYTES, SLOT_BUFFERS, staged_flags_offset
from overlap_gemm.kernels.receive import SumRole
from overlap_gemm.kernels.surface import Output, Transport
from overlap_gemm.kernels.work import CtaTile, Work, shard_tiles
from overlap_gemm.schedules import DealtShards


@dataclass(frozen=True)
class ReduceScatter:
    """``out = sum over ranks of (a @ b.T), rows of this rank's shard (+ bias)``.

    Attributes:
        config: the kernel's configuration.
        transport: how a partial reaches its owner, for example ``transports.peer_bulk.PeerBulk``.
    """

    config: GemmConfig
    transport: Transport

    epilogue = ()  # an accumulator is no complete sum
    gate = None

    @property
    def stage_dtype(self) -> str:
        """A subtile in the ring is a part of a partial."""
        return self.config.slot_dtype

    @property
    def order(self) -> DealtShards:
        """Owners in turn, the own tiles among the others."""
        return DealtShards(self.config.raster_group)

    @property
    def receive(self) -> SumRole:
        """Sums the own tiles."""
        epilogue = (Bias(self.config),) if self.config.bias else ()
        return SumRole(self.config, self.order, epilogue, Op.GEMM_REDUCE_SCATTER)

    def place(self, exchange: Exchange, rows: Any) -> tuple[Any, Any, Any]:
        """See `KernelOp.place`."""
        return rows, exchange.rank, exchange.shard_rows

    def more_sources(self, mainloop: Any, exchange: Exchange) -> None:
        """A is all there is to load."""

    def output(self, out: cute.Tensor, exchange: Exchange) -> Output:
        """By ordinary stores."""
        return Output(None, out)

    def begin(self, exchange: Exchange) -> Call:
        """Reads the epoch."""
        return Call.begin(exchange)

    def end(self, call: Call, tally: Any, warps: int) -> None:
        """See `KernelOp.end`."""
        end_warp(call, tally, warps)

    @cute.jit
    def comm_role(self, ring: Any, stages: Any, work: Work, call: Call, output: Output) -> None:
        """One lane sends and publishes every tile; the grid's first warp also greets the peers."""
        x, y, _ = cute.arch.block_idx()
        is_first = x == 0 and y == 0
        if is_first:
            announce(call, self.transport)
        if cute.arch.lane_idx() == 0:
            enter(call, Op.GEMM_REDUCE_SCATTER)
            order_async_writes()
            sender = PartialSender(self, work, call, stages)
            ring.drain(ring.consumer_state(), work.num_tiles, self.config.subtiles, sender)
        cute.arch.sync_warp()
        if is_first:
            await_peers(call, Op.GEMM_REDUCE_SCATTER, Role.CALL_ENTERED)


@dataclass(frozen=True)
class PartialSender:
    """Sends tiles to their owners' slots and releases their flags (a ``TileSender``).

    Attributes:
        op: the op: configuration, order and transport.
        work: this cluster's work.
        call: the call's run-time values.
        stages: the ring's stages.
    """

    op: ReduceScatter
    work: Work
    call: Call
    stages: Any

    def locate(self, tile: Any) -> Route:
        """The tile's route to its owner."""
        at = CtaTile.at(self.op.config, self.work.place(self.op.order, tile))
        tiles = shard_tiles(self.op.config, self.work.whole)
        return route_of(self.op.config, self.call, tiles, at.index, at.owner)

    def send(self, place: Route, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile to the owner's slot."""
        offset = subtile * self.op.config.slot_subtile_bytes
        self.op.transport.put(place, offset, self.stages.flat[(None, stage)])

    def publish(self, tile: Any) -> None:
        """Tells the owner that the tile's slot is complete, or completes it."""
        self.op.transport.publish(self.locate(tile), self.op.config.tile_bytes, self.call.epoch)


def route_of(config: GemmConfig, call: Call, tiles: Any, index: Any, owner: Any) -> Route:
    """The way of the CTA tile ``index`` of the shard of ``owner``, of ``tiles`` in each shard."""
    exchange = call.exchange
    rank = exchange.rank
    slot = (Int64(rank) * tiles + index) * config.tile_bytes
    staging = (Int64(owner) * tiles + index) * config.tile_bytes
    staged_flags = call.base + staged_flags_offset(exchange.slots_offset)
    return Route(
        exchange.peers,
        rank,
        owner,
        call.buffer + slot,
        call.base + call.buffer + SLOT_BUFFERS * exchange.buffer_bytes + staging,
        call.flag(Int64(0), index, rank),
        staged_flags + FLAG_BYTES * Int64(index * exchange.world + owner),
    )
