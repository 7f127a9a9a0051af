"""Own tiles reduced where they are: the epilogue adds a rank's own partial to its peers', and stores the sum.

For reduce-scatters, and the first half of two-shot all-reduces, whose own tiles come last
(`GemmConfig.own_last`). Such a tile goes to no slot and has no flag: its subtiles are rounded into the ring's
stage, as everybody's are, and summed from there. A warp sums the rows of a subtile that it has written.

waits on    the flags of all other sources of the tile, by each warp of the epilogue group, before the tile's
            first subtile (acquire, system scope, bounded); of a subtile, for the warp's own lanes
produces    the sum of the sources' partials in rank order in fp32, the own one from the stage, the epilogue
            applied, rounded once: the same bits as the receive role makes of the slots (`kernels.sums`)
signals     nobody; the stage goes through the ring. Of a reduce-scatter the sum is stored in the output, and
            the comm lane only passes the stage on; else the sum is in the stage, from which the comm lane
            sends it (`exchanging.TileExchange.own_sender`): the fence of the ring's commit is after it

Peers' partials are under way before they are needed: the first sources' as soon as the flags are there, and
then that of one more source, or of the next subtile's first ones, whenever one is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, LANES
from overlap_gemm.device.registers import computed_here, forget
from overlap_gemm.device.traced import Address, Extras, Fragment, Predicate, Scalar
from overlap_gemm.kernels.call import Call
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import StageChunks, Visits
from overlap_gemm.kernels.orders import DealtShards, OwnTilesLast
from overlap_gemm.kernels.receive import Window, unit_exists
from overlap_gemm.kernels.send import place_of
from overlap_gemm.kernels.work import CtaTile, Work
from overlap_gemm.transports.base import Transport


def check_own_last(config: GemmConfig, transport: Transport) -> None:
    """Raises ValueError for own tiles that the transport wants in their slots."""
    if config.own_last and not transport.takes_own_sums():
        way = type(transport).__name__
        raise ValueError(f"own_last is for tiles sent by peer_bulk to everybody; they go by {way}")


def dealt_to_owners(config: GemmConfig) -> DealtShards | OwnTilesLast:
    """The order of partials: owners in turn, the own tiles among the others or last."""
    return (OwnTilesLast if config.own_last else DealtShards)(config.raster_group)


class Part(NamedTuple):
    """What a lane sums of each subtile of a tile.

    Attributes:
        warp: which of the group's.
        first: its first chunk in the subtile; the next is 32 chunks further on.
        address: of that in the first source's slot, of the tile's first subtile.
        source_bytes: bytes from one source's slots to the next one's.
        window: of the output.
        loaded: registers for the partials of as many sources as are under way.
    """

    warp: Scalar
    first: Scalar
    address: Address
    source_bytes: Any
    window: Window
    loaded: Fragment


@dataclass(frozen=True)
class OwnSums:
    """How own tiles are summed: see the module.

    Attributes:
        config: the kernel's configuration.
        code: the op, for failure records.
        transport: how the others' partials arrive.
        go_on: whether sums stay in the stage, in the output's type, which is then the slots', and the
            output is that of all owners; else they are stored in it, which is this rank's alone.
    """

    config: GemmConfig
    code: int
    transport: Transport
    go_on: bool = False

    def locate(self, call: Call, work: Work, out: cute.Tensor, tile: CtaTile, thread: Scalar) -> Part:
        """All that can be known of ``tile``, of whichever rank, before its flags are there.

        Args:
            call: the call's run-time values.
            work: this cluster's work.
            out: the output.
            tile: the tile.
            thread: index in the epilogue group.
        """
        cfg = self.config
        warp = computed_here(Int32(thread) // LANES)
        first = warp * (self._chunks * LANES) + cute.arch.lane_idx()
        address = call.base + place_of(cfg, call, work.slots, tile.index, 0) + first * CHUNK_BYTES
        window = Window.shard(out, work, tile.owner) if self.go_on else Window.whole(out)
        loaded = cute.make_rmem_tensor(
            (StageChunks(cfg).elements, self._chunks, self._sources), DTYPES[cfg.slot_dtype]
        )
        return Part(warp, first, address, Int64(work.slots) * cfg.tile_bytes, window, loaded)

    @cute.jit
    def begin(self, call: Call, tile: CtaTile, part: Part) -> None:
        """All threads of an epilogue group, before the first subtile: of an own tile starts to load."""
        rank, world = call.exchange.rank, call.exchange.world
        if tile.owner == rank:
            exists = computed_here(Int32((world > 1) & self._exists(tile, part, Int32(0))))
            others = [self._other(call, source) for source in range(self._sources)]
            addresses = [computed_here(part.address + source * part.source_bytes) for source in others]
            self.transport.await_partials(call, self.code, tile.index, itself=False)
            if exists != 0:
                for place in cutlass.range_constexpr(self._sources):
                    self._load(addresses[place], part.loaded[(None, None, place)])
            else:
                forget(part.loaded)
        else:  # or what the tile before has left is kept through the mainloop
            forget(part.loaded)

    @cute.jit
    def finish(
        self, call: Call, tile: CtaTile, part: Part, extras: Extras, stage: cute.Tensor, subtile: Int32
    ) -> None:
        """All threads of an epilogue group, each of which has written its part of the stage.

        Args:
            call: the call's run-time values.
            tile: of which rank whatever; nothing is done but for an own one.
            part: what `locate` returned for it.
            extras: what the epilogue's visitors read, or None.
            stage: the subtile, as a block.
            subtile: which of the tile's.
        """
        if tile.owner == call.exchange.rank:
            cute.arch.sync_warp()
            own = cute.zipped_divide(stage, (StageChunks(self.config).elements,))
            totals = self._sum(call, tile, part, own, subtile)
            self._store(tile, part, extras, own, totals, subtile)

    @cute.jit
    def _sum(self, call: Call, tile: CtaTile, part: Part, own: cute.Tensor, subtile: Int32) -> cute.Tensor:
        """A lane's sums; what makes room is loaded anew. Of what is not in the output they are anything."""
        rank, world = call.exchange.rank, call.exchange.world
        following = subtile + 1
        exists = self._exists(tile, part, subtile)
        continues = (following < self.config.subtiles) & self._exists(tile, part, following)
        totals = cute.make_rmem_tensor(part.loaded.shape[:2], Float32)
        totals.fill(0.0)
        for first in cutlass.range(0, world, self._sources, unroll=1):
            for place in cutlass.range_constexpr(self._sources):
                source, loaded = Int32(first + place), part.loaded[(None, None, place)]
                if source < world:
                    if source == rank:
                        for c in cutlass.range_constexpr(self._chunks):
                            cute.autovec_copy(own[(None, part.first + c * LANES)], loaded[(None, c)])
                    totals.store(totals.load() + loaded.load().to(Float32))
                    more = source + self._sources < world
                    at = cutlass.select_(more, source + self._sources, Int32(place))
                    of = cutlass.select_(more, subtile, following)
                    if at != rank and cutlass.select_(more, exists, continues):
                        offset = at * part.source_bytes + of * self.config.slot_subtile_bytes
                        self._load(part.address + offset, loaded)
        return totals

    @cute.jit
    def _store(
        self,
        tile: CtaTile,
        part: Part,
        extras: Extras,
        own: cute.Tensor,
        totals: cute.Tensor,
        subtile: Int32,
    ) -> None:
        """Applies the epilogue to a lane's sums, rounds once, stores those that are in the output."""
        chunks, window, dtype = StageChunks(self.config), part.window, DTYPES[self.config.out_dtype]
        for c in cutlass.range_constexpr(self._chunks):
            chunk = part.first + c * LANES
            row, column = chunks.locate(subtile * chunks.per_subtile + chunk)
            row, column = tile.row + row, tile.column + column
            if row < window.rows and column < window.columns:
                values = totals[(None, c)]
                visits = Visits(self.config, ("complete",))
                visits.on_chunk(values, window.row + row, window.column + column, extras)
                rounded = cute.make_rmem_tensor(values.shape, dtype)
                rounded.store(values.load().to(dtype))
                if cutlass.const_expr(self.go_on):
                    cute.autovec_copy(rounded, own[(None, chunk)])
                else:
                    window.store(row, column, rounded)

    def _load(self, address: Address, loaded: Fragment) -> None:
        """Starts the loads of a lane's chunks of one source's subtile."""
        for c in range(self._chunks):
            self.transport.load(address + c * LANES * CHUNK_BYTES, loaded[(None, c)])

    def _other(self, call: Call, source: int) -> Any:
        """``source``; for this rank, or one that is not there, another one, loaded and not added."""
        rank, last = call.exchange.rank, call.exchange.world - 1
        source = cutlass.min(Int32(source), last)
        return cutlass.select_(source == rank, cutlass.select_(rank == 0, 1, 0), source)

    def _exists(self, tile: CtaTile, part: Part, subtile: Scalar) -> Predicate:
        """Whether peers have sent what the warp sums of a subtile: it lies in one unit."""
        cfg = self.config
        warps, warp_bytes = cfg.epilogue_threads // LANES, self._chunks * LANES * CHUNK_BYTES
        assert cfg.unit_bytes % warp_bytes == 0
        unit = (subtile * warps + part.warp) // (cfg.unit_bytes // warp_bytes)
        return unit_exists(cfg, unit, tile, part.window)

    @property
    def _chunks(self) -> int:
        """A lane's, of a subtile."""
        return StageChunks(self.config).per_subtile // self.config.epilogue_threads

    @property
    def _sources(self) -> int:
        """Of how many a subtile is under way. With two of 32-bit partials kernels spill on sm_90a."""
        return 32 // DTYPES[self.config.slot_dtype].width


@dataclass(frozen=True)
class OwnTile:
    """A tile that may be an own one, and what it is finished with: arguments of `OwnSums.finish`."""

    sums: OwnSums
    call: Any
    tile: Any
    part: Any
    extras: Extras

    @staticmethod
    def begin(
        sums: OwnSums, call: Any, work: Any, out: Any, extras: Extras, tile: Any, thread: Scalar
    ) -> OwnTile:
        """See `OwnSums.begin`."""
        part = sums.locate(call, work, out, tile, thread)
        sums.begin(call, tile, part)
        return OwnTile(sums, call, tile, part, extras)

    def finish(self, stage: Any, subtile: Scalar) -> None:
        """See `OwnSums.finish`."""
        self.sums.finish(self.call, self.tile, self.part, self.extras, stage, Int32(subtile))
