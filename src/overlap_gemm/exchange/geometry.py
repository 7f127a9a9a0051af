"""Layout of a rank's symmetric workspace: control words, flags, slots and staging.

It is the single source of truth for kernels, host and tests. Offsets are bytes from the workspace's base
address. Size and layout are the same on all ranks:

| offset          | content                                                                      |
|-----------------|------------------------------------------------------------------------------|
| 0               | control words of the rank, and words that peers store for an entire call     |
| CONTROL_BYTES   | arrival flags, ``uint64[max_flags]``; then as many local flags of staged     |
|                 | tiles (transport ``staged``)                                                 |
| slots_offset    | slot buffer of even epochs: ``[source][tile]``, with space for local tiles;  |
|                 | then (two-shot all-reduce) ``[owner][summed tile]``                          |
| + buffer_bytes  | slot buffer of odd epochs                                                    |
| + 2, 3 x        | staging buffers, even and odd, if some peer has no address: ``[owner][tile]`` |

There are at most 112 ranks (`MAX_WORLD`). ``max_flags``, and so ``slots_offset``, and ``buffer_bytes`` are
fixed when the workspace is made, not by a call: buffers of two calls must not overlap. For a peer may already
store partials of call ``e + 1``, of any shape, while this rank still reads those of call ``e``. A call may
divide the buffer of its epoch in any way, since no other call uses it meanwhile. The only writer of a flag is
the rank ``index % world``, in every call. So a later epoch in a flag is from the same rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import lcm
from typing import Any, NamedTuple

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import TileGrid
from overlap_gemm.config.rules import MAX_WORLD as MAX_WORLD
from overlap_gemm.device.traced import Address, Scalar, wide
from overlap_gemm.spec import PATTERNS, PatternSpec
from overlap_gemm.spec.sharding import ceil_div, num_owners, shard_rows

CONTROL_BYTES = 4096
"""Bytes of the control words and of the words that peers store for entire calls; offsets below."""

EPOCH_OFFSET = 0
"""``uint64``: epoch of the last finished call, at first 0. Each call adds one."""

RELAY_EPOCH_OFFSET = 8
"""``uint64``: epoch of the relay kernel's last finished call, as `EPOCH_OFFSET`."""

NEXT_EPOCH_OFFSET = 16
"""``uint64``: epoch of the next call, at first 1. A copy engine, which cannot add, copies it as the flag that
follows a shard."""

TICKET_OFFSET = 24
"""``uint32``: number of CTAs that have finished the call in flight; the last one resets it."""

CLAIM_OFFSET = 28
"""``uint32``: 0 until a wait expires. The lane that sets it writes the failure record."""

READERS_OFFSET = 32
"""``uint32``: number of warps of the call in flight that have ended reading the gather buffer; the last one
resets it."""


FLAG_BYTES = 8
"""A flag has 64 bits, the only width of an NVSHMEM signal; see :mod:`overlap_gemm.device.flags`."""


@dataclass(frozen=True)
class Region:
    """Array of equal elements, at the same place in every rank's workspace.

    ``region[i, j]``, or ``region[j]``, is the byte offset of an element from a workspace's base: a Python
    integer on the host, ``Int64`` in a kernel.

    Attributes:
        first: Byte offset of the first element.
        nbytes: Bytes of an element.
        pitch: Elements from ``[i, j]`` to ``[i + 1, j]``.
    """

    first: Address
    nbytes: int
    pitch: Scalar = 0

    def __getitem__(self, index: Any) -> Any:
        """Returns the byte offset of an element."""
        i, j = index if isinstance(index, tuple) else (0, index)
        return self.first + wide(i * self.pitch + j) * self.nbytes


ENTERED_OFFSET = 128
"""``uint64[2][MAX_WORLD]``, by parity of the epoch and peer: entry signal (`exchange.call.Call.identity`).
Its low half is that of the epoch, its high half the call's signature."""

READ_OFFSET = ENTERED_OFFSET + 2 * MAX_WORLD * FLAG_BYTES
"""``uint64[MAX_WORLD]``: flags; the last call in which each peer has read all shards sent to it."""

SENDERS_OFFSET = READ_OFFSET + MAX_WORLD * FLAG_BYTES
"""``uint32[MAX_WORLD]``: for each peer, number of warps of the call in flight that have sent it their part of
the local shard; the last one resets it."""

SENDER_BYTES = 4
"""Bytes of a counter at `SENDERS_OFFSET`."""

FLAG_ALIGN = 1024
"""Alignment in bytes of the first slot buffer."""

SLOT_BUFFERS = 2
STAGING_BUFFERS = 2
"""Number of equal buffers of each kind after the flags. Staging exists if some peer is not P2P-accessible."""


READ = Region(READ_OFFSET, FLAG_BYTES)
"""Flags of the peers that have read all shards: ``[peer]``."""


def sender_counter(peer: Scalar) -> Any:
    """Returns the byte offset of the counter at `SENDERS_OFFSET` for a peer, of 32 bits in a kernel."""
    return SENDERS_OFFSET + SENDER_BYTES * peer


def entry_signals(parity: Scalar) -> Region:
    """Returns the peers' entry signals in calls of a parity of the epoch: ``[peer]``."""
    return Region(ENTERED_OFFSET + parity * (MAX_WORLD * FLAG_BYTES), FLAG_BYTES)


def arrival_flags(world: Scalar) -> Region:
    """Returns the arrival flags: ``[tile][source]``."""
    return Region(CONTROL_BYTES, FLAG_BYTES, world)


def staged_flags(slots: Address, world: Scalar) -> Region:
    """Returns the local flags of staged tiles, ``[tile][owner]``; ``slots`` is `slots_offset`.

    The arrival flags take at most the first half of the bytes between control words and slots.
    """
    return Region((CONTROL_BYTES + slots) // 2, FLAG_BYTES, world)


def tile_slots(config: GemmConfig, buffer: Address, tiles: Scalar) -> Region:
    """Returns the slots of a buffer of slots, ``[source][tile]``, or of staged tiles, ``[owner][tile]``.

    Args:
        config: The kernel's configuration.
        buffer: Byte offset of the buffer.
        tiles: CTA tiles for which a source has slots.
    """
    return Region(buffer, config.tile_bytes, tiles)


def result_slots(config: GemmConfig, buffer: Address, tiles: Scalar, world: Scalar) -> Region:
    """Returns the slots of sums, ``[owner][tile]``, after those of the ``world`` sources' partial tiles."""
    return Region(tile_slots(config, buffer, tiles)[world, 0], config.result_bytes, tiles)


OWNED = 64
"""Divisor of the columns of a two-shot's shard: the least width of a tile, so that a tile has one owner."""


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes of one call: a product of ``rows`` x ``cols``, exchanged between ``world`` ranks.

    Attributes:
        rows: M of a rank's product, at least 1; if ranks multiply different rows, those of a full shard.
        cols: N of the product over all ranks.
        world: Number of ranks.
        shard: Rows, or columns (`is_by_columns`), of a full shard; ``shard * world`` is not less than the
            extent that is cut.
        pattern: Name of the communication pattern in `overlap_gemm.spec.PATTERNS`.
        weights: Columns of each weight in a full shard, if a kernel multiplies several, whose sum is `shard`.
    """

    rows: int
    cols: int
    world: int
    shard: int
    pattern: str = "reduce_scatter"
    weights: tuple[int, ...] = ()

    @classmethod
    def even(
        cls,
        rows: int,
        cols: int,
        world: int,
        pattern: str = "reduce_scatter",
        column_unit: int = 1,
    ) -> ExchangeShape:
        """Returns the shape with rows or columns cut as ``torch.chunk`` cuts them.

        If sums return to all ranks (two-shot), shards have multiples of 64 (`OWNED`) columns, and of
        ``column_unit``, the columns that share a scale. So each tile begins at a block.
        """
        spec = PATTERNS[pattern]
        shard = shard_rows(cols if spec.cut == "columns" else rows, world)
        unit = lcm(OWNED, column_unit) if spec.returns else 1
        return cls(rows, cols, world, ceil_div(shard, unit) * unit, pattern)

    @property
    def spec(self) -> PatternSpec:
        """Returns the communication pattern."""
        return PATTERNS[self.pattern]

    @property
    def is_by_columns(self) -> bool:
        """Returns whether shards are ranges of columns."""
        return self.spec.cut == "columns"

    @property
    def owners(self) -> int:
        """Returns the number of ranks whose shard is not empty."""
        return num_owners(self.cols if self.is_by_columns else self.rows, self.shard)

    @property
    def block(self) -> tuple[int, int]:
        """Returns (rows, columns) of the part of the product for which each source has slots in a buffer."""
        if self.is_by_columns:
            return self.rows, self.shard
        return (self.shard if self.spec.cut else self.rows), self.cols

    def grid(self, config: GemmConfig) -> TileGrid:
        """Returns the grid of cluster tiles of a block. Each of several weights begins with a tile."""
        (rows, cols), (tile_m, tile_n) = self.block, config.cluster_tile
        columns = sum(ceil_div(width, tile_n) for width in self.weights or (cols,))
        return TileGrid(ceil_div(rows, tile_m), columns)

    def weight_begins(self, config: GemmConfig) -> list[int]:
        """Returns the first column in a shard of each of several weights, and the end of the last one."""
        wide = config.cluster_tile[1]
        tiles = [ceil_div(width, wide) for width in self.weights]
        return [wide * sum(tiles[:i]) for i in range(len(tiles) + 1)]

    def cta_tiles(self, config: GemmConfig) -> int:
        """Returns the number of CTA tiles of a block: the range of tile numbers of slots and flags."""
        grid = self.grid(config)
        return grid.rows * grid.cols * config.cluster_size

    def num_flags(self, config: GemmConfig) -> int:
        """Returns the number of a rank's arrival flags.

        One per (CTA tile, source); for two-shot also one per (CTA tile, unit of its sum, owner).
        """
        units = config.units if self.spec.returns else 0
        return self.cta_tiles(config) * (1 + units) * self.world

    def buffer_bytes(self, config: GemmConfig) -> int:
        """Returns the bytes of one slot buffer.

        A slot per (source, CTA tile); for two-shot also one per (owner, summed CTA tile).
        """
        result = config.result_bytes if self.spec.returns else 0
        return self.world * self.cta_tiles(config) * (config.tile_bytes + result)

    def num_computed(self, config: GemmConfig) -> int:
        """Returns the number of cluster tiles that a rank computes."""
        grid = self.grid(config)
        return (self.owners if self.spec.cut and not self.spec.to_all else 1) * grid.rows * grid.cols

    def num_clusters(self, config: GemmConfig) -> int:
        """Returns the largest useful number of clusters: cluster tiles that a rank computes or stores."""
        grid = self.grid(config)
        return (self.owners if self.spec.cut else 1) * grid.rows * grid.cols


def tile_layout(config: GemmConfig, shape: ExchangeShape) -> dict[str, Any]:
    """Returns the facts that determine the place of each element, unit and flag of a call's tiles.

    Ranks with equal facts agree on all places. The call's signature is a digest of these facts.

    Args:
        config: The kernel's configuration.
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
    """Returns the byte offset of the first slot buffer in a workspace with ``max_flags`` arrival flags."""
    return ceil_div(CONTROL_BYTES + 2 * FLAG_BYTES * max_flags, FLAG_ALIGN) * FLAG_ALIGN


class Puts(NamedTuple):
    """Puts of a relay kernel to the ranks without P2P access: equal pieces, each put to every such rank.

    All fields are integers. Offsets are bytes from the call's buffer, the same on every rank, unless stated
    otherwise.

    Attributes:
        nbytes: Bytes of all pieces for one rank; the last piece may be shorter.
        piece: Bytes of a piece, a multiple of 16.
        ranks: Number of recipients: ranks 0 to ``ranks - 1``.
        source: Offset of the first piece for rank 0 in the local workspace.
        source_pitch: Bytes from one rank's source to the next rank's; 0: all ranks get the same data.
        target: Offset of the first piece in the recipient's workspace.
        staged: Offset from the workspace's base of the local flag of the first piece for rank 0. The flag is
            raised when the piece is complete; those of the next pieces follow, ``world`` flags apart. 0: all
            pieces are complete at the launch.
        staged_pitch: Bytes from one rank's local flag to the next rank's; 0 as for ``source_pitch``.
        flag: Number of the first piece's arrival flag at the recipient, as in `exchange.call.Call.flag`.
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
    """Returns the puts of ``rank`` in a call: its tiles, then (two-shot) the sums that it owns.

    Args:
        config: The kernel's configuration.
        shape: Sizes of the call.
        rank: Rank that puts.
        slots: `slots_offset` of the workspace.
        buffer: Bytes of one slot buffer of the workspace.
    """
    tiles, tile, world = shape.cta_tiles(config), config.tile_bytes, shape.world
    flags, local_slots = arrival_flags(world), tile_slots(config, 0, tiles)[rank, 0]
    if shape.spec.to_all:  # from the local slots
        if shape.is_by_columns:
            columns = min(max(shape.cols - rank * shape.shard, 0), shape.shard)
            tiles = tiles // shape.grid(config).cols * ceil_div(columns, config.cluster_tile[1])
        return [Puts(tiles * tile, tile, world, local_slots, 0, local_slots, flags[0, rank])]
    owners, staging = shape.owners, SLOT_BUFFERS * buffer
    staged = staged_flags(slots, world)[0, 0]
    partials = Puts(tiles * tile, tile, owners, staging, tiles * tile, local_slots, staged, FLAG_BYTES)
    if not shape.spec.returns:
        return [partials]
    result = config.result_bytes
    sums, summed = result_slots(config, 0, tiles, world)[rank, 0], flags[tiles, rank]
    nbytes = tiles * result if rank < owners else 0
    return [partials, Puts(nbytes, result // config.units, world, sums, 0, sums, summed, 0, tiles)]


END = -1
"""Argument of a gate kernel (:mod:`overlap_gemm.gather.gate`) in place of a source rank: it ends the call."""

SCALE_BYTES = 4
"""Bytes of the fp32 scale of a row."""

SHARD_ALIGN = 128
"""Divisor of the bytes that a gather buffer has for the scales of a full shard: a line of the L2 cache."""

SHARD_PIECES = 8
"""Largest number of pieces in which a shard of a gathered operand is put; each piece has a flag."""

CHUNK_ROWS = 128
"""Divisor of the rows of a slice's chunk (`gather.input_exchange`), so that most tiles end with a chunk."""


def chunk_rows(rows: int, row_bytes: int, least: int) -> int:
    """Returns the rows of a slice that share a flag: a multiple of `CHUNK_ROWS`.

    A slice has at most `SHARD_PIECES` such chunks.

    Args:
        rows: Rows of a full slice.
        row_bytes: Bytes of a row.
        least: Least bytes of a chunk for which a separate copy and flag are worthwhile.
    """
    number = min(max(rows * row_bytes // max(least, 1), 1), SHARD_PIECES)
    return ceil_div(rows, number * CHUNK_ROWS) * CHUNK_ROWS


PIECE_ALIGN = 1024
"""Divisor of the bytes of a shard's piece; the last piece has the rest."""


def shard_piece(nbytes: Scalar) -> Any:
    """Returns the bytes of a piece of a shard; a full shard has ``nbytes`` bytes."""
    return ceil_div(nbytes, SHARD_PIECES * PIECE_ALIGN) * PIECE_ALIGN


def shard_puts(rank: int, world: int, full: int, num_bytes: int) -> list[Puts]:
    """Returns the puts of ``rank``'s shard of ``num_bytes`` bytes to all ranks.

    Args:
        rank: Rank that puts.
        world: Number of ranks.
        full: Bytes of a full shard.
        num_bytes: Bytes of the rank's shard.
    """
    place = rank * full
    return [Puts(num_bytes, shard_piece(full), world, source=place, target=place)]
