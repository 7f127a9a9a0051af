"""Layout of a rank's symmetric workspace: control words, flags and slots.

This is the single source of truth for the kernel, the host and the tests. All offsets are bytes from the
workspace's base address, which every rank has for every peer. A workspace has the same size and layout on all
ranks:

| offset          | content                                                                      |
|-----------------|------------------------------------------------------------------------------|
| 0               | control words (local to the rank)                                            |
| CONTROL_BYTES   | arrival flags, ``uint64[max_flags]``; then as many of this rank's own staged |
|                 | tiles (transport ``staged``)                                                 |
| slots_offset    | slot buffer of even epochs: ``[source][tile]``, with space for local tiles;  |
|                 | then (two-shot all-reduce) ``[owner][summed tile]``                          |
| + buffer_bytes  | slot buffer of odd epochs                                                    |
| + 2, 3 x        | staging buffers, even and odd, if some peer has no address: ``[owner][tile]`` |

``max_flags`` and ``buffer_bytes`` are fixed when the workspace is made, never taken from the shape of a call:
a peer may already write call ``e + 1``'s partials while this rank still reads call ``e``'s, whatever their
shapes. A call may divide the buffer of its epoch in any way: no other call uses it at the same time. A flag's
writer is its index modulo the number of ranks, for every call: a later epoch in it is of the same rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import lcm
from typing import Any, NamedTuple

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import TileGrid
from overlap_gemm.config.rules import MAX_WORLD as MAX_WORLD
from overlap_gemm.config.scale_blocks import Blocks
from overlap_gemm.device.traced import Scalar
from overlap_gemm.spec import PATTERNS, PatternSpec
from overlap_gemm.spec.sharding import ceil_div, num_owners, shard_rows

CONTROL_BYTES = 4096
"""Control words and peers' signals about entire calls, rounded up; see the offsets below."""

EPOCH_OFFSET = 0
"""``uint64``: the last finished call's epoch. Zero-initialised; every call adds one."""

RELAY_EPOCH_OFFSET = 8
"""``uint64``: the relay kernel's epoch, as ``EPOCH_OFFSET``."""

COMING_OFFSET = 16
"""``uint64``: the next call's epoch, one above the last finished one's, initially 1. A copy engine copies it
as the flag after a shard, since it cannot add."""

TICKET_OFFSET = 24
"""``uint32``: CTAs that finished the running call; the last one stores the epoch and resets it to zero."""

CLAIM_OFFSET = 28
"""``uint32``: 0 until a wait expires; the lane that sets it writes the failure record."""

READERS_OFFSET = 32
"""``uint32``: warps of the running call that read the gather buffer no more; the last one resets it."""


FLAG_BYTES = 8
"""A flag is 64 bits, the only width of an NVSHMEM signal: an epoch, see :mod:`overlap_gemm.device.flags`."""

ENTERED_OFFSET = 128
"""``uint64[2][MAX_WORLD]``, by the epoch's parity: the call that each peer has entered: the low half of its
epoch, and above it the call's signature (`exchange.call.Call.identity`)."""

READ_OFFSET = ENTERED_OFFSET + 2 * MAX_WORLD * FLAG_BYTES
"""``uint64[MAX_WORLD]``: flags: the call in which each peer has read all shards sent to it."""

SENDERS_OFFSET = READ_OFFSET + MAX_WORLD * FLAG_BYTES
"""``uint32[MAX_WORLD]``: warps of the running call that have sent their part of the local shard to each peer;
the last one resets it."""

SENDER_BYTES = 4
"""Bytes of a counter of senders."""

FLAG_ALIGN = 1024
"""Slots begin at a multiple of this many bytes."""

SLOT_BUFFERS = 2
STAGING_BUFFERS = 2
"""Equal buffers after the flags: slots always, staging if some peer is not P2P-accessible."""


OWNED = 64
"""Columns of a two-shot's shards come in multiples of this: the narrowest tile, which then has one owner."""


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes of one call: a product of global ``rows`` x ``cols``, exchanged between ``world`` ranks.

    Attributes:
        rows: M of a rank's product; of a full shard if ranks multiply different rows; at least 1.
        cols: N of the product over all ranks.
        world: Number of ranks.
        shard: Rows of a full shard, or columns (`is_by_columns`); ``shard * world`` covers them.
        pattern: Communication pattern: a name of `overlap_gemm.spec.PATTERNS`.
    """

    rows: int
    cols: int
    world: int
    shard: int
    pattern: str = "reduce_scatter"

    @classmethod
    def even(
        cls,
        rows: int,
        cols: int,
        world: int,
        pattern: str = "reduce_scatter",
        blocks: Blocks | None = None,
    ) -> ExchangeShape:
        """Returns the shape with rows (or columns) cut as ``torch.chunk`` does.

        If sums return, columns are cut in multiples of `OWNED`, and of those that share a scale of
        ``blocks``: a tile's first column is a block's.
        """
        spec = PATTERNS[pattern]
        shard = shard_rows(cols if spec.cut == "columns" else rows, world)
        unit = lcm(OWNED, blocks[1] if blocks else 1) if spec.returns else 1
        return cls(rows, cols, world, ceil_div(shard, unit) * unit, pattern)

    @property
    def spec(self) -> PatternSpec:
        """Returns the pattern."""
        return PATTERNS[self.pattern]

    @property
    def is_by_columns(self) -> bool:
        """Returns whether shards are cut along the columns."""
        return self.spec.cut == "columns"

    @property
    def owners(self) -> int:
        """Returns the number of ranks that own a shard."""
        return num_owners(self.cols if self.is_by_columns else self.rows, self.shard)

    @property
    def block(self) -> tuple[int, int]:
        """Returns (rows, columns) for which each source has slots in a buffer."""
        if self.is_by_columns:
            return self.rows, self.shard
        return (self.shard if self.spec.cut else self.rows), self.cols

    def grid(self, config: GemmConfig) -> TileGrid:
        """Returns the cluster tiles of a block."""
        (rows, cols), (tile_m, tile_n) = self.block, config.cluster_tile
        return TileGrid(ceil_div(rows, tile_m), ceil_div(cols, tile_n))

    def cta_tiles(self, config: GemmConfig) -> int:
        """Returns the number of CTA tiles of a block: the tile index of slots and flags counts these."""
        grid = self.grid(config)
        return grid.rows * grid.cols * config.cluster_size

    def num_flags(self, config: GemmConfig) -> int:
        """Returns the number of arrival flags of a rank.

        One per (tile, source), and for two-shot one per (unit of a sum, owner).
        """
        units = config.units if self.spec.returns else 0
        return self.cta_tiles(config) * (1 + units) * self.world

    def buffer_bytes(self, config: GemmConfig) -> int:
        """Returns the bytes of one slot buffer.

        A slot per (source, tile), and for two-shot one per (owner, summed tile).
        """
        result = config.result_bytes if self.spec.returns else 0
        return self.world * self.cta_tiles(config) * (config.tile_bytes + result)

    def num_computed(self, config: GemmConfig) -> int:
        """Returns the number of cluster tiles that a rank computes."""
        grid = self.grid(config)
        return (self.owners if self.spec.cut and not self.spec.to_all else 1) * grid.rows * grid.cols

    def num_clusters(self, config: GemmConfig) -> int:
        """Returns the most clusters that have work: cluster tiles that a rank computes or stores."""
        grid = self.grid(config)
        return (self.owners if self.spec.cut else 1) * grid.rows * grid.cols


def tile_layout(config: GemmConfig, shape: ExchangeShape) -> dict[str, Any]:
    """Returns the facts that place each element, unit and flag of a call's tiles in every workspace.

    Ranks with equal facts write and read the same places. The call's signature is made of them.

    Args:
        config: Configuration of the kernel.
        shape: Sizes of the call.
    """
    names = ("in_dtype", "slot_dtype", "out_dtype", "cta_tile", "cluster", "epi_tile", "raster_group")
    return {
        **{field.name: getattr(shape, field.name) for field in fields(shape)},
        **{name: getattr(config, name) for name in (*names, "unit_bytes")},
        "tiles": shape.cta_tiles(config),
        "flags": shape.num_flags(config),
        "buffer_bytes": shape.buffer_bytes(config),
    }


def slots_offset(max_flags: int) -> int:
    """Returns the byte offset of the first slot buffer in a workspace for ``max_flags`` flags."""
    return ceil_div(CONTROL_BYTES + 2 * FLAG_BYTES * max_flags, FLAG_ALIGN) * FLAG_ALIGN


def staged_flags_offset(slots: Scalar) -> Any:
    """Returns the byte offset of staged tiles' flags, from that of the slots (host integer or ``Int64``)."""
    return (CONTROL_BYTES + slots) // 2


class Puts(NamedTuple):
    """Puts of a relay kernel to ranks without P2P access: equal pieces, each of them to every such rank.

    All integers. Offsets are bytes in a workspace, the same in every rank's, in the call's buffer unless
    stated otherwise.

    Attributes:
        nbytes: Bytes of all pieces for one rank; the last piece may be shorter than the others.
        piece: Bytes of a piece, a multiple of 16.
        ranks: Number of ranks that get pieces: ranks 0 to ``ranks - 1``.
        source: Offset of the source of the first piece for rank 0.
        source_pitch: Bytes from the source for a rank to the source for the next rank; 0: all ranks get the
            same.
        target: Offset of the destination of the first piece.
        staged: Offset from the workspace's base of the local flag of the first piece for rank 0, raised when
            it is complete. The next pieces' flags follow, one per rank; 0: all are complete at the launch.
        staged_pitch: Bytes from the flag for a rank to the flag for the next rank, as ``source_pitch``.
        flag: Number of the first piece's arrival flag, as `exchange.call.Call.flag` counts.
    """

    nbytes: int = 0
    piece: int = 16
    ranks: int = 1
    source: int = 0
    source_pitch: int = 0
    target: int = 0
    staged: int = 0
    staged_pitch: int = 0
    flag: int = 0


def tile_puts(config: GemmConfig, shape: ExchangeShape, rank: int, slots: int, buffer: int) -> list[Puts]:
    """Returns the puts of ``rank`` in a call: tiles, then (two-shot) the sums of tiles that it owns.

    Args:
        config: The kernel's configuration.
        shape: Sizes of the call.
        rank: Rank that puts.
        slots: `slots_offset` of the workspace.
        buffer: Bytes of one slot buffer.
    """
    tiles, tile, world = shape.cta_tiles(config), config.tile_bytes, shape.world
    local_slots = rank * tiles * tile
    if shape.spec.to_all:  # from the local slots
        if shape.is_by_columns:
            columns = min(max(shape.cols - rank * shape.shard, 0), shape.shard)
            tiles = tiles // shape.grid(config).cols * ceil_div(columns, config.cluster_tile[1])
        staged = CONTROL_BYTES + FLAG_BYTES * rank
        return [Puts(tiles * tile, tile, world, local_slots, 0, local_slots, staged)]
    owners, staging = shape.owners, SLOT_BUFFERS * buffer
    staged = staged_flags_offset(slots)
    partials = Puts(tiles * tile, tile, owners, staging, tiles * tile, local_slots, staged, FLAG_BYTES)
    if not shape.spec.returns:
        return [partials]
    result = config.result_bytes
    sums = (world * tile + rank * result) * tiles
    summed = CONTROL_BYTES + FLAG_BYTES * (tiles * world + rank)
    nbytes = tiles * result if rank < owners else 0
    return [partials, Puts(nbytes, result // config.units, world, sums, 0, sums, summed, 0, tiles)]


END = -1
"""Argument of a gate (:mod:`overlap_gemm.gather.gate`) in place of a source: ends the call."""

SCALE_BYTES = 4
"""The scale of a row: float32."""

SHARD_ALIGN = 128
"""A shard that has scales after its rows takes a multiple of this many bytes: a line of L2."""

SHARD_PIECES = 8
"""Pieces in which a shard of a gathered operand is put at most, each with a flag."""

CHUNK_ROWS = 128
"""Chunks of a slice's rows (`gather.input_exchange`) are multiples of this many: most tiles end with one."""


def chunk_rows(rows: int, row_bytes: int, least: int) -> int:
    """Returns the rows of a slice that share a flag.

    Args:
        rows: Rows of a full slice.
        row_bytes: Bytes of its rows.
        least: Bytes that are worth a copy and a flag.
    """
    number = min(max(rows * row_bytes // max(least, 1), 1), SHARD_PIECES)
    return ceil_div(rows, number * CHUNK_ROWS) * CHUNK_ROWS


PIECE_ALIGN = 1024
"""A piece of a shard is a multiple of this many bytes; the last has the rest."""


def shard_piece(nbytes: Scalar) -> Any:
    """Returns the bytes of a piece of a shard, of which a full one has ``nbytes``."""
    return ceil_div(nbytes, SHARD_PIECES * PIECE_ALIGN) * PIECE_ALIGN


def shard_puts(rank: int, world: int, full: int, num_bytes: int) -> list[Puts]:
    """Returns the puts of ``rank``'s shard of ``num_bytes`` bytes; a full shard has ``full`` bytes."""
    place = rank * full
    return [Puts(num_bytes, shard_piece(full), world, source=place, target=place)]
