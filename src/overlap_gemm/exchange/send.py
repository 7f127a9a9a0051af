"""Sending of tiles: the comm role of every op that exchanges tiles, and the destinations of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.flags import release_fence
from overlap_gemm.device.remote import Ref
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.call import Call, await_peers, begin_warp
from overlap_gemm.kernel.plain_gemm import store_subtile
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.stages import has_empty_subtiles
from overlap_gemm.kernel.work import CtaTile, Work, cta_number
from overlap_gemm.spec.sharding import ceil_div
from overlap_gemm.transports.interface import Transport


@cute.jit
def send_role(ring: Any, sender: Any, call: Call, op: cutlass.Constexpr) -> None:
    """Sends and publishes every tile; all lanes of the comm warp. The grid's first warp signals the call.

    The warp waits for the ring, which the epilogue fills without waiting for any peer, and for peers only
    when everything is sent.

    Args:
        ring: Ring to empty.
        sender: A ``TileSender`` with attributes ``config`` and ``transport``.
        call: Run-time values of the call.
        op: Code of the op, for failure records (`OpSpec.code`).
    """
    is_first = cta_number() == 0
    begin_warp(call, op, sender.transport, is_first)
    sender.transport.drain(ring, sender)
    if is_first:
        await_peers(call, op)


class Destination(NamedTuple):
    """A tile that is sent: where to, and its extents.

    At the end of the matrix only a part of a tile is sent:

    - Rows: a unit of a subtile (`GemmConfig.unit_rows`) is sent if it has a row that exists. A subtile's rows
      are consecutive on the wire (`StageChunks`), so the sent units are its first bytes.
    - Columns: a subtile is sent, in its full width, if it has a column that exists.

    A receiver takes the units that have both (`receive.unit_exists`): it loads nothing that was not sent.
    Example: bf16, subtiles of 64 x 64, units of 4 KiB (32 rows), 40 rows and 70 columns exist. Of both
    subtiles of the first row two units are sent: 8 KiB each.

    Attributes:
        slot: Slot of the tile in its owner's memory.
        flag: Flag of the tile in its owner's memory.
        rows: Rows of its owner's product from the tile's first one on; 0 or less if the tile is after them.
        columns: Columns from the tile's first one on; 0 or less if the tile is after them.
    """

    slot: Ref
    flag: Ref
    rows: Scalar
    columns: Scalar

    def num_bytes(self, config: GemmConfig, subtile: Scalar) -> Any:
        """Returns the bytes of a subtile's units that have rows and columns: 0 or less if none has."""
        tall, wide = config.epi_tile
        rows = cutlass.min(self.rows - subtile // config.epi_columns * tall, tall)
        if has_empty_subtiles(config):
            # One existing column counts as all rows of a subtile; no column counts as no row.
            rows = cutlass.min(rows, (self.columns - subtile % config.epi_columns * wide) * tall)
        return (rows + (config.unit_rows - 1)) // config.unit_rows * config.unit_bytes

    def put_bytes(self, config: GemmConfig) -> Any:
        """Returns the bytes of the tile's slot to the end of the sent part, put as one; 0 or less: none."""
        tall, wide = config.epi_tile
        row = cutlass.min(ceil_div(self.rows, tall), config.subtiles // config.epi_columns) - 1
        column = cutlass.min(ceil_div(self.columns, wide), config.epi_columns) - 1
        last = row * config.epi_columns + column
        exists = cutlass.max(cutlass.min(cutlass.min(self.rows, self.columns), 1), 0)
        nbytes = last * config.slot_subtile_bytes + self.num_bytes(config, last)
        return cutlass.min(nbytes, exists * config.tile_bytes)


@dataclass(frozen=True)
class SlotSender:
    """Common part of the senders to slots (``TileSender``).

    Attributes:
        op: Op with configuration, order and transport.
        work: Work of this cluster.
        call: Run-time values of the call.
        stages: Stages of the ring.
        epoch: Epoch of the call, in a register: sending warps use few, unlike other roles (`Call.epoch`).
    """

    op: Any
    work: Work
    call: Call
    stages: Stages
    epoch: Scalar

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""
        config: GemmConfig = self.op.config
        return config

    @property
    def transport(self) -> Transport:
        """Returns the transport of a tile to a rank."""
        transport: Transport = self.op.transport
        return transport

    def has(self, tile: Scalar) -> Any:
        """Returns whether this cluster has a tile of this number."""
        return tile < self.work.num_tiles

    def at(self, tile: Scalar) -> CtaTile:
        """Returns the CTA tile's place."""
        return CtaTile.at(self.config, self.work.place(self.op.order, tile))


@dataclass(frozen=True)
class OwnerSender(SlotSender):
    """Sends each tile to the slot of its owner and releases its flag there."""

    def locate(self, tile: Scalar) -> Destination:
        """Returns the tile's slot and flag at its owner."""
        work, call, at = self.work, self.call, self.at(tile)
        slots, staged = call.slots(self.config, work.slots), call.staged_tiles(self.config, work.slots)
        memory, rank = call.memory, call.exchange.rank
        owner, local = memory.remote(at.owner), memory.local
        slot = owner.at[slots[Int64(rank), at.index]].staged(local.at[staged[Int64(at.owner), at.index]])
        flag = owner.at[call.flags[at.index, rank]].staged(local.at[call.staged_flags[at.index, at.owner]])
        return Destination(slot, flag, *work.left(at))

    @cute.jit
    def send(self, place: Destination, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile to the owner's slot."""
        num_bytes = place.num_bytes(self.config, subtile)
        if num_bytes > 0:
            offset = subtile * self.config.slot_subtile_bytes
            self.transport.put(place.slot.at[offset], self.stages.flat[(None, stage)], num_bytes)

    def publish(self, tile: Scalar, place: Destination) -> None:
        """Signals to the owner that the tile's slot is complete, by `Transport.publish`."""
        self.transport.publish(place.slot, place.flag, place.put_bytes(self.config), self.epoch)


@dataclass(frozen=True)
class BroadcastSender(SlotSender):
    """Sends each tile to this rank's slot at every rank.

    A bulk group holds one store per rank, so one full wait covers a subtile's stores to all ranks. `publish`
    executes one fence for a tile, then raises the tile's flag at each rank. To ranks without P2P access the
    tile is put from the local slot, when it is complete.

    Attributes:
        to_itself: Whether this rank itself needs the tile in its slot.
    """

    to_itself: bool = True

    def locate(self, tile: Scalar) -> Destination:
        """Returns the tile's slot and flag on this rank: they are in the same place everywhere."""
        at, call = self.at(tile), self.call
        local, rank = call.memory.local, call.exchange.rank
        slot = local.at[call.slots(self.config, self.work.slots)[Int64(rank), at.index]]
        return Destination(slot, local.at[call.flags[at.index, rank]], *self.work.left(at))

    @cute.jit
    def send(self, place: Destination, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile to every rank, the next one first, this one last."""
        num_bytes, rank = place.num_bytes(self.config, subtile), Int32(self.call.exchange.rank)
        if num_bytes > 0:
            part = place.slot.at[subtile * self.config.slot_subtile_bytes]
            for _ in cutlass.range(self._ranks, unroll=1):
                rank = _next(rank, self.call.exchange.world)
                self.transport.put_to_each(part.remote(rank), self.stages.flat[(None, stage)], num_bytes)

    @cute.jit
    def publish(self, tile: Int32, place: Destination) -> None:
        """Signals to every rank that the tile's slot is complete."""
        nbytes, epoch, rank = place.put_bytes(self.config), self.epoch, Int32(self.call.exchange.rank)
        release_fence()
        for _ in cutlass.range(self._ranks, unroll=1):
            rank = _next(rank, self.call.exchange.world)
            self.transport.publish(
                place.slot.remote(rank), place.flag.remote(rank), nbytes, epoch, fenced=True
            )

    @property
    def _ranks(self) -> Any:
        return self.transport.num_recipients(self.call.exchange.world, self.to_itself)


class Placed(NamedTuple):
    """A tile that is stored locally and sent.

    Attributes:
        at: Place of the tile in the local columns.
        to_peers: Destination at the peers.
    """

    at: CtaTile
    to_peers: Destination


@dataclass(frozen=True)
class GatherSender:
    """Stores each tile in the local columns of the output, and sends it to the peers (a ``TileSender``).

    Attributes:
        peers: Sender to the peers.
        output: Local columns of the output.
    """

    peers: BroadcastSender
    output: Output

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""
        return self.peers.config

    @property
    def transport(self) -> Transport:
        """Returns the transport of a tile to a rank."""
        return self.peers.transport

    def has(self, tile: Scalar) -> Any:
        """Returns whether this cluster has a tile of this number."""
        return self.peers.has(tile)

    def locate(self, tile: Scalar) -> Placed:
        """Returns the tile's place, and its destination."""
        return Placed(self.peers.at(tile), self.peers.locate(tile))

    @cute.jit
    def send(self, place: Placed, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile."""
        self.transport.send_and_store(
            partial(self.peers.send, place.to_peers, subtile, stage),
            partial(self._store, place.at, subtile, stage),
        )

    def _store(self, at: CtaTile, subtile: Scalar, stage: Any) -> None:
        tma, tensor = self.output
        store_subtile(self.config, tma, tensor, self.peers.stages, at, subtile, stage)

    def publish(self, tile: Scalar, place: Placed) -> None:
        """Signals to the peers that the tile's slot is complete."""
        self.peers.publish(tile, place.to_peers)


@cute.jit
def _next(rank: Int32, world: Int32) -> Int32:
    """Returns the rank after ``rank``, cyclically."""
    following = rank + 1
    if following == world:
        following = Int32(0)
    return following
