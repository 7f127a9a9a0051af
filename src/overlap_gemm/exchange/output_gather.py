"""GEMM all-gather as an op of the fused kernel: the columns of the output are gathered.

Every rank has all rows of ``a`` and its own rows of ``b``: it computes its own columns of the output, which
all ranks get.

    epilogue        adds the bias (an accumulator is a complete sum), rounds each tile to the output's type
                    -> ring; waits for no peer
    comm lane       of each subtile: a clipped TMA store into the own columns of the output, bulk stores into
                    every peer's slot[source][tile]; when they are written, releases flag[tile][source] there
    receive role    per peer and tile: waits for the flag, copies the slot into the source's columns

Own tiles go straight from the ring to the output, always: what `build` asks of an output, and that
full shards have multiples of 8 columns, is what TMA needs of the own columns. They go to the own slot as
well only where peers beyond reach may have them put from there. (By way of the slot, 1 / P of the output
would be written and read once more in local memory.)

With `transports.ll` the comm warp's lanes store words at the peers, and its first lane the own subtile by
TMA, for which it waits before the stage is free.

Shards are those of ``torch.chunk``: the last ones are shorter, or empty. A source with fewer columns numbers
its tiles by its own grid, which everybody can tell from N and the full shard; slots are counted by the full
one. A rank without columns computes and sends nothing, and receives like every other.

Progress. As in :mod:`overlap_gemm.exchange.reduce_scatter`: the load, MMA, epilogue and comm roles wait for
no peer, so every tile of every resident CTA is computed, sent and published. The receive role waits for
nothing else, and nobody waits for it but the call's end.

Reuse of slots and flags: the rule of :mod:`overlap_gemm.exchange.call`, which looks at nothing that is
different here. Slots are written by bulk stores of comm lanes, read by ordinary loads of receive roles, in
the buffer of the call's parity; every rank announces its entry and waits for everybody's. The output is this
rank's alone: its own columns are written by TMA, the others by ordinary stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from overlap_gemm.config.orders import LinearOrder
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.copies import TileCopies
from overlap_gemm.exchange.receive import Receiver
from overlap_gemm.exchange.send import BroadcastSender, GatherSender
from overlap_gemm.exchange.tile_exchange import TileExchange
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.plain_gemm import own_columns
from overlap_gemm.kernel.surface import Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.spec import GEMM_ALL_GATHER


@dataclass(frozen=True)
class OutputGather(TileExchange):
    """``out[:, own columns] = a @ b.T (+ bias)`` of every rank, on every rank.

    Attributes:
        config: the kernel's configuration; results travel as they are, so its slots are of the output's type.
        transport: how a tile reaches a rank.
    """

    code = GEMM_ALL_GATHER.code

    def __post_init__(self) -> None:
        """Raises ValueError for slots of another type."""
        if self.config.slot_dtype != self.config.out_dtype:
            raise ValueError(
                f"what is gathered is the output: slot_dtype={self.config.slot_dtype!r} must be "
                f"out_dtype={self.config.out_dtype!r}"
            )

    @property
    def order(self) -> LinearOrder:
        """The own columns, walked once."""
        return LinearOrder(self.config.raster_group)

    @property
    def visits(self) -> Visits:
        """An accumulator is a complete sum."""
        return Visits(self.config, ("partial", "complete"))

    @property
    def receive(self) -> Receiver:
        """Stores every peer's columns."""
        copies = TileCopies(self.config, self.order, self.code, self.transport)
        return Receiver(self.config, (copies,))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """All rows by the own columns. A rank without any is given some other B, and computes nothing."""
        return Share.of_own_columns(rows, exchange.rank, exchange.shard_rows, out)

    def output(self, out: cute.Tensor, exchange: Exchange) -> Output:
        """The own columns, by TMA; the others' by ordinary stores."""
        return own_columns(self.config, self.stage_dtype, out, exchange)

    def sender(self, stages: Stages, work: Work, call: Call, output: Output) -> GatherSender:
        """Stores every tile, and sends it to everybody."""
        return GatherSender(BroadcastSender(self, work, call, stages, call.epoch, to_itself=False), output)
