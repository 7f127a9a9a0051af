"""All-gather GEMM of few rows: a tile has rows of several shards, so each rank reads its weight once.

In :mod:`overlap_gemm.gather.all_gather` a tile ends at its shard's end. Shards that fill half a tile or less
then need several times the passes over the weight. Here the gather buffer is one matrix: shards are equal but
for the last, and contiguous. Roles, where they differ:

- Shard role: sends the local shard to the local gather buffer, too, after all peers.
- Load role: before its first tile waits for every shard, the local one's flag included; then fences the
  asynchronous proxy. After it all tiles are loaded without a wait. Epilogue warps that read scales of rows
  wait so, too.

The argument for progress is the same: sending waits for no peer, and the warps that send are those of
resident CTAs. `joins_shards` is the rule by which a call gets this kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline

from overlap_gemm.config.orders import TilePlace
from overlap_gemm.device.memory import global_pointer, order_async_writes
from overlap_gemm.device.traced import Extras, Scalar
from overlap_gemm.exchange.geometry import SCALE_BYTES
from overlap_gemm.gather.all_gather import ArrivalGate, GatheredShards, GatherToOneShard
from overlap_gemm.gather.gathering import GatherCall, Gathering, ShardRole, await_piece, await_shard
from overlap_gemm.kernel.loads import load_tile
from overlap_gemm.kernel.operand_views import OperandViews
from overlap_gemm.kernel.work import CtaTile, Share


@dataclass(frozen=True)
class AllGatherFewRows(GatherToOneShard):
    """``out = concatenation of the ranks' a @ b.T (+ bias)``, sent by warps; attributes as in `AllGather`."""

    @property
    def gate(self) -> AllShardsGate:
        """Returns the gate, which opens when every shard has arrived."""
        return AllShardsGate(self)

    @property
    def receive(self) -> ShardRole:
        """Returns the role that sends the local shard, also to this rank, and keeps all."""
        return ShardRole(self.config, self.transport, self.push, self.keep, to_itself=True)

    def share(self, arguments: Gathering, rows: Scalar, cols: Any, out: Any) -> Share:
        """Returns all rows, as one shard."""
        weights, columns = self._columns(cols)
        return Share.unsharded(arguments.rows, columns, columns).of_weights(weights)


class AllShardsGate(ArrivalGate):
    """Wait of the load role before its first tile of A, for all shards; see the module."""

    @cute.jit
    def load(
        self,
        mainloop: cutlass.Constexpr,
        res: Any,
        ops: OperandViews,
        buffer: GatheredShards,
        state: pipeline.PipelineState,
        place: TilePlace,
        call: GatherCall,
        opened: Int32,
        early: Any,
    ) -> tuple[pipeline.PipelineState, Int32]:
        """Loads the tile at ``place`` from the gather buffer; arguments as in `ArrivalGate.load`.

        Returns:
            ``state`` after the tile, and ``opened``, which is not -1 once all shards have arrived.
        """
        if opened < 0:
            await_all(call, self.op.transport)
            order_async_writes()
        tile_m, tile_n = self.op.config.cluster_tile
        every = ops._replace(tma_a=buffer.tma, a=buffer.tensor[(None, None, 0)], scales=None)
        row, column = place.m * tile_m, place.n * tile_n
        return load_tile(mainloop, res, every, state, row, column, early), Int32(0)

    @cute.jit
    def open(self, call: GatherCall, shard: Int32, opened: Int32) -> Int32:
        """Waits for all shards before the first row is visited; returns 0. See `ArrivalGate.open`."""
        if opened < 0:
            await_all(call, self.op.transport)
        return Int32(0)

    def with_rows(self, tile: CtaTile, first: Scalar, extras: Extras, call: GatherCall) -> Any:
        """Returns the operands of a tile's epilogue; the first are the gathered scales of all rows."""
        scales = global_pointer(cutlass.Float32, call.buffer.at[call.scales(0)].address, SCALE_BYTES)
        return (cute.make_tensor(scales, cute.make_layout(call.arguments.rows)), *extras[1:])


@cute.jit
def await_all(call: GatherCall, transport: cutlass.Constexpr) -> None:
    """Waits until every shard is in this rank's gather buffer, the local one last; all lanes."""
    rank, owners = call.call.exchange.rank, call.owners
    for i in cutlass.range(1, owners + 1, unroll=1):
        source = (rank + i) % owners
        if source != rank:
            await_shard(call, source, transport)
        else:
            if cute.arch.lane_idx() == 0:
                await_piece(call.call, source, 0)
            cute.arch.sync_warp()
