"""GEMM all-gather into symmetric outputs: each tile goes by TMA to its columns in the output of every rank.

In :mod:`overlap_gemm.kernels.output_gather` the output is any memory of the caller's, so tiles go through
slots, from which every rank copies M x N elements. Where all ranks give outputs that their peers reach, of
the same strides, nothing is copied, and there is no receive role.

    comm warp       waits until every peer has entered this call; then, of each subtile, one lane starts a
                    clipped TMA store into the own columns of every rank's output, the next rank's first. The
                    grid's last, when all its stores are written, tells every peer that this rank's columns
                    are there; the grid's first waits for that word of every peer
    other roles     those of a plain GEMM

**When an output may be written.** A rank that has entered this call has ended all that its stream had before
it, so also what read what was in its output. So no output is kept free by a rule of two calls, as slots are:
the wait for the entries is in front of the first store, and is hidden by the first tile's product. And an
output is the caller's until he gives it to another call.

Progress. Every rank announces its entry before it waits for anybody, so every comm warp begins; the wait for
the peers' last word comes after all stores of the CTA; stores wait for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, global_pointer, order_async_writes
from overlap_gemm.device.traced import Address, Scalar, Stages
from overlap_gemm.kernels.call import (
    Call,
    announce_read,
    await_peers,
    await_readers,
    begin_warp,
    count_grid,
    finish,
)
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.gemm import output_store, store_subtile
from overlap_gemm.kernels.geometry import READERS_OFFSET
from overlap_gemm.kernels.product import OutputOp
from overlap_gemm.kernels.surface import Output
from overlap_gemm.kernels.work import CtaTile, Share, Work, cta_number
from overlap_gemm.schedules import LinearOrder
from overlap_gemm.spec import GEMM_ALL_GATHER
from overlap_gemm.transports.base import Transport


class SymmetricOutputs(NamedTuple):
    """The run-time arguments.

    Attributes:
        exchange: those of every op.
        addresses: ``Int64``: of the output at ranks ``rank + 1, rank + 2, ...``, the own one last; they are
            multiples of 16.
    """

    exchange: Exchange
    addresses: tuple[Any, ...]


@dataclass(frozen=True)
class SymmetricGather(OutputOp):
    """``out[:, own columns] = a @ b.T (+ bias)`` of every rank, stored in the outputs of all.

    Attributes:
        config: the kernel's configuration.
        transport: raises flags at peers, all of which stores reach.
        world: ranks: there is a TMA descriptor for each.
    """

    transport: Transport
    world: int

    gate = receive = None

    @property
    def order(self) -> LinearOrder:
        """The own columns, walked once."""
        return LinearOrder(self.config.raster_group)

    def share(self, given: SymmetricOutputs, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """All rows by the own columns. A rank without any is given some other B, and computes nothing."""
        shard = given.exchange.shard_rows
        left = cute.size(out, mode=[1]) - given.exchange.rank * shard
        return Share.whole(rows, cutlass.max(cutlass.min(left, shard), 0), shard)

    def more_sources(self, mainloop: Any, given: SymmetricOutputs) -> None:
        """A is all there is to load."""

    def output(self, out: cute.Tensor, given: SymmetricOutputs) -> tuple[Output, ...]:
        """The own columns in the output of each rank, by TMA; ``out`` is the own one."""
        columns, shard = cute.size(out, mode=[1]), given.exchange.shard_rows
        first = cutlass.min(given.exchange.rank, (columns - 1) // shard) * shard
        first = cute.assume(first, divby=CHUNK_BYTES // 2)
        own = cutlass.min(shard, columns - first)
        layout = cute.make_layout((cute.size(out, mode=[0]), own), stride=out.stride)
        dtype = DTYPES[self.config.out_dtype]

        def at(address: Address) -> Output:
            begin = global_pointer(dtype, address, CHUNK_BYTES) + first
            return output_store(self.config, self.stage_dtype, cute.make_tensor(begin, layout))

        return tuple(map(at, given.addresses))

    def begin(self, given: SymmetricOutputs, near: Any) -> Call:
        """Reads the epoch."""
        return Call.begin(given.exchange, near=near)

    @cute.jit
    def comm_role(
        self, ring: Any, stages: Stages, work: Work, call: Call, outputs: tuple[Output, ...]
    ) -> None:
        """See the module; ends the call, too, since no other warp touches the workspace."""
        is_first = cta_number() == 0
        begin_warp(call, GEMM_ALL_GATHER.code, self.transport, is_first)
        await_peers(call, GEMM_ALL_GATHER.code)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            order_async_writes()
            sender = EverywhereSender(self, work, outputs, stages)
            ring.drain(ring.consumer_state(), self.config.subtiles, sender)
        cute.arch.sync_warp()
        if count_grid(call, READERS_OFFSET, 1) != 0:
            announce_read(call, self.transport)
        if is_first:
            await_readers(call, GEMM_ALL_GATHER.code)
        cute.arch.sync_warp()
        finish(call)

    def end(self, call: Call, tally: Any, warps: int) -> None:
        """The comm warp has."""


@dataclass(frozen=True)
class EverywhereSender:
    """A clipped TMA tensor store per subtile into the output of each rank (a ``TileSender``).

    Attributes:
        op: configuration and order.
        work: this cluster's work.
        outputs: of all ranks.
        stages: the ring's stages.
    """

    op: SymmetricGather
    work: Work
    outputs: tuple[Output, ...]
    stages: Stages

    def has(self, tile: Scalar) -> Any:
        """Whether this cluster has so many."""
        return tile < self.work.num_tiles

    def locate(self, tile: Scalar) -> CtaTile:
        """The CTA tile's place."""
        return CtaTile.at(self.op.config, self.work.place(self.op.order, tile))

    @cute.jit
    def send(self, place: CtaTile, subtile: Int32, stage: Int32) -> None:
        """One TMA tensor store for each rank, in one bulk group."""
        for output in self.outputs:
            store_subtile(self.op.config, output.tma, output.tensor, self.stages, place, subtile, stage)

    def publish(self, tile: Scalar, place: CtaTile) -> None:
        """Peers wait for the last word alone."""
