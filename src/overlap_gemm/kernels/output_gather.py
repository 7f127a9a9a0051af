"""GEMM all-gather as an op of the fused kernel: the columns of the output are gathered.

Every rank has all rows of ``a`` and its own rows of ``b``: it computes its own columns of the output, which
all ranks get.

    epilogue        adds the bias (an accumulator is a complete sum), rounds each tile to the output's type
                    -> ring; waits for no peer
    comm lane       bulk stores into every rank's slot[source][tile], its own among them; when they are
                    written, releases flag[tile][source] at every rank
    receive role    per source and tile: waits for the flag, copies the slot into the source's columns

Own tiles go the same way as everybody's: one format and one path, at the cost of writing and reading 1 / P of
the output once more in local memory.

Shards are those of ``torch.chunk``: the last ones are shorter, or empty. A source with fewer columns numbers
its tiles by its own grid, which everybody can tell from N and the full shard; slots are counted by the full
one. A rank without columns computes and sends nothing, and receives like every other.

Progress. As in :mod:`overlap_gemm.kernels.reduce_scatter`: the load, MMA, epilogue and comm roles wait for no
peer, so every tile of every resident CTA is computed, sent and published. The receive role waits for nothing
else, and nobody waits for it but the call's end.

Reuse of slots and flags: the rule of :mod:`overlap_gemm.kernels.call`, which looks at nothing that is
different here. Slots are written by bulk stores of comm lanes, read by ordinary loads of receive roles, in
the buffer of the call's parity; every rank announces its entry and waits for everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute

from overlap_gemm.device.failure import Op
from overlap_gemm.kernels.call import Call, end_warp
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.copies import TileCopies
from overlap_gemm.kernels.epilogue import Bias
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.receive import Receiver
from overlap_gemm.kernels.send import BroadcastSender, send_role
from overlap_gemm.kernels.surface import Output, Transport
from overlap_gemm.kernels.work import Share, Work
from overlap_gemm.schedules import LinearOrder


@dataclass(frozen=True)
class OutputGather:
    """``out[:, own columns] = a @ b.T (+ bias)`` of every rank, on every rank.

    Attributes:
        config: the kernel's configuration; results travel as they are, so its slots are of the output's type.
        transport: how a tile reaches a rank.
    """

    config: GemmConfig
    transport: Transport

    gate = None

    def __post_init__(self) -> None:
        """Raises ValueError for slots of another type."""
        if self.config.slot_dtype != self.config.out_dtype:
            raise ValueError(
                f"what is gathered is the output: slot_dtype={self.config.slot_dtype!r} must be "
                f"out_dtype={self.config.out_dtype!r}"
            )

    @property
    def stage_dtype(self) -> str:
        """A subtile in the ring is a part of the output."""
        return self.config.slot_dtype

    @property
    def order(self) -> LinearOrder:
        """The own columns, walked once."""
        return LinearOrder(self.config.raster_group)

    @property
    def epilogue(self) -> tuple[Bias, ...]:
        """An accumulator is a complete sum."""
        return (Bias(self.config),) if self.config.bias else ()

    @property
    def receive(self) -> Receiver:
        """Stores every source's columns."""
        copies = TileCopies(self.config, self.order, Op.GEMM_ALL_GATHER, self.transport)
        return Receiver(self.config, (copies,))

    def share(self, exchange: Exchange, rows: Any, cols: Any, out: Any) -> Share:
        """All rows by the own columns. A rank without any is given some other B, and computes nothing."""
        shard = exchange.shard_rows
        left = cute.size(out, mode=[1]) - exchange.rank * shard
        return Share.whole(rows, cutlass.max(cutlass.min(left, shard), 0), shard)

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

    def comm_role(self, ring: Any, stages: Any, work: Work, call: Call, output: Output) -> None:
        """Sends every tile to everybody."""
        sender = BroadcastSender(self.config, self.order, self.transport, work, call, stages)
        send_role(ring, sender, work, call, Op.GEMM_ALL_GATHER)
