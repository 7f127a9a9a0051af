"""Common part of the ops whose operand is sent: arguments, waits, and the role that sends and keeps shards.

The protocol is described in :mod:`overlap_gemm.gather.all_gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.failure import Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import CHUNK_BYTES, CHUNK_WORDS, LANES, global_pointer
from overlap_gemm.device.remote import Ref
from overlap_gemm.device.traced import Address, Extras, Scalar
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import (
    Call,
    await_entry,
    count_grid,
    signal_read,
)
from overlap_gemm.exchange.geometry import (
    READERS_OFFSET,
    sender_counter,
    shard_piece,
)
from overlap_gemm.kernel.work import Work, cta_number, num_ctas
from overlap_gemm.spec import ALL_GATHER_GEMM
from overlap_gemm.spec.sharding import ceil_div
from overlap_gemm.transports.interface import Transport


class ShardScales(NamedTuple):
    """Scales of a shard, and where scales are in the gather buffer (`all_gather`).

    Attributes:
        address: ``Int64``: address of this rank's scales: a vector if rows have scales; a matrix, with the
            extents of a full shard, if blocks have scales. In `input_exchange` such a matrix for each rank.
        nbytes: ``Int64``: bytes of the scales that a peer gets, a multiple of 16; 0 if this rank has no rows.
        shard_bytes: ``Int64``: bytes from the rows of a full shard to those of the next.
        first: ``Int64``: bytes from the start of the gather buffer to the scales of shard 0.
        pitch: ``Int64``: bytes from the scales of a shard to those of the next.
    """

    address: Int64
    nbytes: Int64
    shard_bytes: Int64
    first: Int64
    pitch: Int64


class PartOfK(NamedTuple):
    """A matrix that has a part of A's K, if A is a list (`gather.input_exchange`).

    Attributes:
        row_bytes: ``Int64``: bytes of a row, a multiple of 16.
        local_shard: ``Int64``: address of the local matrix.
        kept: Destination of this rank's rows, as in `Gathering`.
        gathered: ``(shard rows, K, owners)``: region of the gather buffer as TMA reads it.
        region: ``Int64``: bytes from the start of the gather buffer to the region.
    """

    row_bytes: Int64
    local_shard: Int64
    kept: Any
    gathered: cute.Tensor
    region: Int64


class Gathering(NamedTuple):
    """The run-time arguments of an all-gather GEMM.

    Attributes:
        exchange: Arguments of every op. Flag ``source`` is raised when the shard of ``source`` is complete.
            If a shard is put in pieces (`geometry.shard_piece`), each has flag ``piece * world + source``.
        rows: ``Int32``: M, rows of all shards together.
        row_bytes: ``Int64``: bytes of a row of A, in the local shard and the gather buffer; a multiple of 16.
        local_shard: ``Int64``: address of the local shard.
        kept: ``(M * K,)``: destination of all rows; None unless the kernel keeps them.
        gathered: ``(shard rows, K, owners)``: the gather buffer as TMA reads it.
        is_first: ``Int32``: whether this is the first launch of the call, which sends.
        is_last: ``Int32``: whether this is the last launch of the call, which ends it.
        scales: Scales of blocks of the shards in the gather buffer, a matrix as in `mx` or `blocks` with
            ``owners`` as last dimension; else None.
        after: Scales of a shard, of rows or of blocks; None if A has no scales.
        chunk_rows: ``Int32``: rows that share a flag (`gather.input_exchange`); None if shards have one.
        later: `PartOfK` of each part of K after the first, which the fields above describe; or None.
        region: `PartOfK.region`; None: the gather buffer begins with the first part.
    """

    exchange: Exchange
    rows: Int32
    row_bytes: Int64
    local_shard: Int64
    kept: Any
    gathered: cute.Tensor
    is_first: Int32
    is_last: Int32
    scales: Any = None
    after: ShardScales | None = None
    chunk_rows: Any = None
    later: tuple[PartOfK, ...] | None = None
    region: Any = None

    def part_of_k(self, number: int) -> Gathering:
        """Returns the arguments with the fields of a part of K."""
        if number == 0:
            return self
        assert self.later is not None, "A is one matrix"
        return self._replace(**self.later[number - 1]._asdict())

    def of_parts(self, exchange: Exchange, shards: Sequence[int], kept: Sequence[Any] | None) -> Gathering:
        """Returns the arguments for a call whose A is a list; `of_call` has the arguments, for each part."""
        assert self.later is not None, "A is one matrix"
        destinations = kept or [None] * len(shards)
        made = self.of_call(exchange, shards[0], destinations[0], 0)
        fields = zip(self.later, shards[1:], destinations[1:], strict=True)
        later = [part._replace(local_shard=shard, kept=to) for part, shard, to in fields]
        return made._replace(later=tuple(later))

    def of_call(self, exchange: Exchange, local_shard: int, kept: Any, scale_address: int) -> Gathering:
        """Returns the arguments for a call; in half the host time of `_replace`.

        Args:
            exchange: The call's `Exchange`.
            local_shard: Address of the local shard.
            kept: Destination of all rows, flat, or None.
            scale_address: Address of the local shard's scales; ignored if A has none.
        """
        after = self.after
        if after is not None:
            after = ShardScales(scale_address, *after[1:])
        fixed = self.gathered, self.is_first, self.is_last, self.scales
        return Gathering(exchange, *self[1:3], local_shard, kept, *fixed, after, self.chunk_rows)


class GatherCall(NamedTuple):
    """Run-time values that every role of a call shares.

    Attributes:
        call: Values of every op.
        arguments: Arguments of the kernel.
    """

    call: Call
    arguments: Gathering

    @property
    def parts_of_k(self) -> list[GatherCall]:
        """Returns the values for each part of K; these alone, if A is one matrix."""
        later = self.arguments.later or ()
        return [self._replace(arguments=self.arguments.part_of_k(i)) for i in range(1 + len(later))]

    @property
    def buffer(self) -> Ref:
        """Returns this rank's gather buffer, or the region of this part of K; it has one place everywhere."""
        buffer = self.call.memory.local.stepwise.at[self.call.exchange.slots_offset]
        return buffer if self.arguments.region is None else buffer.at[self.arguments.region]

    def shard(self, source: Scalar) -> tuple[Any, Any]:
        """Returns (offset in a gather buffer, bytes) of a shard; bytes are 0 or less after the last owner.

        With scales the bytes are those to the next shard, `full_bytes`, also of a shorter one.
        """
        (offset, nbytes), after = self.rows(source), self.arguments.after
        if after is None:
            return offset, nbytes
        return Int64(source) * self.full_bytes, cutlass.select_(nbytes > 0, self.full_bytes, Int64(0))

    def scales(self, source: Scalar) -> Any:
        """Returns the offset of a shard's scales in a gather buffer."""
        after = cast(ShardScales, self.arguments.after)
        return after.first + Int64(source) * after.pitch

    def rows(self, source: Scalar) -> tuple[Any, Any]:
        """Returns (bytes of the rows before a shard's, bytes of the shard's rows)."""
        row_bytes, first = self.arguments.row_bytes, Int32(source) * self.call.exchange.shard_rows
        return Int64(first) * row_bytes, Int64(self.num_rows(source)) * row_bytes

    def num_rows(self, source: Scalar) -> Any:
        """Returns the number of rows of a shard; 0 or less after the last owner."""
        shard = self.call.exchange.shard_rows
        return cutlass.min(self.arguments.rows - Int32(source) * shard, shard)

    @property
    def full_bytes(self) -> Any:
        """Returns the bytes from the rows of a full shard to those of the next."""
        if self.arguments.after is not None:
            return self.arguments.after.shard_bytes
        return Int64(self.call.exchange.shard_rows) * self.arguments.row_bytes

    @property
    def owners(self) -> Any:
        """Returns the number of ranks that have rows."""
        return (self.arguments.rows + self.call.exchange.shard_rows - 1) // self.call.exchange.shard_rows


@cute.jit
def await_shard(call: GatherCall, source: Int32, transport: cutlass.Constexpr) -> None:
    """Waits until the shard of ``source`` has arrived; all lanes, which may all read it on return.

    - Lane 0 waits for the entry of ``source`` into this call. So ranks in different calls fail, even if copy
      engines have sent the shard.
    - Lane 0 waits for the shard's flag; or (``staged``) lane ``i`` for those of pieces ``i, i + 32, ...``.
    - A warp barrier follows.
    """
    if cute.arch.lane_idx() == 0:
        await_entry(call.call, ALL_GATHER_GEMM.code, source)
    pieces = Int32(ceil_div(call.shard(source)[1], shard_piece(call.full_bytes)))
    transport.await_pieces(pieces, partial(await_piece, call.call, source))
    cute.arch.sync_warp()


@cute.jit
def await_piece(call: Call, source: Int32, piece: Scalar) -> None:
    """Waits for the flag of a piece of the shard of ``source``; one lane. Piece 0 is a shard in one piece.

    A failure record has ``source`` as tile and flag, whichever piece is missing.
    """
    site = call.site(ALL_GATHER_GEMM.code, Role.LOAD_GATE, source, source, source)
    wait_flag(call.memory.local.at[call.flags[piece, source]].address, call.epoch, call.bound, site)


def readers(config: GemmConfig, keep: bool) -> int:
    """Returns the number of warps of a CTA that read the gather buffer.

    These are the load warp, with ``keep`` the receive warps, and all epilogue warps if they read scales of
    rows. They are counted in the last launch of a call.
    """
    visiting = config.visits_rows * config.epilogue_groups * config.epilogue_threads // 32
    return 1 + keep * config.receive_warps + visiting


@cute.jit
def has_read(call: GatherCall, transport: cutlass.Constexpr, warps: cutlass.Constexpr) -> None:
    """Counts a warp after its last read of the gather buffer; the grid's last of ``warps`` per CTA signals.

    All lanes. Every shard has a tile here, and its CTA has waited for the shard. So after the last read
    nothing is in flight to this rank.
    """
    if count_grid(call.call.memory.local.at[READERS_OFFSET], warps) != 0:
        signal_read(call.call, transport)


@dataclass(frozen=True)
class ShardRole:
    """Role of the receive warps in ops whose operand is sent.

    - ``push``: stores the local shard in every peer's gather buffer, in the first launch of a call. It waits
      for no peer. The last warp of the grid that has stored to a peer releases the flag there.
    - ``keep``: copies every shard to a tensor of the caller, in the last launch. It waits for each shard's
      flag, and counts as a reader afterwards (`has_read`).

    Attributes:
        config: The kernel's configuration.
        transport: Transport that raises flags at peers.
        push: Whether the role sends the local shard.
        keep: Whether the role copies all shards.
        to_itself: Whether the role sends the local shard to this rank, too, as last (`gather.few_rows`).
    """

    config: GemmConfig
    transport: Transport
    push: bool
    keep: bool
    to_itself: bool = False

    with_epilogue = False

    @cute.jit
    def __call__(self, call: GatherCall, work: Work, counters: Any, out: Any, extras: Extras) -> None:
        """Sends and copies this warp's units."""
        warps = self.config.receive_warps
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.config.first_receive_warp
        first, stride = cta_number() * warps + warp, num_ctas() * warps
        if cutlass.const_expr(self.push):  # noqa: SIM102
            if call.arguments.is_first != 0:
                self._send(call, first, stride)
        if cutlass.const_expr(self.keep):  # noqa: SIM102
            if call.arguments.is_last != 0:
                self._keep(call, first, stride)
                has_read(call, self.transport, readers(self.config, True))

    @cute.jit
    def _send(self, call: GatherCall, first: Int32, stride: Int32) -> None:
        """Stores this warp's units of the local shard at ``rank - 1``, then at ``rank - 2``, and so on.

        Scales are sent first, to all peers. For each peer the grid's warps are counted (`count_grid` at
        `sender_counter`). The last one releases the shard's flag there. So a peer may read the shard before
        all others have it.
        """
        memory, epoch, warps = call.call.memory, call.call.epoch, self.config.receive_warps
        rank, world = memory.rank, memory.world
        (offset, _), (_, nbytes), size = call.shard(rank), call.rows(rank), self.config.copied_bytes
        last = world + int(self.to_itself)
        if rank < call.owners:
            if cutlass.const_expr(call.arguments.after is not None):  # first: the loop needs few registers
                scales = cast(ShardScales, call.arguments.after)
                for i in cutlass.range(1, last, unroll=1):
                    place = call.buffer.remote((rank + world - i) % world).at[call.scales(rank)]
                    copy_units(size, place.address, scales.address, scales.nbytes, first, stride)
            flag = memory.local.at[call.call.flags[0, rank]]
            for i in cutlass.range(1, last, unroll=1):
                peer = (rank + world - i) % world
                target = call.buffer.remote(peer).at[offset]
                copy_units(size, target.address, call.arguments.local_shard, nbytes, first, stride)
                if count_grid(memory.local.at[sender_counter(peer)], warps) != 0:  # noqa: SIM102
                    if cute.arch.lane_idx() == 0:
                        self.transport.signal(flag.remote(peer), epoch)

    @cute.jit
    def _keep(self, call: GatherCall, first: Int32, stride: Int32) -> None:
        """Copies this warp's units of every shard, in the order of arrival."""
        exchange, owners = call.call.exchange, call.owners
        for i in cutlass.range(owners, unroll=1):
            source = (exchange.rank + i) % owners
            if source != exchange.rank:
                await_shard(call, source, self.transport)
            (offset, _), (kept, nbytes) = call.shard(source), call.rows(source)
            origin = cutlass.select_(
                source == exchange.rank, call.arguments.local_shard, call.buffer.at[offset].address
            )
            copy_units(
                self.config.copied_bytes,
                call.arguments.kept.iterator.toint() + kept,
                origin,
                nbytes,
                first,
                stride,
            )


@cute.jit
def copy_units(
    size: cutlass.Constexpr, target: Int64, source: Int64, nbytes: Int64, first: Int32, stride: Int32
) -> None:
    """Copies units ``first, first + stride, ...``, with all loads of one in flight at once; all lanes.

    Args:
        size: Bytes of a unit.
        target: Destination address, a multiple of 16.
        source: Source address, a multiple of 16.
        nbytes: Bytes to copy, a multiple of 16.
        first: First unit of this warp.
        stride: Number of warps that share the copy.
    """
    width, chunks = size // CHUNK_BYTES, Int32(nbytes // CHUNK_BYTES)
    for unit in cutlass.range(first, (chunks + (width - 1)) // width, stride, unroll=1):
        copy_unit(width, target, source, chunks, unit)


@cute.jit
def copy_rows(
    size: cutlass.Constexpr,
    target: Int64,
    pitch: Int64,
    source: Int64,
    row_bytes: Int64,
    rows: Int32,
    first: Int32,
    stride: Int32,
) -> None:
    """Copies contiguous rows to rows that are ``pitch`` bytes apart; other arguments as in `copy_units`."""
    width, chunks = size // CHUNK_BYTES, Int32(row_bytes // CHUNK_BYTES)
    units = (chunks + (width - 1)) // width
    for unit in cutlass.range(first, rows * units, stride, unroll=1):
        row = Int64(unit // units)
        copy_unit(width, target + row * pitch, source + row * row_bytes, chunks, unit % units)


@cute.jit
def copy_unit(width: cutlass.Constexpr, target: Int64, source: Int64, chunks: Int32, unit: Int32) -> None:
    """Copies one unit of a range of chunks of 16 bytes; all lanes, each ``width / 32`` loads, all in flight.

    Args:
        width: Chunks of a unit, a multiple of 32.
        target: Destination address of the range, a multiple of 16.
        source: Source address of the range, a multiple of 16.
        chunks: Chunks of the range; the last unit may have fewer than ``width``.
        unit: Number of the unit in the range.
    """
    loaded = cute.make_rmem_tensor((CHUNK_WORDS, width // LANES), cutlass.Uint32)
    start = unit * width + cute.arch.lane_idx()
    for c in cutlass.range_constexpr(width // LANES):
        # After the end the last chunk is loaded again, and not stored.
        at = cutlass.min(start + c * LANES, chunks - 1)
        cute.autovec_copy(chunk_at(source + Int64(at) * CHUNK_BYTES), loaded[(None, c)])
    for c in cutlass.range_constexpr(width // LANES):
        at = start + c * LANES
        if at < chunks:
            cute.autovec_copy(loaded[(None, c)], chunk_at(target + Int64(at) * CHUNK_BYTES))


def chunk_at(address: Address) -> cute.Tensor:
    """Returns a tensor of 16 bytes at an address."""
    return cute.make_tensor(global_pointer(Uint32, address, CHUNK_BYTES), cute.make_layout(CHUNK_WORDS))
