"""Model of the time of an op: max(waves of tiles, bytes / link, memory) + fill and tail.

Its inputs are facts that all ranks share, and the constants of a `Machine`, so every rank gets the same
prediction. `plan`, `explain`, `auto`, `bench` and the documentation's curves use it.

- **Product.** cuBLAS is modeled as the best of our tiles in full waves, with K split if there are fewer
  tiles than SMs (measured: our plain kernel takes 0.98 to 1.02 of cuBLAS' time).
- **Fused.** The tiles of all shards are distributed to the resident clusters in waves. Local tiles are
  interleaved with remote ones, so that the link is used evenly. Ping-pong and tcgen05 kernels compute the
  next tile during an epilogue. In a cooperative kernel every epilogue stops the tensor cores, and so does the
  part of a tile that the ring cannot hold.
- **Few rows** are bound by memory: a tile takes as long as one SM needs to load its operands. So there must
  be many tiles, or parts of their K. The last tile is sent when all operands have been read; rows beyond the
  operand's end are not sent.
- **Leaves** of K (`invariant="ranks"`): all but the last one's sums are added to nodes in memory meanwhile.
- **Tail.** After the last wave, its bytes are sent and its tiles are summed over all sources.
- **Collectives** are interpolated between measured sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..config.gemm_config import DTYPE_BYTES, GemmConfig
from ..config.naming import blocks_name, by
from ..config.orders import joins_shards
from ..config.scale_blocks import PROMOTED, Blocks, OperandTypes
from ..exchange.geometry import FLAG_BYTES, ExchangeShape, chunk_rows
from ..spec import OPS, PATTERNS, OpSpec, patterns_of
from ..spec.sharding import ceil_div, num_owners, shard_rows
from .machine import Curve, Machine

UNKNOWN = 4
"""Assumed ratio of an extent on which the ranks have not agreed to the other one: an MLP's 4.

A kernel chosen for too large a product has a longer tail on small ones. A kernel chosen for too small a
product may take twice as long on large ones.
"""


@dataclass(frozen=True)
class Facts:
    """Facts that all ranks of a call share: the unsharded product `[M, K] x [N, K]^T` and the ranks.

    Attributes:
        op: Public name of the op.
        m: M over all ranks.
        n: N over all ranks; None if the ranks have not agreed on it (all_gather_gemm's may differ).
        k: K over all ranks; None if the ranks have not agreed on it (the summing ops' may differ).
        dtype: Type of the operands, and of the result unless it is an 8-bit type, whose results have 16 bits.
        world: Number of ranks P.
        shard: Rows of a full shard if rows are sharded; 0 for even shards.
        blocks: Blocks of the scales of 8-bit operands; None: scales per row.
        weights: `ExchangeShape.weights`.
        launches: N of the kernel of each weight of a list; empty if one kernel multiplies all columns.
        parts: Number of matrices along K.
        products: Number of weights of a list, each of which is a product for cuBLAS.
    """

    op: str
    m: int
    n: int | None
    k: int | None
    dtype: str
    world: int
    shard: int = 0
    blocks: Blocks | None = None
    weights: tuple[int, ...] = ()
    launches: tuple[int, ...] = ()
    parts: int = 1
    products: int = 1

    @cached_property
    def spec(self) -> OpSpec:
        """Returns the spec of the op."""
        return OPS[self.op]

    @cached_property
    def extents(self) -> tuple[int, int, int]:
        """Returns (M, N, K); an unknown N or K is `UNKNOWN` times the other.

        So no choice depends on an extent on which the ranks have not agreed.
        """
        n = UNKNOWN * self.k if self.n is None and self.k is not None else self.n
        k = UNKNOWN * self.n if self.k is None and self.n is not None else self.k
        assert n is not None and k is not None, f"{self.op} sends N or K, so one of them is known"
        return self.m, n, k

    @cached_property
    def local(self) -> tuple[int, int, int]:
        """Returns (M, N, K) of a rank's product."""
        return self.spec.product(*self.extents, self.world)

    @property
    def full_shard(self) -> int:
        """Returns the rows of a full shard, if rows are sharded."""
        return self.shard or shard_rows(self.m, self.world)

    @cached_property
    def result_bytes(self) -> int:
        """Returns the bytes of an element of the result, and of the partial sums that are sent."""
        return max(DTYPE_BYTES[self.dtype], 2)

    @cached_property
    def bytes_out(self) -> float:
        """Returns the minimum of bytes that each rank sends (all-reduce: in two shots)."""
        size = DTYPE_BYTES[self.dtype] if self.spec.operand_is_sent else self.result_bytes
        return self.spec.elements_out(*self.extents, self.world) * size


def efficiency_key(config: GemmConfig) -> str:
    """Returns the key of a kernel in `Machine.efficiency`."""
    words = [config.mma, by(config.tile), by(config.cluster)]
    return " ".join(words + ([blocks_name(config.blocks)] if config.blocks else []))


def times_bytes(config: GemmConfig, machine: Machine) -> float:
    """Returns the best rate of kernels with a configuration's types, as a multiple of `Machine.mma_rate`."""
    if not config.has_bytes:
        return 1.0
    return machine.promoted_rate if config.promotes else machine.bytes_rate


def efficiency_of(config: GemmConfig, machine: Machine, one_wave: bool = False) -> float:
    """Returns a kernel's efficiency, in one wave or in several.

    For a kernel that was not measured it is the minimum over those of its tile, or of its MMA kind, or of
    all. If no kernel with its block scales was measured (`Machine.missing_block_timings`), the kernel without
    is used.
    """
    if machine.missing_block_timings(config.blocks):
        config = replace(config, blocks=None, leaves=0)
    known, name = machine.efficiencies(config.blocks), efficiency_key(config)
    if one_wave and name in machine.one_wave:
        return machine.one_wave[name]
    if name in known:
        return known[name]
    kind, tile, *_ = name.split()
    like = [e for other, e in known.items() if other.startswith(f"{kind} {tile} ")]
    return min(like or [e for other, e in known.items() if other.startswith(f"{kind} ")] or known.values())


def product_seconds(facts: Facts, machine: Machine, sms: int) -> float:
    """Returns the time of a rank's product by cuBLAS."""
    (m, n, k), rate = facts.local, 1.0
    if DTYPE_BYTES[facts.dtype] == 1:
        rate = machine.blocks_rate if facts.blocks in PROMOTED else machine.bytes_rate
    waves = _best_waves(m, n, machine, sms) * k / rate
    return machine.launch + max(waves, _memory_seconds(facts, machine))


@lru_cache(maxsize=1024)
def _best_waves(m: int, n: int, machine: Machine, sms: int) -> float:
    """Returns the seconds per unit of K of the best tile's waves."""
    best = float("inf")
    for name, efficiency in machine.efficiencies(None).items():
        kind, tile, _ = name.split()
        rows, columns = map(int, tile.split("x"))
        ctas = ceil_div(m, rows) * ceil_div(n, columns) * (2 if kind == "2cta" else 1)
        waves = ctas / sms if ctas < sms else ceil_div(ctas, sms)
        area = rows * columns // (2 if kind == "2cta" else 1)
        best = min(best, waves * 2 * area / (machine.mma_rate / machine.sms * efficiency))
    return best


def _memory_seconds(facts: Facts, machine: Machine) -> float:
    m, n, k = facts.local
    return ((m + n) * k * DTYPE_BYTES[facts.dtype] + m * n * facts.result_bytes) / machine.memory_rate


def _mainloop_seconds(config: GemmConfig, k: int, machine: Machine, waves: int) -> float:
    """Returns the time of a CTA tile on its SM's tensor cores, in one of `waves` waves."""
    rows, columns = config.cta_tile
    rate = machine.mma_rate / machine.sms * efficiency_of(config, machine, waves == 1)
    rate *= times_bytes(config, machine)
    parked = config.accumulations - 1 if config.parks_in_memory else 0
    parts = machine.handover * (config.k_split - 1) + machine.leaf * rows * columns * parked
    return 2 * rows * columns * ceil_div(k, config.k_split) / rate + parts


def _wave_seconds(config: GemmConfig, mainloop: float, machine: Machine, drain: float = 0.0) -> float:
    """Returns the time of one wave; `drain`: time to send what must leave a tile before its epilogue ends."""
    rows, columns = config.cta_tile
    epilogue = machine.epilogue * rows * columns + drain
    return mainloop + epilogue if config.mma == "cooperative" else max(mainloop, epilogue)


def copies_seconds(facts: Facts, machine: Machine) -> float:
    """Returns the host time of an eager all-gather GEMM's copies; 0 if the kernel's warps send."""
    if not facts.spec.operand_is_sent:
        return 0.0
    _, _, k = facts.extents
    rows = facts.full_shard
    row_bytes, copies = k * DTYPE_BYTES[facts.dtype], 1
    if not facts.spec.gathers_operand:
        row_bytes //= facts.world
        copies = ceil_div(rows, chunk_rows(rows, row_bytes, machine.copy_bytes))
    is_copied = rows * row_bytes >= machine.copy_bytes
    return (facts.world - 1) * copies * machine.copy_host if is_copied else 0.0


def link_seconds(facts: Facts, machine: Machine) -> float:
    """Returns the time of the op's bytes at the link's full rate."""
    return facts.bytes_out / machine.link_rate


def collective_seconds(name: str, bytes_out: float, world: int, machine: Machine) -> float:
    """Returns the time of a collective, from the curve of the number of ranks nearest to `world`."""
    if world == 1:
        return 0.0
    curves = machine.collectives.get(name) or machine.collectives["all_gather"]  # the same number of bytes
    nearest = min(curves, key=lambda ranks: (max(ranks / world, world / ranks), ranks))
    return interpolate(curves[nearest], bytes_out)


def interpolate(curve: Curve, size: float) -> float:
    """Returns the seconds of `size` bytes.

    Linear between points and beyond the last two, constant before the first.
    """
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    right = next((i for i, (b, _) in enumerate(curve) if b >= size), len(curve) - 1)
    (b0, s0), (b1, s1) = curve[right - 1], curve[right]
    return s0 + (s1 - s0) * (size - b0) / (b1 - b0)


def transfer_seconds(facts: Facts, machine: Machine, in_rank_order: bool = False) -> float:
    """Returns the time of an op's collectives.

    With `in_rank_order` partial sums are added in rank order, as in `sequential`.
    """
    names = facts.spec.collectives(in_rank_order)
    each = facts.bytes_out / len(names)
    seconds = sum(collective_seconds(name, each, facts.world, machine) for name in names)
    if facts.spec.gathers_output:  # blocks of columns, which a copy interleaves afterwards
        m, n, _ = facts.extents
        # Measured: such a copy reaches a third of the memory's rate, after two launches.
        seconds += 2 * machine.launch + 3 * 2 * m * n * facts.result_bytes / machine.memory_rate
    if "all_to_all" in names:  # of blocks of columns, with a copy before or after
        seconds += machine.launch + 2 * facts.bytes_out / machine.memory_rate
    return seconds


@dataclass(frozen=True)
class FusedTime:
    """Parts of the time of a fused call, in seconds.

    Attributes:
        waves: Tiles on the tensor cores.
        link: Packed tiles and flags at the kernel's link rate.
        memory: Operands and result.
        fill: The first tile, before sending can begin.
        tail: After the last wave: sending its bytes, and its sums if they are sent on.
        receive: Sum of the last tiles.
        launch: Cost of a kernel in addition to its tiles.
    """

    waves: float
    link: float
    memory: float
    fill: float
    tail: float
    receive: float
    launch: float

    @property
    def total(self) -> float:
        """Returns the time of the call on the device."""
        return self.launch + max(self.waves + self.tail, self.fill + self.link, self.memory) + self.receive


class _Tiles(NamedTuple):
    """Partition of a rank's product by an exchange.

    Attributes:
        clusters: Number of cluster tiles.
        copies: Number of copies of each tile that are sent to other ranks.
        exists: Fraction of a tile that is sent.
    """

    clusters: int
    copies: float
    exists: float


def _tiles(config: GemmConfig, facts: Facts, pattern: str) -> _Tiles:
    """Returns the number of clusters a rank computes, and the parts of their tiles that it sends."""
    shape, spec, world = _shape_of(facts, pattern), PATTERNS[pattern], facts.world
    rows, columns = shape.block
    # A rank that owns no tiles sends all of them.
    copies = world - 1.0 if spec.to_all else (shape.owners - (shape.owners == world)) / shape.owners
    # Rows beyond the end are not sent; reduce-scatter was measured when they were.
    tall = config.cluster_tile[0]
    exists = 1.0 if spec.cut == "rows" else rows / (ceil_div(rows, tall) * tall)
    return _Tiles(shape.num_computed(config), copies, exists * _sent_columns(config, columns))


def _shape_of(facts: Facts, pattern: str) -> ExchangeShape:
    """Returns the exchange of a call: rows of a rank's product, columns over all ranks."""
    (rows, _, _), (_, columns, _) = facts.local, facts.extents
    if PATTERNS[pattern].cut == "rows" and facts.shard:
        return ExchangeShape(rows, columns, facts.world, facts.shard, pattern)
    unit = OperandTypes(facts.dtype, facts.blocks).column_unit
    shape = ExchangeShape.even(rows, columns, facts.world, pattern, unit)
    return replace(shape, weights=facts.weights) if facts.weights else shape


def fused_time(
    config: GemmConfig, facts: Facts, machine: Machine, sms: int, pattern: str | None = None
) -> FusedTime:
    """Returns the time of a fused call (a plain GEMM in a group of one) by the kernel of `config`.

    An all-reduce or an all-gather sends more bytes, or waits for more arrivals, than a reduce-scatter. They
    are added at the rates and times of a reduce-scatter.
    """
    m, n, k = facts.local
    pattern = pattern or patterns_of(facts.op)[0]
    world, size, spec = facts.world, facts.result_bytes, PATTERNS[pattern]
    clusters, copies, exists = _tiles(config, facts, pattern)
    resident = max(1, sms // config.cluster_ctas)
    num_waves = ceil_div(clusters, resident)
    sends_flags = world > 1 and num_waves > 1 and not config.sends_ll
    small = sends_flags and math.prod(config.cta_tile) <= machine.small_tile
    bulk_rate = machine.bulk_rate * (machine.small_tile_rate if small else 1)
    tile_bytes = config.tile_bytes * exists + FLAG_BYTES

    mainloop = _mainloop_seconds(config, k, machine, num_waves)
    ring = config.ring_stages * config.slot_subtile_bytes
    drain = copies * max(0, tile_bytes - ring) / (bulk_rate / sms)
    wave = _wave_seconds(config, mainloop, machine, drain)
    if sends_flags:
        wave = max(wave, machine.flag_step)
    sent = copies * tile_bytes * config.cluster_size / bulk_rate
    last = min(clusters, resident)
    link, tail, memory = clusters * sent, last * sent, _memory_seconds(facts, machine)
    read = memory / (machine.swap_ab_stream if config.is_swap_ab else machine.stream)
    # After the last wave: the slots of its tiles are read, and the sums are written.
    arrivals, received = 1, world * tile_bytes * last * config.cluster_size / machine.memory_rate
    if spec.returns:  # sums are sent like partials, and copied
        arrivals, received = 2, 2 * received
        link, tail = 2 * link, 2 * tail
        memory += 2 * m * n * size / machine.memory_rate
    elif spec.to_all:  # every rank reads and writes the tiles of all ranks
        copies_of = world if facts.spec.sums else world - 1  # local results are written to the output
        copied = 2 * copies_of * m * n * size / machine.memory_rate
        received *= 2
        memory += copied
        if not facts.spec.sums:  # measured: overlap with the tensor cores does not hide them
            received += copied
    arrival = machine.ll_arrival if config.sends_ll else machine.arrival
    return FusedTime(
        waves=max(num_waves * wave, read),
        link=link,
        memory=memory,
        fill=mainloop,
        tail=tail,
        receive=(0.0 if world == 1 else arrivals * arrival + received)
        + machine.handover * (config.k_split - 1),
        launch=machine.launch,
    )


def _sent_columns(config: GemmConfig, columns: int) -> float:
    """Returns the fraction of the columns of a shard's tiles that is sent: all non-empty subtiles."""
    wide, tile = config.epi_tile[1], config.cluster_tile[1]
    return ceil_div(columns, wide) * wide / (ceil_div(columns, tile) * tile)


def fused_all_gather(config: GemmConfig, facts: Facts, machine: Machine, sms: int) -> FusedTime:
    """Returns the time of a fused all-gather GEMM by the kernel of `config`, shard after shard.

    The local shard is present; the others arrive one after the other at the link's full rate. The tiles of a
    shard begin when it has arrived, and the waves of its and all later tiles follow. Tiles of several shards
    (`joins_shards`) begin when all have arrived. `tail` is the part of the arrivals that the product does not
    hide.
    """
    m, n, k = facts.local
    world = facts.world
    shard = facts.full_shard
    owners = num_owners(m, shard)
    tile_m, tile_n = config.cluster_tile
    joins = joins_shards(config, m, shard)
    parts = 1 if joins else owners  # of the tiles, each of which waits for its own shards
    per_part = ceil_div(m if joins else shard, tile_m) * ceil_div(n, tile_n)
    resident = max(1, sms // config.cluster_ctas)
    num_waves = ceil_div(parts * per_part, resident)
    wave = _wave_seconds(config, _mainloop_seconds(config, k, machine, num_waves), machine)
    waves = done = num_waves * wave
    arrival = shard * k * DTYPE_BYTES[facts.dtype] / machine.link_rate
    for step in range(1, owners):
        left = ceil_div((parts if joins else owners - step) * per_part, resident)
        done = max(done, step * arrival + machine.arrival + left * wave)
    tail = done - waves
    return FusedTime(
        waves=waves,
        link=(owners - 1) * arrival,
        memory=_memory_seconds(facts, machine) + (tail if joins else 0.0),
        fill=0.0,
        tail=tail,
        receive=0.0 if world == 1 else machine.arrival,
        launch=machine.launch,
    )


def fused_input_exchange(config: GemmConfig, facts: Facts, machine: Machine, sms: int) -> FusedTime:
    """Returns the time of a fused all-to-all GEMM by the kernel of `config`, wave after wave.

    A wave begins with the local columns; those of its rows that peers have must arrive meanwhile, at the
    link's full rate, in the order of the waves. `tail` is the part of the arrivals that the product does not
    hide.
    """
    m, n, k = facts.local
    world, (tile_m, tile_n) = facts.world, config.cluster_tile
    resident = max(1, sms // config.cluster_ctas)
    num_waves = ceil_div(ceil_div(m, tile_m) * ceil_div(n, tile_n), resident)
    padded = world * ceil_div(k // world, config.tile_k) * config.tile_k  # each slice has its own last k tile
    wave = _wave_seconds(config, _mainloop_seconds(config, padded, machine, num_waves), machine)
    waves = done = num_waves * wave
    row_bytes = k // world * DTYPE_BYTES[facts.dtype]
    chunk = min(chunk_rows(m, row_bytes, machine.copy_bytes), m)
    link = (world - 1) * m * row_bytes / machine.link_rate
    for number in range(num_waves):
        part = max((number + 1) / num_waves, chunk / m)  # of the rows
        left = (num_waves - number - 1 / world) * wave
        done = max(done, part * link + machine.arrival + left)
    return FusedTime(
        waves=waves,
        link=link,
        memory=_memory_seconds(facts, machine),
        fill=0.0,
        tail=done - waves,
        receive=0.0 if world == 1 else machine.arrival,
        launch=machine.launch,
    )
