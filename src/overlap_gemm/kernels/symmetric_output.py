"""Symmetric outputs: complete tiles go by TMA to where they belong in the output of every rank.

In :mod:`overlap_gemm.kernels.output_gather`, and in the second half of a two-shot all-reduce
(:mod:`overlap_gemm.kernels.all_reduce`), the output is any memory of the caller's, so tiles go through slots,
from which every rank copies M x N elements. Where all ranks give outputs that their peers reach, of the same
strides, nothing is copied, and nothing is received but partials.

**GEMM all-gather**:

    comm warp       waits until every peer has entered this call; then, of each subtile, one lane starts a
                    clipped TMA store into the own columns of every rank's output, the next rank's first. The
                    grid's last, when all its stores are written, tells every peer that this rank's columns
                    are there; the grid's first waits for that word of every peer
    other roles     those of a plain GEMM

**GEMM all-reduce**, a two-shot one with own tiles last (:mod:`overlap_gemm.kernels.own`): in a rank's columns
the tiles that it has summed are complete.

    epilogue        sums own tiles in the ring's stages
    comm warp       the others' tiles to their owners' slots; when they are published it waits until every
                    peer has entered this call, and stores own tiles as above; the same last word
    receive role    nothing

**When an output may be written.** A rank that has entered this call has ended all that its stream had before
it, so also what read what was in its output. So no output is kept free by a rule of two calls, as slots are:
the wait for the entries is in front of the first store, and is hidden by the first tile's product. And an
output is the caller's until he gives it to another call.

Progress. Every rank announces its entry before it waits for anybody, so every comm warp begins; the wait for
the peers' last word comes after all stores of the CTA; stores wait for nobody. In an all-reduce partials are
published before the wait for the entries, and sums wait for partials alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, global_pointer, order_async_writes
from overlap_gemm.device.traced import Address, Scalar, Stages
from overlap_gemm.kernels.all_reduce import TwoShot
from overlap_gemm.kernels.call import (
    Call,
    announce_read,
    await_entry,
    await_peers,
    await_readers,
    begin_warp,
    count_grid,
    finish,
)
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.exchanging import PartialExchange
from overlap_gemm.kernels.gemm import OutputSender, own_columns, store_subtile
from overlap_gemm.kernels.geometry import READERS_OFFSET
from overlap_gemm.kernels.orders import DealtShards, OwnTilesLast
from overlap_gemm.kernels.own import OwnSums
from overlap_gemm.kernels.product import OutputOp
from overlap_gemm.kernels.receive import Receiver
from overlap_gemm.kernels.send import OwnerSender
from overlap_gemm.kernels.surface import Output
from overlap_gemm.kernels.work import CtaTile, Share, Work, cta_number
from overlap_gemm.spec import GEMM_ALL_GATHER, GEMM_ALL_REDUCE
from overlap_gemm.transports.base import Transport


class SymmetricOutputs(NamedTuple):
    """The run-time arguments.

    Attributes:
        exchange: those of every op; a shard is one of columns.
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

    def share(self, given: SymmetricOutputs, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """All rows by the own columns. A rank without any is given some other B, and computes nothing."""
        return Share.of_own_columns(rows, given.exchange.rank, given.exchange.shard_rows, out)

    def output(self, out: cute.Tensor, given: SymmetricOutputs) -> tuple[Output, ...]:
        """The own columns in the output of each rank, by TMA; ``out`` is the own one."""
        return everywhere(self.config, out, given)

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
        tell_stored(call, GEMM_ALL_GATHER.code, self.transport)
        finish(call)

    def end(self, call: Call, tally: Any, warps: int) -> None:
        """The comm warp has."""


@dataclass(frozen=True)
class SymmetricAllReduce(PartialExchange):
    """``out = sum over ranks of (a @ b.T) (+ bias)``: owners of columns sum, and store in the outputs of all.

    Attributes:
        config: the kernel's configuration, with own tiles last.
        transport: how a partial reaches its owner.
        world: ranks: there is a TMA descriptor for each.
    """

    world: int

    code = GEMM_ALL_REDUCE.code

    def __post_init__(self) -> None:
        """Raises ValueError for tiles that are summed elsewhere than in the ring."""
        if not self.config.own_last:
            raise ValueError("what is stored in symmetric outputs is summed by the epilogue: own_last=True")

    @property
    def order(self) -> DealtShards | OwnTilesLast:
        """As a two-shot has it."""
        return self._two_shot.order

    @property
    def own_sums(self) -> OwnSums | None:
        """As a two-shot has them."""
        return self._two_shot.own_sums

    @property
    def receive(self) -> Receiver:
        """Nothing."""
        return Receiver(self.config, ())

    def share(self, given: SymmetricOutputs, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """As a two-shot has it."""
        return self._two_shot.share(given.exchange, rows, cols, out)

    def output(self, out: cute.Tensor, given: SymmetricOutputs) -> tuple[Output, ...]:
        """The own columns in the output of each rank, by TMA; ``out`` is the own one."""
        return everywhere(self.config, out, given)

    def begin(self, given: SymmetricOutputs, near: Any) -> Call:
        """Reads the epoch."""
        return Call.begin(given.exchange, near=near)

    def sender(self, stages: Stages, work: Work, call: Call, output: Any) -> OwnerSender:
        """Sends every tile to its owner."""
        return self._two_shot.sender(stages, work, call, output)

    def own_sender(
        self, stages: Stages, own: Work, call: Call, outputs: tuple[Output, ...]
    ) -> EverywhereSender:
        """One lane: waits for the entries, then stores the own tiles' sums.

        Whoever has a tile's sum has had partials of all peers, so they have entered some call; here it is
        known to be this one before anything is stored in their outputs, and the fence comes after.
        """
        await_entries(call, self.code)
        order_async_writes()
        return EverywhereSender(self, own, outputs, stages)

    def comm_role(
        self, ring: Any, stages: Stages, work: Work, call: Call, outputs: tuple[Output, ...]
    ) -> None:
        """See the module."""
        super().comm_role(ring, stages, work, call, outputs)
        tell_stored(call, self.code, self.transport)

    @property
    def _two_shot(self) -> TwoShot:
        return TwoShot(self.config, self.transport)


def everywhere(config: GemmConfig, out: cute.Tensor, given: SymmetricOutputs) -> tuple[Output, ...]:
    """Host side: the own columns in the output of each rank, by TMA; ``out`` is the own one."""
    dtype = DTYPES[config.out_dtype]

    def at(address: Address) -> Output:
        there = cute.make_tensor(global_pointer(dtype, address, CHUNK_BYTES), out.layout)
        return own_columns(config, config.out_dtype, there, given.exchange)

    return tuple(map(at, given.addresses))


@cute.jit
def await_entries(call: Call, op: cutlass.Constexpr) -> None:
    """One lane: waits until every peer has entered this call."""
    for peer in cutlass.range(call.exchange.world, unroll=1):
        if peer != call.exchange.rank:
            await_entry(call, op, peer)


@cute.jit
def tell_stored(call: Call, op: cutlass.Constexpr, transport: cutlass.Constexpr) -> None:
    """All lanes of each CTA's comm warp, after its last store: the outputs are complete, everybody's."""
    cute.arch.sync_warp()
    if count_grid(call, READERS_OFFSET, 1) != 0:
        announce_read(call, transport)
    if cta_number() == 0:
        await_readers(call, op)
    cute.arch.sync_warp()


class EverywhereSender(OutputSender):
    """The same into the output of each rank: a tuple of `Output`."""

    @cute.jit
    def send(self, place: CtaTile, subtile: Int32, stage: Int32) -> None:
        """One TMA tensor store for each rank, in one bulk group."""
        for output in self.output:
            store_subtile(self.op.config, output.tma, output.tensor, self.stages, place, subtile, stage)
