"""All-to-all GEMM as an op of the fused kernel: columns of A are exchanged for rows, before the product.

Rank ``r`` has a shard of the columns of A, and all of B. It computes a shard of the rows. The *slice* of rank
``s`` is its part of K. Each rank sends to every peer the peer's rows of the local slice. These rows are
contiguous in the local A and in a slot of the peer's gather buffer. Workspaces, the rule for reuse and the
argument for progress are those of :mod:`overlap_gemm.gather.all_gather`.

    sender        copy engines: chunks of rows, to one peer after the other, each followed by its flag;
                  or (``push``) the receive warps: all rows for a peer, then the flags of all chunks
    load role     per tile: local slice, in place; then per source ``rank + 1, rank + 2, ...``: waits for flag
                  (chunk, source) of the tile's last row, fences the asynchronous proxy, loads the slice
    comm lane     TMA stores of the output

A source's chunks arrive in order: a chunk's flag is raised after all earlier chunks. Every rank has rows, so
every chunk has a tile here, whose load waited for it. After the last read nothing is in flight to this rank.

The sum over K begins with the local slice. So the bits of a row depend on the rank that computes it.

**A list along K.** A may be several matrices, as the gradients of q, k and v, and B as many; their products
are added. Each has a region of the gather buffer, with a slot for each source. A chunk's flag follows its
rows of all matrices. A slice is loaded matrix after matrix, each with its own last k tile.

Scales of blocks of A are sent before the first flag. In a slot they follow the space for the rows of a full
shard. The local ones are a matrix for each rank, as they are sent. Slices are whole k tiles. Promoted scales
of B (`mainloop.blocks`) are in the order in which this rank adds: from its slice on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import cutlass
from cutlass import Int32, Int64, cute, pipeline

from overlap_gemm.config.orders import TilePlace
from overlap_gemm.device.failure import Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import order_async_writes
from overlap_gemm.device.traced import Scalar
from overlap_gemm.exchange.call import await_entry, count_grid
from overlap_gemm.exchange.geometry import sender_counter
from overlap_gemm.gather.all_gather import GatheredShards, GatherToOneShard
from overlap_gemm.gather.gathering import (
    GatherCall,
    Gathering,
    ShardRole,
    ShardScales,
    copy_rows,
    copy_units,
    has_read,
    readers,
)
from overlap_gemm.kernel.loads import load_k_tiles
from overlap_gemm.kernel.operand_views import OperandViews
from overlap_gemm.kernel.split import num_k_tiles
from overlap_gemm.kernel.work import Share
from overlap_gemm.spec import ALL_TO_ALL_GEMM
from overlap_gemm.spec.sharding import ceil_div


@dataclass(frozen=True)
class InputExchange(GatherToOneShard):
    """``out = (this rank's rows of all columns of a) @ b.T (+ bias)``; attributes as in `AllGather`."""

    code = ALL_TO_ALL_GEMM.code
    has_chunks = True

    def __post_init__(self) -> None:
        """Raises ValueError for ``k_split`` other than 1, and for launch ``dependent_weights``.

        A tile sums K slice by slice, from the local slice on. Parts of K or early loads do not begin there.
        """
        if self.config.k_split > 1 or self.config.loads_weights_early:
            raise ValueError(
                f"{ALL_TO_ALL_GEMM.name} sums K from the local columns of x on: k_split must be 1 and launch "
                f"not 'dependent_weights', got k_split={self.config.k_split}, launch={self.config.launch!r}"
            )

    @property
    def gate(self) -> SliceGate:
        """Returns the gate, which opens for a chunk of each slice when it has arrived."""
        return SliceGate(self)

    @property
    def receive(self) -> SliceRole | None:
        """Returns the role that sends rows and keeps the exchanged ones; None if neither is needed."""
        if not (self.push or self.keep):
            return None
        return SliceRole(self.config, self.transport, self.push, self.keep)

    def view_of_b(self, b: cute.Tensor, gathering: Gathering, part: int) -> cute.Tensor:
        """Returns B cut into the ranks' slices: loads after the end of a slice, too, are zeros."""
        gathered, world = gathering.part_of_k(part).gathered, gathering.exchange.world
        depth = cute.size(gathered, mode=[1])
        between = cute.assume(Int64(depth) * b.stride[1], divby=128 // b.element_type.width)
        layout = cute.make_layout((cute.size(b, mode=[0]), depth, world), stride=(*b.stride, between))
        return cute.make_tensor(b.iterator, layout)

    def more_sources(self, mainloop: Any, gathering: Gathering) -> Any:
        """Returns the TMA views of the gather buffer, one for each matrix along K."""
        of_one, parts = super().more_sources, range(1 + len(gathering.later or ()))
        return tuple([of_one(mainloop, gathering.part_of_k(i)) for i in parts])

    def share(self, gathering: Gathering, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns this rank's rows, as one shard."""
        return Share.unsharded(cute.size(out, mode=[0]), cols, cols)


@dataclass(frozen=True)
class SliceGate:
    """Wait of the load role, within a tile's K, before the slice of each peer; see the module.

    Attributes:
        op: Op of the kernel.
    """

    op: InputExchange

    @cute.jit
    def load(
        self,
        mainloop: cutlass.Constexpr,
        res: Any,
        ops: OperandViews,
        buffer: tuple[GatheredShards, ...],
        state: pipeline.PipelineState,
        place: TilePlace,
        call: GatherCall,
        opened: Int32,
        early: Any,
    ) -> tuple[pipeline.PipelineState, Int32]:
        """Loads the tile at ``place``, slice by slice.

        Args:
            mainloop: Mainloop that loads.
            res: Resources of the mainloop.
            ops: Operands, whose A is the local slice of all rows; of B all slices.
            buffer: View of the gather buffer for each matrix along K.
            state: State of the load pipeline.
            place: Place of the tile.
            call: Run-time values of the call.
            opened: Last chunk that has arrived from all sources; -1 before the first.
            early: None: nothing is in flight.

        Returns:
            ``state`` after the tile, and ``opened``.
        """
        cfg, exchange = self.op.config, call.call.exchange
        tile_m, tile_n = cfg.cluster_tile
        row, column = place.m * tile_m, place.n * tile_n
        rank, parts = exchange.rank, ops.parts_of_k
        for p in cutlass.range_constexpr(len(parts)):
            local, number = self._local_slice(parts[p], call)
            at = rank * exchange.shard_rows + row
            state = load_k_tiles(res.ab, state, *mainloop.loads(res, local, at, column)[:2], Int32(0), number)
        chunk = (cutlass.min(row + tile_m, call.num_rows(rank)) - 1) // call.arguments.chunk_rows
        for i in cutlass.range(1, exchange.world, unroll=1):
            source = (rank + i) % exchange.world
            if chunk > opened:
                await_chunk(call, chunk, source)
                order_async_writes()
            for p in cutlass.range_constexpr(len(parts)):
                sent, k_tiles = self._slice(parts[p], buffer[p], source, i)
                state = load_k_tiles(
                    res.ab, state, *mainloop.loads(res, sent, row, column)[:2], Int32(0), k_tiles
                )
        return state, cutlass.max(opened, chunk)

    def _local_slice(self, part: OperandViews, call: GatherCall) -> tuple[OperandViews, Any]:
        """Returns the views of the local slice of a matrix along K, and its number of k tiles."""
        cfg, exchange = self.op.config, call.call.exchange
        of_b = part.b[(None, None, exchange.rank)]
        local, k_tiles = part._replace(b=of_b), num_k_tiles(cfg, of_b)
        if cfg.blocks is None:
            return local, k_tiles
        of_rows = part.scales.of_local_slice(cfg, exchange.rank, exchange.shard_rows, k_tiles)
        return local._replace(scales=of_rows), k_tiles  # scales of this rank's rows alone

    def _slice(
        self, part: OperandViews, buffer: GatheredShards, source: Int32, number: Scalar
    ) -> tuple[OperandViews, Any]:
        """Returns the views of the slice of ``source``, the rank ``number`` ranks on, and its k tiles."""
        cfg, arrived = self.op.config, buffer.tensor[(None, None, source)]
        of_b = part.b[(None, None, source)]
        sent, k_tiles = OperandViews(part.mma, buffer.tma, arrived, part.tma_b, of_b), num_k_tiles(cfg, of_b)
        if cfg.blocks is None:
            return sent, k_tiles
        tma, scales = buffer.scales
        of_slice = part.scales.of_slice((tma, scales[(None, None, source)]), source, number, k_tiles)
        return sent._replace(scales=of_slice), k_tiles

    @cute.jit
    def end(self, call: GatherCall) -> None:
        """Counts a warp as a reader, after its last load."""
        if call.arguments.is_last != 0:
            has_read(call, self.op.transport, readers(self.op.config, self.op.keep))


@cute.jit
def await_chunk(call: GatherCall, chunk: Int32, source: Int32) -> None:
    """Waits until a chunk of the slice of ``source`` has arrived, and all chunks before it; all lanes.

    Lane 0 waits for the entry of ``source`` into this call, as in `await_shard`. Then it waits for flag
    ``chunk * world + source``. A warp barrier follows.
    """
    if cute.arch.lane_idx() == 0:
        await_entry(call.call, ALL_TO_ALL_GEMM.code, source)
        number = chunk * call.call.exchange.world + source
        site = call.call.site(ALL_TO_ALL_GEMM.code, Role.LOAD_GATE, chunk, source, number)
        flag = call.call.memory.local.at[call.call.flags[chunk, source]]
        wait_flag(flag.address, call.call.epoch, call.call.bound, site)
    cute.arch.sync_warp()


class SliceRole(ShardRole):
    """Role of the receive warps: sends peers' rows of the local slice, keeps local rows of all slices."""

    @cute.jit
    def _send(self, call: GatherCall, first: Int32, stride: Int32) -> None:
        """Stores this warp's units of one peer's rows after the other; the last warp raises flags there."""
        memory, epoch, size = call.call.memory, call.call.epoch, self.config.copied_bytes
        rank, world, warps = memory.rank, memory.world, self.config.receive_warps
        if cutlass.const_expr(call.arguments.after is not None):
            scales = cast(ShardScales, call.arguments.after)
            for i in cutlass.range(1, world, unroll=1):
                peer = (rank + world - i) % world
                target = call.buffer.remote(peer).at[call.scales(rank)]
                source = scales.address + peer * scales.nbytes
                copy_units(size, target.address, source, scales.nbytes, first, stride)
        for i in cutlass.range(1, world, unroll=1):
            peer = (rank + world - i) % world
            for part in call.parts_of_k:
                (before, nbytes), slot = part.rows(peer), part.buffer.remote(peer).at[part.shard(rank)[0]]
                source = part.arguments.local_shard + before
                copy_units(size, slot.address, source, nbytes, first, stride)
            if count_grid(memory.local.at[sender_counter(peer)], warps) != 0:  # noqa: SIM102
                if cute.arch.lane_idx() == 0:
                    chunks = ceil_div(call.num_rows(peer), call.arguments.chunk_rows)
                    for chunk in cutlass.range(chunks, unroll=1):
                        self.transport.signal(memory.remote(peer).at[call.call.flags[chunk, rank]], epoch)

    @cute.jit
    def _keep(self, call: GatherCall, first: Int32, stride: Int32) -> None:
        """Copies this warp's units of every slice into its columns, in the order of arrival."""
        exchange, arguments = call.call.exchange, call.arguments
        rank, world, rows = exchange.rank, exchange.world, call.num_rows(exchange.rank)
        for i in cutlass.range(world, unroll=1):
            source = (rank + i) % world
            if source != rank:
                await_chunk(call, (rows - 1) // arguments.chunk_rows, source)
            for part in call.parts_of_k:
                row_bytes, local_shard, kept, *_ = part.arguments[2:]
                origin = cutlass.select_(
                    source == rank,
                    local_shard + part.rows(rank)[0],
                    part.buffer.at[part.shard(source)[0]].address,
                )
                target = kept.iterator.toint() + Int64(source) * row_bytes
                pitch, size = row_bytes * world, self.config.copied_bytes
                copy_rows(size, target, pitch, origin, row_bytes, rows, first, stride)
