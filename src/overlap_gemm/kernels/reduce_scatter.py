"""GEMM reduce-scatter as an op of the fused kernel.

Rank ``r`` computes ``a @ b.T`` for all rows, with its own share of K; shard ``p`` of the rows, summed over
the ranks, is the output of rank ``p``.

    foreign tile    epilogue: round to the slot type, fragment order -> ring
                    comm lane: bulk store into the owner's slot[source][tile]; when it is written, release
                    flag[tile][source]
    own tile        epilogue: wait for every source's flag of this tile, sum the slots in fp32 in rank order
    with the own
                    accumulator at its place, add the bias, round once -> ring
                    comm lane: clipped TMA store into the output

Progress. Foreign tiles wait for nothing remote and come first; the comm lane publishes the last of them
before it waits for the first own stage; so every foreign tile of every resident CTA is published without any
wait for a peer, and own tiles wait only for published things. Needs: all CTAs of a launch co-resident, all
ranks' launches eventually running.

Reuse. Flags are monotonic epochs and never reset. Slots are double buffered by the epoch's parity: a rank
writes call ``e + 2``'s partials only behind its call ``e + 1``, which waited for data that the owner sent
behind its call ``e``. A rank that owns no row waits for no tile; it waits, at its end, for every owner to
have entered the call. One stream per workspace, and no launch may overlap the one before it (no programmatic
dependent launch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from overlap_gemm.device.failure import FailureSite, Op, Role
from overlap_gemm.device.flags import WaitBound, wait_flag
from overlap_gemm.device.memory import CHUNK_BYTES, global_pointer
from overlap_gemm.device.route import Route
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import add_sources, pack
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.gemm import finish_subtile, store_output
from overlap_gemm.kernels.geometry import (
    CLAIM_OFFSET,
    CONTROL_BYTES,
    ENTERED_OFFSET,
    EPOCH_OFFSET,
    FLAG_BYTES,
    SLOT_BUFFERS,
    TICKET_OFFSET,
    staged_flags_offset,
)
from overlap_gemm.kernels.roles import CtaTile, OwnTileSender, SubtileWriter
from overlap_gemm.kernels.work import Work
from overlap_gemm.schedules import RotatedShards, TileGrid


class Context(NamedTuple):
    """Run-time values every role of one call shares.

    Attributes:
        bias: bias tensor or None.
        exchange: the launch's arguments.
        base: own workspace address.
        epoch: this call's epoch.
        slots: byte offset of this epoch's slot buffer.
        bound: bound of waits on peers.
        source_bytes: bytes from one source's slots to the next source's.
    """

    bias: Any
    exchange: Exchange
    base: Any
    epoch: Any
    slots: Any
    bound: WaitBound
    source_bytes: Any


def make_context(
    config: GemmConfig, bias: Any, exchange: Exchange, grid: TileGrid, epoch_offset: int
) -> Context:
    """The call's run-time values; the call's epoch is one above the word at ``epoch_offset``."""
    base = exchange.peers[exchange.rank]
    epoch = cute.arch.load(global_pointer(Uint32, base + epoch_offset, 4), Uint32) + 1
    cta_tiles = grid.rows * grid.cols * config.cluster_size
    return Context(
        bias,
        exchange,
        base,
        epoch,
        exchange.slots_offset + Int64(epoch & 1) * exchange.buffer_bytes,
        WaitBound(exchange.timeout_ns, exchange.record, base + CLAIM_OFFSET),
        Int64(cta_tiles) * (config.subtiles * config.slot_subtile_bytes),
    )


@dataclass(frozen=True)
class ReduceScatter:
    """``out = sum over ranks of (a @ b.T), rows of this rank's shard (+ bias)``.

    Attributes:
        config: the kernel's configuration.
        transport: how a partial reaches its owner, for example ``transports.peer_bulk.PeerBulk``.
    """

    config: GemmConfig
    transport: Any

    @property
    def order(self) -> RotatedShards:
        """The next rank's shard first, the own shard last."""
        return RotatedShards(self.config.raster_group)

    def place(self, exchange: Exchange, rows: Any) -> tuple[Any, Any]:
        """(rank, rows of a full shard)."""
        return exchange.rank, exchange.shard_rows

    def context(self, bias: Any, exchange: Exchange, work: Work) -> Context:
        """Reads the epoch: every thread, before the CTA's first barrier, so before any ticket of this CTA."""
        return make_context(self.config, bias, exchange, work.grid, EPOCH_OFFSET)

    # -- epilogue

    @cute.jit
    def await_partials(self, context: Context, tile: CtaTile, own: Any) -> None:
        """Before an own tile: each lane waits for one source's flag, then the warp may read every slot."""
        exchange = context.exchange
        if own:
            source = cute.arch.lane_idx()
            while source < exchange.world:
                if source != exchange.rank:
                    index = tile.index * exchange.world + source
                    site = FailureSite(
                        exchange.rank,
                        int(Op.GEMM_REDUCE_SCATTER),
                        int(Role.EPILOGUE_PARTIAL),
                        tile.index,
                        source,
                        index,
                    )
                    wait_flag(_flag_address(context.base, index), context.epoch, context.bound, site)
                source += 32
            cute.arch.sync_warp()

    @cute.jit
    def combine(self, writer: SubtileWriter, fragment: cute.Tensor, subtile: Any) -> None:
        """Own tile: sums all partials in rank order into ``fragment`` and adds the bias."""
        cfg, context = self.config, writer.context
        exchange = context.exchange
        if writer.own:
            address = (
                context.base
                + context.slots
                + Int64(writer.tile.index) * self._tile_bytes
                + (subtile * cfg.slot_subtile_bytes + writer.thread * CHUNK_BYTES)
            )
            total = cute.make_rmem_tensor(cute.size(fragment), cutlass.Float32)
            total.fill(0.0)
            add_sources(total, cfg, address, context.source_bytes, Int32(0), exchange.rank)
            total.store(total.load() + fragment.load().reshape(total.shape))
            add_sources(total, cfg, address, context.source_bytes, exchange.rank, exchange.world - 1)
            fragment.store(total.load().reshape(fragment.shape))
            finish_subtile(cfg, writer, fragment, subtile)

    @cute.jit
    def store(self, writer: SubtileWriter, fragment: cute.Tensor, stage: Int32) -> None:
        """Own subtile: as the output's TMA store expects it. Foreign: packed."""
        if writer.own:
            store_output(writer, fragment, stage)
        else:
            pack(fragment, writer.stages.packed[(None, writer.thread, stage)])

    # -- comm lane

    @cute.jit
    def comm_role(self, ring: Any, stages: Any, work: Work, context: Context, tma_out: Any, out: Any) -> None:
        """One lane: sends and publishes foreign tiles, stores own tiles, then closes the call."""
        self._announce(work, context)
        foreign = PartialSender(self, work, context, stages)
        own = OwnTileSender(self.config, self, work, work.num_foreign, tma_out, out, stages)
        subtiles = self.config.subtiles
        state = ring.drain(ring.consumer_state(), work.num_foreign, subtiles, foreign)
        ring.drain(state, work.num_tiles - work.num_foreign, subtiles, own)
        self._close(work, context)

    @cute.jit
    def _announce(self, work: Work, context: Context) -> None:
        """An owner tells the ranks that own nothing that it has entered this call."""
        exchange = context.exchange
        x, y, _ = cute.arch.block_idx()
        if x == 0 and y == 0 and exchange.rank < work.owners:
            for peer in cutlass.range(work.owners, exchange.world, unroll=1):
                self.transport.signal(
                    exchange.peers,
                    exchange.rank,
                    peer,
                    ENTERED_OFFSET + FLAG_BYTES * Int64(exchange.rank),
                    context.epoch,
                )

    @cute.jit
    def _close(self, work: Work, context: Context) -> None:
        """The last CTA stores the epoch; in a rank that owns nothing it first awaits every owner's entry."""
        exchange = context.exchange
        x, y, _ = cute.arch.grid_dim()
        ticket = global_pointer(Uint32, context.base + TICKET_OFFSET, 4)
        taken = cute.arch.atomic_add(ticket, Uint32(1), sem="acq_rel", scope="gpu")
        if Int32(taken) == x * y - 1:
            if exchange.rank >= work.owners:
                for owner in cutlass.range(work.owners, unroll=1):
                    site = FailureSite(
                        exchange.rank, int(Op.GEMM_REDUCE_SCATTER), int(Role.COMM_ENTERED), 0, owner, owner
                    )
                    address = context.base + ENTERED_OFFSET + FLAG_BYTES * Int64(owner)
                    wait_flag(address, context.epoch, context.bound, site)
            cute.arch.store(ticket, Uint32(0))
            cute.arch.store(global_pointer(Uint32, context.base + EPOCH_OFFSET, 4), context.epoch)

    @property
    def _tile_bytes(self) -> int:
        return self.config.subtiles * self.config.slot_subtile_bytes


@dataclass(frozen=True)
class PartialSender:
    """Sends foreign tiles to their owners' slots and releases their flags (a ``TileSender``).

    Attributes:
        op: the op: configuration, order and transport.
        work: this cluster's work.
        context: the call's run-time values.
        stages: the ring's stages.
    """

    op: Any
    work: Work
    context: Context
    stages: Any

    def locate(self, tile: Any) -> Route:
        """The tile's route to its owner."""
        at = CtaTile.at(self.op.config, self.work.place(self.op.order, tile))
        return route_of(self.op.config, self.context, at.index, at.owner)

    def send(self, place: Route, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile to the owner's slot."""
        offset = subtile * self.op.config.slot_subtile_bytes
        self.op.transport.put(place, offset, self.stages.flat[(None, stage)])

    def publish(self, tile: Any) -> None:
        """Tells the owner that the tile's slot is complete, or completes it."""
        self.op.transport.publish(self.locate(tile), self.op._tile_bytes, self.context.epoch)


def route_of(config: GemmConfig, context: Context, index: Any, owner: Any) -> Route:
    """The way of the CTA tile ``index`` of the shard of ``owner``, another rank."""
    exchange = context.exchange
    rank = exchange.rank
    in_slot = Int64(index) * (config.subtiles * config.slot_subtile_bytes)
    # Nobody keeps a slot for itself: ranks behind move up by one.
    slot = (rank - (rank > owner) * 1) * context.source_bytes + in_slot
    staging = (owner - (owner > rank) * 1) * context.source_bytes + in_slot
    staged_flags = context.base + staged_flags_offset(exchange.slots_offset)
    return Route(
        exchange.peers,
        rank,
        owner,
        context.slots + slot,
        context.base + context.slots + SLOT_BUFFERS * exchange.buffer_bytes + staging,
        _flag_address(Int64(0), index * exchange.world + rank),
        staged_flags + FLAG_BYTES * Int64(index * exchange.world + owner),
    )


def _flag_address(base: Any, index: Any) -> Any:
    return base + (CONTROL_BYTES + FLAG_BYTES * Int64(index))
