"""GEMM all-gather as an op of the fused kernel: the columns of the output are gathered.

Every rank has all rows of ``a`` and its shard of the rows of ``b``. It computes its columns of the output,
which all ranks get.

    epilogue        adds the bias (an accumulator is a complete sum), rounds each tile to the output's type
                    -> ring; waits for no peer
    comm lane       of each subtile: a clipped TMA store into local columns of the output, bulk stores into
                    every peer's slot[source][tile]; when they are written, releases flag[tile][source] there
    receive role    per peer and tile: waits for the flag, copies the slot into the source's columns

Local tiles are always stored from the ring to the output directly. TMA can store the local columns by the
requirements of `build` on an output, and because full shards have multiples of 8 columns. Local tiles are
stored in the local slot as well only if they are put from there to peers without P2P access. (By way of the
slot, 1 / P of the output would be written and read once more in local memory.)

With `transports.ll` the comm warp's lanes store LL packets at the peers. Its first lane stores the local
subtile by TMA, for which it waits before the stage is free.

Shards are those of ``torch.chunk``: the last ones are shorter, or empty. A source with fewer columns numbers
its tiles by its own grid, which every rank computes from N and the full shard; slots are counted by the full
one. A rank without columns computes and sends nothing, and receives like every other.

Progress. As in :mod:`overlap_gemm.exchange.reduce_scatter`: the load, MMA, epilogue and comm roles wait for
no peer, so every tile of every resident CTA is computed, sent and published. The receive role waits for
nothing else, and only the call's end waits for it.

Reuse of slots and flags: the rule of :mod:`overlap_gemm.exchange.call`, which does not depend on anything
that differs here. Slots are written by bulk stores of comm lanes, read by ordinary loads of receive roles, in
the buffer of the call's parity. Every rank signals its entry and waits for that of every rank. The output is
this rank's alone: its local columns are written by TMA, the others by ordinary stores.
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
from overlap_gemm.kernel.plain_gemm import local_columns
from overlap_gemm.kernel.protocols import Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.spec import GEMM_ALL_GATHER


@dataclass(frozen=True)
class OutputGather(TileExchange):
    """``out[:, local columns] = a @ b.T (+ bias)`` of every rank, on every rank.

    Attributes:
        config: The kernel's configuration; results are sent unchanged, so its slots have the output's type.
        transport: Transport of a tile to a rank.
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
        """Returns the order of the local columns, once each."""
        return LinearOrder(self.config.raster_group)

    @property
    def visits(self) -> Visits:
        """Returns visits of both kinds: an accumulator is a complete sum."""
        return Visits(self.config, ("partial", "complete"))

    @property
    def receive(self) -> Receiver:
        """Returns the receive role, which stores every peer's columns."""
        copies = TileCopies(self.config, self.order, self.code, self.transport)
        return Receiver(self.config, (copies,))

    def share(self, exchange: Exchange, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns all rows by the local columns. A rank without columns computes nothing."""
        return Share.of_local_columns(rows, exchange.rank, exchange.shard_rows, out)

    def output(self, out: cute.Tensor, exchange: Exchange) -> Output:
        """Returns the TMA store of the local columns; the others are stored by ordinary stores."""
        return local_columns(self.config, self.stage_dtype, out, exchange)

    def sender(self, stages: Stages, work: Work, call: Call, output: Output) -> GatherSender:
        """Returns the sender, which stores every tile, and sends it to every peer."""
        return GatherSender(BroadcastSender(self, work, call, stages, call.epoch, to_itself=False), output)
