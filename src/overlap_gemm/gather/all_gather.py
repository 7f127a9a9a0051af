"""All-gather GEMM as an op of the fused kernel.

Rank ``r`` has shard ``r`` of the rows of A and its share of B's rows; its output is all rows by those
columns. Shards are sent into the *gather buffer* of every rank's workspace:

- by copy engines (transport ``copy_engine``, on the host:
  :mod:`overlap_gemm.backends.fused.gather_plans`);
- by the kernel's own warps (``peer_bulk``);
- to peers without P2P access, by a relay kernel alongside (``staged``: :mod:`overlap_gemm.exchange.relay`).
  The host has copied the local shard to its place in this rank's buffer. The relay puts it from there, in up
  to 8 pieces (`SHARD_PIECES`), each with a flag.

Roles:

- Load role: local shard first, read in place; then those of ``rank + 1, rank + 2, ...``, the order in which
  they arrive. Before the first tile of a shard it waits for the shard (`await_shard`: acquire, system scope,
  bounded); then all its lanes fence the asynchronous proxy. The grid's last reader (`readers`) signals to
  every peer that this rank *has read*. After that nothing is in flight to this rank, since every shard has a
  tile here, whose load waited for the shard.
- Shard role: the receive warps. ``peer_bulk``: they send their units of the local shard to ``rank - 1, rank -
  2, ...``; the last warp to have sent to a peer releases the flag there. ``keep``: they copy every shard to a
  tensor of the caller, and count as readers.
- Comm lane: TMA stores of the output. After them the grid's first comm warp waits until every peer has
  entered and has read.

Progress. Sending waits for no peer. Copy engines take no SM, a sending warp belongs to a resident CTA that
stores and counts, and a relay has a separate place. So every shard arrives, every gate opens, every tile is
loaded, and every rank signals that it has read. A rank waits for these signals only after all other work.

**Reuse.** There is one gather buffer, not one for each parity: the destination of copy engines is fixed on
the host, and in a captured graph for all its replays, while the parity is the device's. The rule of
:mod:`overlap_gemm.exchange.call` holds with a distance of one call:

1. A rank's call ``e`` ends after every peer's "has read ``e``".
2. Its copies and puts of call ``e + 1`` begin after its call ``e``.
3. A put's source, too, is overwritten only after call ``e``: a peer that has read has received all of it.

A copy engine copies a flag's value from the device word `NEXT_EPOCH_OFFSET`. A value of the host would be the
same in all replays of a captured graph. The word changes at the end of a call, after every peer's "has read".
By then this rank's flags have arrived at all peers, so the copies of the word are complete.

**Scales** of A have the flag of their shard, and a separate source: no copy sends rows and scales together.
Scales of rows follow the rows of all shards, so that the rows of several shards are one matrix, and their
scales one vector (:mod:`overlap_gemm.gather.few_rows`). Scales of blocks, and all that a relay puts, follow
the space for the rows of their shard: a put sends both. With 16 bytes after each row a box of TMA would touch
two lines of L2 per row. The epilogue's warps read scales of rows, so they are readers of the gather buffer,
too. The load role reads scales of blocks (:mod:`overlap_gemm.mainloop.blocks`,
:mod:`overlap_gemm.mainloop.mx`) with its tiles.

**Several weights** share one gather. As a rule they are one product (`work.WeightColumns`): the tiles of each
follow each other in a shard, and the comm lane stores a tile to the output of its weight. Else they are
launches of one call, of one epoch, one after the other:

- First launch (``is_first``): signals the entry, and sends.
- Every launch: waits for the shards, multiplies, stores.
- Last launch (``is_last``): keeps shards, counts readers, signals "has read", waits for the peers, ends the
  call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import cutlass
from cutlass import Int32, Int64, cute, pipeline

from overlap_gemm.config.orders import LinearOrder, LocalShardFirst, TilePlace
from overlap_gemm.device.memory import global_pointer, order_async_writes
from overlap_gemm.device.traced import Extras, Scalar, Stages
from overlap_gemm.exchange.call import Call, await_peers, await_readers, begin_warp, end_warp
from overlap_gemm.exchange.geometry import SCALE_BYTES
from overlap_gemm.gather.gathering import (
    GatherCall,
    Gathering,
    ShardRole,
    await_shard,
    has_read,
    readers,
)
from overlap_gemm.kernel.loads import load_tile
from overlap_gemm.kernel.operand_views import OperandViews
from overlap_gemm.kernel.plain_gemm import OutputSender, store_subtile
from overlap_gemm.kernel.product import OutputOp, output_store
from overlap_gemm.kernel.work import CtaTile, Share, WeightColumns, Work, cta_number
from overlap_gemm.spec import ALL_GATHER_GEMM
from overlap_gemm.transports.interface import Transport


class GatheredShards(NamedTuple):
    """TMA views of the gather buffer, and of the output by shards.

    Attributes:
        tma: TMA atom.
        tensor: Coordinate tensor: ``(shard rows, K, owners)``, or ``(shard rows, N, shards)``.
        scales: Atom and coordinate tensor of scales of blocks, or None.
    """

    tma: Any
    tensor: Any
    scales: Any = None


class ShardedOutput(NamedTuple):
    """The output, cut into shards, so that a tile is clipped at the end of its shard.

    Attributes:
        full: All shards but the last, which may be shorter.
        last: The last shard.
    """

    full: GatheredShards
    last: GatheredShards


@dataclass(frozen=True)
class AllGather(OutputOp):
    """``out = concatenation of the ranks' a @ b.T (+ bias)``.

    Attributes:
        config: The kernel's configuration.
        transport: Transport that raises flags at peers.
        push: Whether the kernel's warps send the local shard; else copy engines do.
        keep: Whether the gathered operand is copied to a tensor of the caller.
    """

    transport: Transport
    push: bool = False
    keep: bool = False

    code = ALL_GATHER_GEMM.code
    has_chunks = False

    @property
    def order(self) -> Any:
        """Returns the order of the tiles: full shards in the order of their arrival."""
        return LocalShardFirst(self.config.raster_group)

    @property
    def gate(self) -> Any:
        """Returns the gate, which opens for a shard when it has arrived."""
        return ArrivalGate(self)

    @property
    def receive(self) -> ShardRole | None:
        """Returns the role that sends the local shard and keeps all; None if neither is needed."""
        if not (self.push or self.keep):
            return None
        return ShardRole(self.config, self.transport, self.push, self.keep)

    def begin(self, arguments: Gathering, peer_table: Any) -> GatherCall:
        """Reads the epoch; see `Call.begin`."""
        return GatherCall(Call.begin(arguments.exchange, peer_table=peer_table), arguments)

    def share(self, arguments: Gathering, rows: Scalar, cols: Any, out: Any) -> Share:
        """Returns all rows, divided by shards; A is the local shard."""
        weights, columns = self._columns(cols)
        rank, shard = arguments.exchange.rank, arguments.exchange.shard_rows
        return Share.by_rows(arguments.rows, rank, shard, columns).of_weights(weights)

    def _columns(self, cols: Any) -> tuple[Any, Any]:
        """Returns (`WeightColumns` of several weights or None, columns of a shard), from N of each weight."""
        return WeightColumns.of(self.config, cols) if isinstance(cols, tuple) else (None, cols)

    def more_sources(self, mainloop: Any, arguments: Gathering) -> Any:
        """Returns the TMA view of the gather buffer."""
        scales = None if arguments.scales is None else mainloop.tma_of_scales(arguments.scales)
        tma, tensor = mainloop.tma_of_a(arguments.gathered)
        return GatheredShards(tma, tensor, scales)

    def output(self, out: Any, arguments: Gathering) -> Any:
        """Returns the TMA stores of the output, or of each of several, from the ring's stages."""
        if isinstance(out, tuple):
            return tuple([self._output(one, arguments) for one in out])
        return self._output(out, arguments)

    def _output(self, out: cute.Tensor, arguments: Gathering) -> Any:
        """Returns the TMA stores of one output."""
        cfg, shard = self.config, arguments.exchange.shard_rows
        columns, pitch = cute.size(out, mode=[1]), out.stride[0]
        last = (arguments.rows + shard - 1) // shard - 1
        offset = cute.assume(Int64(last) * shard * pitch, divby=128 // out.element_type.width)
        between = cute.assume(Int64(shard) * pitch, divby=128 // out.element_type.width)
        full = cute.make_layout((shard, columns, cutlass.max(last, 1)), stride=(pitch, 1, between))
        rest = cute.make_layout((arguments.rows - last * shard, columns, 1), stride=(pitch, 1, between))

        def stores(tensor: cute.Tensor) -> GatheredShards:
            return GatheredShards(*output_store(cfg, self.stage_dtype, tensor))

        return ShardedOutput(
            stores(cute.make_tensor(out.iterator, full)),
            stores(cute.make_tensor(out.iterator + offset, rest)),
        )

    def sender(self, work: Work, output: Any, stages: Stages) -> Any:
        """Returns the sender of tiles to the output, or to the one of a tile's weight."""
        if work.shards.weights is None:
            return self._sender(work, output, stages)
        each = [self._sender(work, one, stages) for one in output]
        return ListSender(self, work, output, stages, tuple(each))

    def _sender(self, work: Work, output: Any, stages: Stages) -> OutputSender:
        """Returns the sender of tiles to one output."""
        return ShardSender(self, work, output, stages)

    @cute.jit
    def comm_role(self, ring: Any, stages: Stages, work: Work, call: GatherCall, output: Any) -> None:
        """Stores every tile, one lane; all lanes of the comm warp. The grid's first waits for readers."""
        is_first = cta_number() == 0
        begin_warp(call.call, self.code, self.transport, is_first and call.arguments.is_first != 0)
        if cute.arch.lane_idx() == 0:
            sender = self.sender(work, output, stages)
            ring.drain(ring.consumer_state(), self.config.stored_subtiles, sender)
        cute.arch.sync_warp()
        if is_first and call.arguments.is_last != 0:
            await_peers(call.call, self.code)
            await_readers(call.call, self.code)

    @cute.jit
    def end(self, call: GatherCall, counters: Any, warps: cutlass.Constexpr) -> None:
        """Ends a warp's access to the workspace, in the last launch of the call; see `KernelOp.end`."""
        if call.arguments.is_last != 0:
            end_warp(call.call, counters, warps)


@dataclass(frozen=True)
class GatherToOneShard(AllGather):
    """Base of ops whose operand is sent and whose tiles are those of one shard, the output."""

    @property
    def order(self) -> Any:
        """Returns the order of all tiles."""
        return LinearOrder(self.config.raster_group)

    def _output(self, out: cute.Tensor, arguments: Gathering) -> Any:
        """Returns the TMA store of one output."""
        return OutputOp.output(self, out, arguments)

    def _sender(self, work: Work, output: Any, stages: Stages) -> OutputSender:
        """Returns the sender of tiles to one output."""
        return OutputSender(self, work, output, stages)


@dataclass(frozen=True)
class ArrivalGate:
    """Wait of the load role before a tile of A, and its end after the last, see the module.

    Attributes:
        op: Op of the kernel.
    """

    op: AllGather

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
        """Loads the tile at ``place`` after its shard has arrived.

        Args:
            mainloop: Mainloop that loads.
            res: Resources of the mainloop.
            ops: Operands, whose A is the local shard.
            buffer: View of the gather buffer.
            state: State of the load pipeline.
            place: Place of the tile.
            call: Run-time values of the call.
            opened: Shard for which the gate was opened last; -1 before the first.
            early: Number of k tiles of B in flight, see `loads.load_k_tiles`.

        Returns:
            ``state`` after the tile, and ``opened``.
        """
        tile_m, tile_n = self.op.config.cluster_tile
        row, column = place.m * tile_m, place.n * tile_n
        if place.shard == call.call.exchange.rank:
            state = load_tile(mainloop, res, ops, state, row, column, early)
        else:
            if place.shard != opened:
                await_shard(call, place.shard, self.op.transport)
                order_async_writes()
            arrived = buffer.tensor[(None, None, place.shard)]
            gathered = ops._replace(tma_a=buffer.tma, a=arrived, scales=None)
            if cutlass.const_expr(buffer.scales is not None):
                tma, scales = buffer.scales
                came = ops.scales.with_gathered((tma, scales[(None, None, place.shard)]))
                gathered = gathered._replace(scales=came)
            state = load_tile(mainloop, res, gathered, state, row, column, early)
        return state, Int32(place.shard)

    @cute.jit
    def open(self, call: GatherCall, shard: Int32, opened: Int32) -> Int32:
        """Waits for ``shard`` before its rows are visited; all lanes of an epilogue warp. Returns ``shard``.

        It has arrived, since its sum exists. But the signal of the sum, on sm_100 a commit's, does not order
        other threads' stores.
        """
        if shard != opened and shard != call.call.exchange.rank:
            await_shard(call, shard, self.op.transport)
        return Int32(shard)

    def with_rows(self, tile: CtaTile, first: Scalar, extras: Extras, call: GatherCall) -> Any:
        """Returns the operands of a tile's epilogue; the first are the scales gathered with the tile's shard.

        Args:
            tile: CTA tile.
            first: Row of the output that is the shard's first: scales are numbered by the output's rows.
            extras: Operands of the epilogue's visitors.
            call: Run-time values of the call.
        """
        return (self._row_scales(tile.owner, first, call), *extras[1:])

    def _row_scales(self, shard: Scalar, first: Scalar, call: GatherCall) -> cute.Tensor:
        """Returns the scales gathered with the rows of a shard: one for each row."""
        arguments, exchange = call.arguments, call.call.exchange
        (_, nbytes), arrived = call.rows(shard), call.buffer.at[call.scales(shard)].address
        base = cutlass.select_(shard == exchange.rank, cast(Any, arguments.after).address, arrived)
        scales = global_pointer(cutlass.Float32, base - Int64(first) * SCALE_BYTES, SCALE_BYTES)
        return cute.make_tensor(scales, cute.make_layout(first + Int32(nbytes // arguments.row_bytes)))

    @cute.jit
    def end(self, call: GatherCall) -> None:
        """Counts a warp as a reader, after its last load, or last visit of rows."""
        if call.arguments.is_last != 0:
            has_read(call, self.op.transport, readers(self.op.config, self.op.keep))


@dataclass(frozen=True)
class ListSender(OutputSender):
    """Sender of a product of several weights, each of which has an output (a ``TileSender``).

    Attributes:
        senders: Sender to the output of each weight.
    """

    senders: tuple[Any, ...]

    @cute.jit
    def send(self, place: CtaTile, subtile: Int32, stage: Int32) -> None:
        """Starts the store to the output of the tile's weight, which clips columns past the weight's end."""
        weights = self.work.shards.weights
        for i in cutlass.range_constexpr(len(weights)):
            begin, columns, _ = weights[i]
            if (place.column >= begin) & (place.column < begin + columns):
                self.senders[i].send(place._replace(column=place.column - begin), subtile, stage)


class ShardSender(OutputSender):
    """Sender of an output by shards: `ShardedOutput`."""

    @cute.jit
    def send(self, place: CtaTile, subtile: Int32, stage: Int32) -> None:
        """Starts one TMA tensor store; the hardware clips rows past the shard's end."""
        cfg, stages = self.op.config, self.stages
        if place.owner == self.work.all_tiles.owners - 1:
            last = self.output.last
            store_subtile(cfg, last.tma, last.tensor[(None, None, 0)], stages, place, subtile, stage)
        else:
            full = self.output.full
            store_subtile(
                cfg, full.tma, full.tensor[(None, None, place.owner)], stages, place, subtile, stage
            )
