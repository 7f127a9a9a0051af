"""Sending tiles: what the comm warp of every op that exchanges tiles does, and where tiles go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.flags import release_fence
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.call import Call, await_peers, begin_warp
from overlap_gemm.exchange.geometry import FLAG_BYTES, SLOT_BUFFERS, staged_flags_offset
from overlap_gemm.kernel.epilogue import has_empty_subtiles
from overlap_gemm.kernel.plain_gemm import store_subtile
from overlap_gemm.kernel.surface import Output
from overlap_gemm.kernel.work import CtaTile, Work, cta_number
from overlap_gemm.spec.sharding import ceil_div
from overlap_gemm.transports.interface import Transport


@cute.jit
def send_role(ring: Any, sender: Any, call: Call, op: cutlass.Constexpr) -> None:
    """All lanes of the comm warp: send and publish every tile; the grid's first warp announces the call.

    The warp waits for the ring, which the epilogue fills without waiting for any peer, and for peers only
    when everything is sent.

    Args:
        ring: the ring.
        sender: a ``TileSender`` with attributes ``config`` and ``transport``.
        call: the call's run-time values.
        op: the op, for failure records (`OpSpec.code`).
    """
    is_first = cta_number() == 0
    begin_warp(call, op, sender.transport, is_first)
    sender.transport.drain(ring, sender)
    if is_first:
        await_peers(call, op)


class Destination(NamedTuple):
    """A tile on its way: its route, and how much of it there is.

    Rows that do not exist are not sent: rows of a subtile lie one after the other on the wire
    (`StageChunks`), so those that exist are its first bytes. They are sent by whole units. Columns that do
    not exist are not sent by whole subtiles. A receiver takes the units that have both
    (`receive.unit_exists`): it loads nothing that was not sent.

    Attributes:
        route: the way.
        rows: rows of the product from the tile's first one on, of its owner; not more than 0 where the tile
            lies after them all.
        columns: its columns, likewise.
    """

    route: Route
    rows: Scalar
    columns: Scalar

    def num_bytes(self, config: GemmConfig, subtile: Scalar) -> Any:
        """Bytes of a subtile's units that have rows and columns: 0 or less where none has."""
        tall, wide = config.epi_tile
        rows = cutlass.min(self.rows - subtile // config.epi_columns * tall, tall)
        if has_empty_subtiles(config):
            # A column stands for more rows than a subtile has, none for none.
            rows = cutlass.min(rows, (self.columns - subtile % config.epi_columns * wide) * tall)
        return (rows + (config.unit_rows - 1)) // config.unit_rows * config.unit_bytes

    def put_bytes(self, config: GemmConfig) -> Any:
        """Bytes of the tile's slot to the end of what is sent, which is put as one; 0 or less: nothing is."""
        tall, wide = config.epi_tile
        row = cutlass.min(ceil_div(self.rows, tall), config.subtiles // config.epi_columns) - 1
        column = cutlass.min(ceil_div(self.columns, wide), config.epi_columns) - 1
        last = row * config.epi_columns + column
        exists = cutlass.max(cutlass.min(cutlass.min(self.rows, self.columns), 1), 0)
        nbytes = last * config.slot_subtile_bytes + self.num_bytes(config, last)
        return cutlass.min(nbytes, exists * config.tile_bytes)


@dataclass(frozen=True)
class SlotSender:
    """What senders to slots (``TileSender``) have in common.

    Attributes:
        op: its configuration, order and transport.
        work: this cluster's work.
        call: the call's run-time values.
        stages: the ring's stages.
        epoch: the call's, in a register: few of the sending warps' are in use, unlike others' (`Call.epoch`).
    """

    op: Any
    work: Work
    call: Call
    stages: Stages
    epoch: Scalar

    @property
    def config(self) -> GemmConfig:
        """The kernel's configuration."""
        config: GemmConfig = self.op.config
        return config

    @property
    def transport(self) -> Transport:
        """How a tile reaches a rank."""
        transport: Transport = self.op.transport
        return transport

    def has(self, tile: Scalar) -> Any:
        """Whether this cluster has so many."""
        return tile < self.work.num_tiles

    def at(self, tile: Scalar) -> CtaTile:
        """The CTA tile's place."""
        return CtaTile.at(self.config, self.work.place(self.op.order, tile))


@dataclass(frozen=True)
class OwnerSender(SlotSender):
    """Sends each tile to the slot of its owner and releases its flag there."""

    def locate(self, tile: Scalar) -> Destination:
        """The tile's route to its owner."""
        work, at = self.work, self.at(tile)
        route = route_of(self.config, self.call, work.slots, at.index, self.call.exchange.rank, at.owner)
        return Destination(route, *work.left(at))

    @cute.jit
    def send(self, place: Destination, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile to the owner's slot."""
        num_bytes = place.num_bytes(self.config, subtile)
        if num_bytes > 0:
            offset = subtile * self.config.slot_subtile_bytes
            self.transport.put(place.route, offset, self.stages.flat[(None, stage)], num_bytes)

    def publish(self, tile: Scalar, place: Destination) -> None:
        """Tells the owner that the tile's slot is complete, or completes it."""
        self.transport.publish(place.route, place.put_bytes(self.config), self.epoch)


@dataclass(frozen=True)
class BroadcastSender(SlotSender):
    """Sends each tile to this rank's slot at every rank.

    A bulk group holds one store per rank, so one full wait covers a subtile's stores to all of them, and one
    fence the flags that say so. To ranks beyond reach the tile is put from the own slot, when it is complete.

    Attributes:
        to_itself: whether this rank itself needs the tile in its slot.
    """

    to_itself: bool = True

    def locate(self, tile: Scalar) -> Destination:
        """The tile's route to this rank itself: slot and flag are the same everywhere."""
        at = self.at(tile)
        rank = self.call.exchange.rank
        route = route_of(self.config, self.call, self.work.slots, at.index, rank, rank)
        own = route._replace(staging=self.call.base + route.slot, staged=self.call.base + route.flag)
        return Destination(own, *self.work.left(at))

    @cute.jit
    def send(self, place: Destination, subtile: Int32, stage: Int32) -> None:
        """Starts moving one subtile to every rank, the next one first, this one last."""
        route, num_bytes = place.route, place.num_bytes(self.config, subtile)
        if num_bytes > 0:
            offset = subtile * self.config.slot_subtile_bytes
            rank = Int32(route.rank)
            for _ in cutlass.range(self._ranks, unroll=1):
                rank = _next(rank, self.call.exchange.world)
                to = route._replace(owner=rank)
                self.transport.put_to_each(to, offset, self.stages.flat[(None, stage)], num_bytes)

    @cute.jit
    def publish(self, tile: Int32, place: Destination) -> None:
        """Tells every rank that the tile's slot is complete."""
        route, nbytes, epoch = place.route, place.put_bytes(self.config), self.epoch
        rank = Int32(route.rank)
        release_fence()
        for _ in cutlass.range(self._ranks, unroll=1):
            rank = _next(rank, self.call.exchange.world)
            self.transport.publish(route._replace(owner=rank), nbytes, epoch, fenced=True)

    @property
    def _ranks(self) -> Any:
        return self.transport.num_recipients(self.call.exchange.world, self.to_itself)


class Placed(NamedTuple):
    """A tile on its way.

    Attributes:
        at: its place in the own columns.
        to_peers: to the peers.
    """

    at: CtaTile
    to_peers: Destination


@dataclass(frozen=True)
class GatherSender:
    """Stores each tile in the own columns of the output, and sends it to the peers (a ``TileSender``).

    Attributes:
        peers: sends it.
        output: the own columns.
    """

    peers: BroadcastSender
    output: Output

    @property
    def config(self) -> GemmConfig:
        """The kernel's configuration."""
        return self.peers.config

    @property
    def transport(self) -> Transport:
        """How a tile reaches a rank."""
        return self.peers.transport

    def has(self, tile: Scalar) -> Any:
        """Whether this cluster has so many."""
        return self.peers.has(tile)

    def locate(self, tile: Scalar) -> Placed:
        """The tile's place, and its route."""
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
        """Tells the peers that the tile's slot is complete."""
        self.peers.publish(tile, place.to_peers)


@cute.jit
def _next(rank: Int32, world: Int32) -> Int32:
    following = rank + 1
    if following == world:
        following = Int32(0)
    return following


def place_of(config: GemmConfig, call: Call, tiles: Scalar, index: Scalar, rank: Scalar) -> Any:
    """Byte offset, in every workspace, of the slot ``index`` of ``rank``, a source or an owner."""
    return call.buffer + (Int64(rank) * tiles + index) * config.tile_bytes


def route_of(
    config: GemmConfig, call: Call, tiles: Scalar, index: Scalar, source: Scalar, owner: Scalar
) -> Route:
    """The way to ``owner`` of the CTA tile ``index``, of ``tiles`` that each ``source`` has slots for."""
    exchange = call.exchange
    rank = exchange.rank
    slot = place_of(config, call, tiles, index, source)
    staging = (Int64(owner) * tiles + index) * config.tile_bytes
    staged_flags = call.base + staged_flags_offset(exchange.slots_offset)
    return Route(
        exchange.peers,
        rank,
        owner,
        slot,
        call.base + call.buffer + SLOT_BUFFERS * exchange.buffer_bytes + staging,
        call.flag(Int64(0), index, rank),
        staged_flags + FLAG_BYTES * Int64(index * exchange.world + owner),
    )
