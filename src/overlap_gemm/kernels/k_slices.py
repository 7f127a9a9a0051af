"""All-gather GEMM whose shards come by slices of K: for so few rows that all tiles are one wave.

Where shards are gated as wholes (:mod:`overlap_gemm.kernels.all_gather`), the last one's tiles begin when its
last byte has come, and then have all of K before them; and a shard of few rows fills no tile. Here every rank
sends its rows to all, itself included, by slices of K, up to `geometry.SHARD_PIECES` of whole k tiles, each
with a flag. So A is one matrix, the gather buffer; tiles may span shards; and what follows the last byte is
the last slice's part of a tile.

    shard role      the receive warps: each takes runs of rows of a slice, loads them once, stores them in the
                    gather buffer of every rank. The grid's last to have stored a slice releases flag
                    ``(slice, rank)`` at every rank
    load role       B's k tiles, which wait for nobody; A's, each after the flags of its slice of all sources
                    that the tile has rows of (acquire, system scope, bounded), and a fence of the async
                    proxy. While a slice is awaited, B's go ahead into all stages but one: a stage is full
                    when both are there. The grid's last reader tells every peer that this rank *has read*
    comm lane       TMA stores of the output. The grid's first, at its end, waits until every peer has read

Progress. The shard role waits for nobody, and is of resident CTAs: all slices come, all k tiles are loaded. B
goes ahead no further than there are stages that earlier k tiles free, all of whose loads have begun.

**Reuse** and epochs: those of :mod:`overlap_gemm.kernels.all_gather`, in the same workspaces. Every tile
waits for all slices of its sources, and every source has rows in a tile: after the grid's last word nothing
is under way to this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute, pipeline

from overlap_gemm.device.flags import test_flag
from overlap_gemm.device.memory import CHUNK_BYTES, CHUNK_WORDS, LANES, order_async_writes
from overlap_gemm.device.traced import Extras, Scalar
from overlap_gemm.kernels.call import await_entry, count_grid
from overlap_gemm.kernels.config import TILE_K_BYTES, GemmConfig
from overlap_gemm.kernels.gathering import (
    GatherCall,
    Gathering,
    GatherOp,
    await_piece,
    chunk_at,
    has_read,
)
from overlap_gemm.kernels.geometry import SENDER_BYTES, SENDERS_OFFSET, k_slice
from overlap_gemm.kernels.operands import Operands
from overlap_gemm.kernels.orders import Place
from overlap_gemm.kernels.surface import Output
from overlap_gemm.kernels.work import Share, Work, cta_number, num_ctas
from overlap_gemm.spec import ALL_GATHER_GEMM
from overlap_gemm.spec.sharding import ceil_div
from overlap_gemm.transports.base import Transport

RUN_CHUNKS = 2
"""Chunks of 16 bytes that a lane moves at a time: so that a slice of few rows is every warp's work."""

RUN_BYTES = RUN_CHUNKS * CHUNK_BYTES * LANES

HELD = 1
"""Stages that a consumer may hold until the next k tile is there: wgmma frees one when the next has begun."""

ALL = 1 << 30
"""More k tiles than there are."""


@dataclass(frozen=True)
class SlicedGather(GatherOp):
    """``out = concatenation of the ranks' a @ b.T (+ bias)``, A's rows by slices of K.

    Attributes:
        config: the kernel's configuration.
        transport: raises flags at peers, all of which stores reach.
    """

    def __post_init__(self) -> None:
        """Raises ValueError for scales of A, which would have to come with the slices."""
        if self.config.visits_rows or self.config.blocks is not None:
            raise ValueError("what comes by slices of K are rows without scales of their own")

    @property
    def gate(self) -> SliceGate:
        """Opens for a slice when it has come from all ranks of a tile's rows."""
        return SliceGate(self)

    @property
    def receive(self) -> SliceRole:
        """Sends the own rows."""
        return SliceRole(self.config, self.transport)

    def share(self, given: Gathering, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """All rows, one shard; A is the own ones here."""
        return Share.whole(given.rows, cols, cols)

    def more_sources(self, mainloop: Any, given: Gathering) -> Output:
        """The gather buffer, ``(M, K, 1)``."""
        return Output(*mainloop.tma_of_a(given.gathered))


class Arrivals(NamedTuple):
    """What of A a tile's loads wait for.

    Attributes:
        call: the call's values.
        source: the rank of the tile's first row.
        number: ranks that the tile has rows of.
        opened: whether all that this tile waits for has come: -1 if nothing has been looked at yet, 1 if so.
    """

    call: GatherCall
    source: Scalar
    number: Scalar
    opened: Any

    @property
    def k_tiles(self) -> Any:
        """Of a slice."""
        return Int32(k_slice(self.call.given.row_bytes) // TILE_K_BYTES)

    @property
    def slices(self) -> Any:
        """How many there are."""
        row = self.call.given.row_bytes
        return Int32(ceil_div(row, k_slice(row)))

    def slice(self, k: Scalar) -> Any:
        """That of a k tile; of those after K's end, the last."""
        return cutlass.min(k // self.k_tiles, self.slices - 1)

    def after(self, number: Scalar) -> Any:
        """The first k tile after so many slices."""
        return cutlass.select_(number >= self.slices, Int32(ALL), number * self.k_tiles)

    @property
    def known(self) -> Any:
        """The first k tile of which nothing is known."""
        return cutlass.select_(self.opened > 0, Int32(ALL), Int32(0))


@cute.jit
def look(arrivals: Arrivals) -> Int32:
    """All lanes: the first k tile whose slice has not come yet; acquires those that have."""
    here, call = Int32(0), arrivals.call.call
    if arrivals.opened == 0 and cute.arch.lane_idx() < arrivals.slices:
        here = Int32(1)
        for i in cutlass.range(arrivals.number, unroll=1):
            flag = call.flag(call.base, cute.arch.lane_idx(), arrivals.source + i)
            here = here & test_flag(flag, call.epoch)
    came = cute.arch.vote_ballot_sync(here != 0)
    cute.arch.sync_warp()
    return Int32(arrivals.after(Int32(cute.arch.popc(came & ~(came + 1)))))


@cute.jit
def await_slice(arrivals: Arrivals, k: Int32) -> Int32:
    """All lanes: waits for the slice of k tile ``k`` of every source; returns the first k tile after it.

    And, before a CTA's first, until all ranks that have rows are in this call.
    """
    call, number = arrivals.call, arrivals.slice(k)
    if arrivals.opened < 0:
        for peer in cutlass.range(cute.arch.lane_idx(), call.owners, LANES, unroll=1):
            if peer != call.call.exchange.rank:
                await_entry(call.call, ALL_GATHER_GEMM.code, peer)
    for i in cutlass.range(cute.arch.lane_idx(), arrivals.number, LANES, unroll=1):
        await_piece(call.call, arrivals.source + i, number)
    cute.arch.sync_warp()
    return Int32(arrivals.after(number + 1))


@cute.jit
def load_as_it_comes(
    ab: Any,
    state: pipeline.PipelineState,
    a: Any,
    b: Any,
    first: Int32,
    number: Int32,
    early: Any,
    stages: cutlass.Constexpr,
    arrivals: Arrivals,
) -> pipeline.PipelineState:
    """As `loads.load_k_tiles`, of an A that comes by slices: before each, B's loads go ahead."""
    ahead, next_b, end = state.clone(), first, first + number
    if cutlass.const_expr(early is not None):
        ahead.advance(early)
        next_b = first + early
    opened = Int32(arrivals.known)
    for k in cutlass.range(first, end, unroll=1):
        if k >= opened:
            opened = look(arrivals)
            if k >= opened:
                reach = cutlass.min(k + stages - HELD, end)
                for later in cutlass.range(next_b, reach, unroll=1):
                    ab.producer_acquire(ahead)
                    b.load(ab, ahead, later)
                    ahead.advance()
                next_b = cutlass.max(next_b, reach)
                opened = await_slice(arrivals, k)
                arrivals = arrivals._replace(opened=cutlass.max(arrivals.opened, 0))
            order_async_writes()
        if k >= next_b:
            ab.producer_acquire(ahead)
            b.load(ab, ahead, k)
            ahead.advance()
            next_b = k + 1
        a.load(ab, state, k)
        state.advance()
    return state


@dataclass(frozen=True)
class SliceGate:
    """What the load role does for a tile, and after the last: see the module.

    Attributes:
        op: the op.
    """

    op: SlicedGather

    @cute.jit
    def load(
        self,
        mainloop: cutlass.Constexpr,
        res: Any,
        ops: Operands,
        gathered: Output,
        state: pipeline.PipelineState,
        place: Place,
        call: GatherCall,
        opened: Int32,
        early: Any,
    ) -> tuple[pipeline.PipelineState, Int32]:
        """Loads the tile at ``place``; ``opened``: the row of tiles before it, of which all has come."""
        tile_m, tile_n = self.op.config.cluster_tile
        row, column, shard = place.m * tile_m, place.n * tile_n, call.call.exchange.shard_rows
        source = row // shard
        last = (cutlass.min(row + tile_m, call.given.rows) - 1) // shard
        known = cutlass.select_(opened == place.m, Int32(1), cutlass.min(opened, 0))
        arrivals = Arrivals(call, source, last - source + 1, known)
        rows = gathered.tensor[(None, None, 0)]
        operands = Operands(ops.mma, gathered.tma, rows, ops.tma_b, ops.b)
        loads = mainloop.loads(res, operands, row, column)
        state = load_as_it_comes(res.ab, state, *loads, early, self.op.config.ab_stages, arrivals)
        return state, Int32(place.m)

    @cute.jit
    def end(self, call: GatherCall) -> None:
        """After a warp's last load."""
        if call.given.is_last != 0:
            has_read(call, self.op.transport, 1)


@dataclass(frozen=True)
class SliceRole:
    """What the receive warps do: see the module.

    Attributes:
        config: the kernel's configuration.
        transport: raises flags at peers.
    """

    config: GemmConfig
    transport: Transport

    with_epilogue = False

    @cute.jit
    def __call__(self, call: GatherCall, work: Work, tally: Any, out: Any, extras: Extras) -> None:
        """One warp's part."""
        if call.given.is_first != 0 and call.call.exchange.rank < call.owners:
            self._send(call)

    @cute.jit
    def _send(self, call: GatherCall) -> None:
        """Stores this warp's runs of every slice at all ranks, the last warp of a slice then its flags."""
        exchange, epoch, given = call.call.exchange, call.call.epoch, call.given
        peers, rank, world = exchange.peers, exchange.rank, exchange.world
        warps, pitch = self.config.receive_warps, given.row_bytes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.config.first_receive_warp
        place, nbytes = call.shard(rank)
        width = k_slice(pitch)
        stride = num_ctas() * warps
        # Where a slice is fewer runs than there are warps, the next one's begin at the next warp.
        turn = cta_number() * warps + warp
        for number in cutlass.range(Int32(ceil_div(pitch, width)), unroll=1):
            begin = Int64(number) * width
            left = Int32(cutlass.min(width, pitch - begin))
            runs = ceil_div(left, RUN_BYTES)
            tasks = Int32(nbytes // pitch) * runs
            for task in cutlass.range(turn, tasks, stride, unroll=1):
                start = Int64(task // runs) * pitch + begin
                at = task % runs * RUN_BYTES + cute.arch.lane_idx() * CHUNK_BYTES
                loaded = cute.make_rmem_tensor((CHUNK_WORDS, RUN_CHUNKS), cutlass.Uint32)
                for c in cutlass.range_constexpr(RUN_CHUNKS):
                    inside = at + c * LANES * CHUNK_BYTES
                    safe = cutlass.select_(inside < left, inside, 0)  # after the end, the first again
                    cute.autovec_copy(chunk_at(given.own + start + safe), loaded[(None, c)])
                for i in cutlass.range(1, world + 1, unroll=1):
                    target = peers[(rank + world - i) % world] + exchange.slots_offset + place + start
                    for c in cutlass.range_constexpr(RUN_CHUNKS):
                        inside = at + c * LANES * CHUNK_BYTES
                        if inside < left:
                            cute.autovec_copy(loaded[(None, c)], chunk_at(target + inside))
            turn = (turn + stride - tasks % stride) % stride
            if count_grid(call.call, SENDERS_OFFSET + SENDER_BYTES * number, warps) != 0:
                flag = call.call.flag(Int64(0), number, rank)
                for peer in cutlass.range(cute.arch.lane_idx(), world, LANES, unroll=1):
                    self.transport.signal(peers, rank, peer, flag, epoch)
