"""The receive role: finishes what has arrived, beside the mainloop.

Own tiles are dealt to the CTAs in the order in which the ranks compute them, whoever computes them here, and
cut into units of 4 KiB of a slot. The warps of a CTA take its units one by one: the receive warps from the
start, and the epilogue warps once they have written their last tile, since what is left then is the tail of
the call.

Protocol of a unit, by one warp:

    waits on    every source's flag of the unit's tile (acquire, system scope, bounded)
    produces    the sum of the sources' partials in rank order in fp32, the epilogue applied, rounded once,
                in the caller's output, clipped
    signals     nobody
    freed by    the call's end: `kernels.call`

Whoever takes a unit, its sum is the same: results are bitwise repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.device.failure import Op, Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, global_pointer
from overlap_gemm.kernels.call import Call, Tally, count
from overlap_gemm.kernels.config import UNIT_BYTES, GemmConfig
from overlap_gemm.kernels.epilogue import StageChunks
from overlap_gemm.kernels.work import CtaTile, Work, shard_tiles

LANES = 32
LANE_CHUNKS = UNIT_BYTES // CHUNK_BYTES // LANES
"""Chunks of a unit that each lane sums."""

LOADS_IN_FLIGHT = 8
"""Loads of 16 bytes that a lane has under way, whatever the number of ranks: each takes about a
microsecond."""


class Part(NamedTuple):
    """One lane's part of a unit.

    Attributes:
        address: of its first chunk in the first source's slot; the next is 32 chunks behind.
        source_bytes: bytes from one source's slots to the next one's.
        world: ranks.
        first: the first chunk's number in the tile.
        row: the tile's first row in the shard.
        column: the tile's first column.
    """

    address: Any
    source_bytes: Any
    world: Any
    first: Any
    row: Any
    column: Any


@dataclass(frozen=True)
class SumRole:
    """The receive role of an op that sums partials: see the module.

    Attributes:
        config: the kernel's configuration.
        order: the op's order.
        epilogue: what complete sums get, in turn.
        op: for failure records.
    """

    config: GemmConfig
    order: Any
    epilogue: tuple[Any, ...]
    op: Op

    with_epilogue = True

    @cute.jit
    def __call__(self, call: Call, work: Work, tally: Tally, out: cute.Tensor, bias: Any) -> None:
        """One warp's loop over the units that it takes."""
        cfg = self.config
        x, y, _ = cute.arch.block_idx()
        width, height, _ = cute.arch.grid_dim()
        cta, ctas = y * width + x, width * height
        own_tiles = Int32(shard_tiles(cfg, work.whole))
        if work.whole.rank >= work.whole.owners:
            own_tiles = Int32(0)
        units = (own_tiles - cta + ctas - 1) // ctas * cfg.units
        arrived = Int32(-1)
        unit = count(tally.taken)
        while unit < units:
            index = cta + unit // cfg.units * ctas
            if index != arrived:
                self._await(call, index)
                arrived = index
            tile = CtaTile.numbered(cfg, self.order, work.whole, index)
            self._sum(call, work, tile, unit % cfg.units, out, bias)
            unit = count(tally.taken)

    @cute.jit
    def _await(self, call: Call, tile: Int32) -> None:
        """Each lane waits for a source's flag; then the warp may read every slot of the tile."""
        for source in cutlass.range(cute.arch.lane_idx(), call.exchange.world, LANES, unroll=1):
            index = tile * call.exchange.world + source
            site = call.site(self.op, Role.RECEIVE_PARTIAL, tile, source, index)
            wait_flag(call.flag(call.base, tile, source), call.epoch, call.bound, site)
        cute.arch.sync_warp()

    @cute.jit
    def _sum(self, call: Call, work: Work, tile: CtaTile, unit: Int32, out: cute.Tensor, bias: Any) -> None:
        cfg, world = self.config, call.exchange.world
        source_bytes = Int64(work.slots) * cfg.tile_bytes
        first = unit * (LANE_CHUNKS * LANES) + cute.arch.lane_idx()
        address = call.base + call.buffer + Int64(tile.index) * cfg.tile_bytes + first * CHUNK_BYTES
        part = Part(address, source_bytes, world, first, tile.row, tile.column)
        if world <= 2:
            self._sum_few(part, out, bias, 2)
        elif world <= 4:
            self._sum_few(part, out, bias, 4)
        elif world <= LOADS_IN_FLIGHT:
            self._sum_few(part, out, bias, LOADS_IN_FLIGHT)
        else:
            self._sum_many(part, out, bias)

    @cute.jit
    def _sum_few(self, part: Part, out: cute.Tensor, bias: Any, sources: cutlass.Constexpr) -> None:
        """Up to ``sources`` ranks: a window of chunks is under way; a summed one makes room for another."""
        window = LOADS_IN_FLIGHT // sources
        loaded = self._registers(sources, window)
        for c in cutlass.range_constexpr(window):
            self._load(part, c, 0, loaded[(None, None, c)])
        for i in cutlass.range(0, LANE_CHUNKS, window, unroll=1):
            for c in cutlass.range_constexpr(window):
                total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
                total.fill(0.0)
                self._add(total, part, 0, loaded[(None, None, c)])
                if i + window < LANE_CHUNKS:
                    self._load(part, i + window + c, 0, loaded[(None, None, c)])
                self._store(part, i + c, total, out, bias)

    @cute.jit
    def _sum_many(self, part: Part, out: cute.Tensor, bias: Any) -> None:
        """Any number of ranks, `LOADS_IN_FLIGHT` of them at a time."""
        for i in cutlass.range(LANE_CHUNKS, unroll=1):
            total = cute.make_rmem_tensor(self.chunks.elements, cutlass.Float32)
            total.fill(0.0)
            for first in cutlass.range(0, part.world, LOADS_IN_FLIGHT, unroll=1):
                loaded = self._registers(LOADS_IN_FLIGHT, 1)[(None, None, 0)]
                self._load(part, i, first, loaded)
                self._add(total, part, first, loaded)
            self._store(part, i, total, out, bias)

    def _registers(self, sources: int, window: int) -> Any:
        return cute.make_rmem_tensor((self.chunks.elements, sources, window), DTYPES[self.config.slot_dtype])

    def _load(self, part: Part, chunk: Any, first: Any, loaded: Any) -> None:
        """Starts the loads of a chunk from as many sources behind ``first`` as ``loaded`` has room for."""
        dtype, values = DTYPES[self.config.slot_dtype], self.chunks.elements
        for s in range(cute.size(loaded, mode=[1])):
            # Beyond the last rank the last one's is loaded again, and not added.
            at = part.source_bytes * cutlass.min(first + s, part.world - 1)
            slot = global_pointer(dtype, part.address + chunk * (LANES * CHUNK_BYTES) + at, CHUNK_BYTES)
            cute.autovec_copy(cute.make_tensor(slot, cute.make_layout(values)), loaded[(None, s)])

    @cute.jit
    def _add(self, total: cute.Tensor, part: Part, first: Int32, loaded: cute.Tensor) -> None:
        """Adds a chunk's partials in rank order."""
        for s in cutlass.range_constexpr(cute.size(loaded, mode=[1])):
            if first + s < part.world:
                total.store(total.load() + loaded[(None, s)].load().to(cutlass.Float32))

    @cute.jit
    def _store(self, part: Part, chunk: Int32, values: cute.Tensor, out: cute.Tensor, bias: Any) -> None:
        """Applies the epilogue to neighbouring sums of a row, rounds once, stores what is not clipped."""
        row, column = self.chunks.locate(part.first + chunk * LANES)
        row, column = part.row + row, part.column + column
        if row < cute.size(out, mode=[0]) and column < cute.size(out, mode=[1]):
            for step in self.epilogue:
                step.on_chunk(values, column, bias)
            rounded = cute.make_rmem_tensor(values.shape, out.element_type)
            rounded.store(values.load().to(out.element_type))
            width = out.element_type.width // 8
            at = out.iterator.toint() + (Int64(row) * out.stride[0] + column) * width
            align = min(CHUNK_BYTES, self.chunks.elements * width)
            target = global_pointer(out.element_type, at, align)
            cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(self.chunks.elements)))

    @property
    def chunks(self) -> StageChunks:
        """The wire format of partials."""
        return StageChunks(self.config)
