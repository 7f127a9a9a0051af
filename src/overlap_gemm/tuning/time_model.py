"""The one model of how long an op takes: max(waves of tiles, bytes / link, memory) + fill and tail.

It knows only facts that all ranks share and the constants of a `Machine`, so that every rank that asks gets
the same answer. `plan`, `explain`, `auto`, `bench` and the documentation's curves all read it.

- **Product.** cuBLAS is taken to run the best of our tiles in whole waves, and to cut K where the tiles are
  fewer than the SMs (measured: our plain kernel takes 0.98 to 1.02 of it).
- **Fused.** The tiles of all shards are dealt to the resident clusters in waves, own ones among foreign ones,
  so that the link is asked evenly. Ping-pong and tcgen05 kernels work on the next tile during an epilogue. A
  cooperative one does not: every epilogue, and what of its tile the ring does not hold, stops the tensor
  cores. Few rows are bound by memory: a tile takes as long as one SM loads it, so tiles, or parts of their K,
  must be many, and the last one leaves when all of the operands have been read; rows that do not exist are
  not sent. After the last wave come its bytes on the link and the sum of its tiles over all sources.
- **Collectives** are interpolated between measured sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..config.gemm_config import DTYPE_BYTES, GemmConfig
from ..config.naming import blocks_name, by
from ..config.scale_blocks import PROMOTED, Blocks
from ..exchange.geometry import FLAG_BYTES, ExchangeShape
from ..spec import OPS, PATTERNS, OpSpec, patterns_of
from ..spec.sharding import ceil_div, num_owners, shard_rows
from .machine import Curve, Machine

UNKNOWN = 4
"""An extent that the ranks have not agreed on is an MLP's, this many times the hidden size. A kernel that is
chosen for much to compute has a longer tail where there is little; one chosen for little may take twice as
long where there is much."""


@dataclass(frozen=True)
class Facts:
    """What all ranks of a call share: the unsharded product `[M, K] x [N, K]^T` and who carries it out.

    Attributes:
        op: The op's public name.
        m: M over all ranks.
        n: N over all ranks; None where the ranks have not agreed on it (all_gather_gemm's may differ).
        k: K over all ranks; None where they have not agreed on it (the summing ops' may differ).
        dtype: Of the operands; of the result, too, unless it is an 8-bit type, whose results have 16.
        world: Ranks P.
        shard: Rows of a full shard, where rows are sharded; 0 for even shards.
        blocks: Which blocks the scales of 8-bit operands are of; None: of rows.
    """

    op: str
    m: int
    n: int | None
    k: int | None
    dtype: str
    world: int
    shard: int = 0
    blocks: Blocks | None = None

    @cached_property
    def spec(self) -> OpSpec:
        """The op."""
        return OPS[self.op]

    @cached_property
    def extents(self) -> tuple[int, int, int]:
        """(M, N, K), an unknown N or K taken as `UNKNOWN` times the other: so no choice depends on it."""
        n = UNKNOWN * self.k if self.n is None and self.k is not None else self.n
        k = UNKNOWN * self.n if self.k is None and self.n is not None else self.k
        assert n is not None and k is not None, f"{self.op} travels with N or K, so one of them is known"
        return self.m, n, k

    @cached_property
    def local(self) -> tuple[int, int, int]:
        """(M, N, K) of the product that a rank multiplies."""
        return self.spec.product(*self.extents, self.world)

    @cached_property
    def result_bytes(self) -> int:
        """Of an element of the result, and of the partial sums that travel."""
        return max(DTYPE_BYTES[self.dtype], 2)

    @cached_property
    def bytes_out(self) -> float:
        """Bytes that each rank sends at least (all-reduce: in two shots)."""
        size = DTYPE_BYTES[self.dtype] if self.spec.operand_is_sent else self.result_bytes
        return self.spec.elements_out(*self.extents, self.world) * size


def efficiency_key(config: GemmConfig) -> str:
    """The name of a kernel in `Machine.efficiency`."""
    words = [config.mma, by(config.tile), by(config.cluster)]
    return " ".join(words + ([blocks_name(config.blocks)] if config.blocks else []))


def times_bytes(config: GemmConfig, machine: Machine) -> float:
    """How many times `Machine.mma_rate` the kernels of a configuration's types reach at best."""
    if not config.has_bytes:
        return 1.0
    return machine.promoted_rate if config.promotes else machine.bytes_rate


def efficiency_of(config: GemmConfig, machine: Machine, one_wave: bool = False) -> float:
    """A kernel's efficiency, in one wave or in several.

    Of one that was not measured, the least of its tile's, its kind's, or all. Where none with scales of its
    blocks was (`Machine.why_as_rows`), that of the kernel without.
    """
    if machine.why_as_rows(config.blocks):
        config = replace(config, blocks=None)
    known, name = machine.efficiencies(config.blocks), efficiency_key(config)
    if one_wave and name in machine.one_wave:
        return machine.one_wave[name]
    if name in known:
        return known[name]
    kind, tile, *_ = name.split()
    like = [e for other, e in known.items() if other.startswith(f"{kind} {tile} ")]
    return min(like or [e for other, e in known.items() if other.startswith(f"{kind} ")] or known.values())


def product_seconds(facts: Facts, machine: Machine, sms: int) -> float:
    """The time of a rank's product by cuBLAS."""
    (m, n, k), rate = facts.local, 1.0
    if DTYPE_BYTES[facts.dtype] == 1:
        rate = machine.blocks_rate if facts.blocks in PROMOTED else machine.bytes_rate
    waves = _best_waves(m, n, machine, sms) * k / rate
    return machine.launch + max(waves, _memory_seconds(facts, machine))


@lru_cache(maxsize=1024)
def _best_waves(m: int, n: int, machine: Machine, sms: int) -> float:
    """Seconds per unit of K of the best tile's waves."""
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
    """A CTA tile on its SM's tensor cores, one of so many waves."""
    rows, columns = config.cta_tile
    rate = machine.mma_rate / machine.sms * efficiency_of(config, machine, waves == 1)
    rate *= times_bytes(config, machine)
    return 2 * rows * columns * ceil_div(k, config.k_split) / rate + machine.handover * (config.k_split - 1)


def _wave_seconds(config: GemmConfig, mainloop: float, machine: Machine, drain: float = 0.0) -> float:
    """One wave; `drain`: what of a tile must leave before its epilogue ends."""
    rows, columns = config.cta_tile
    epilogue = machine.epilogue * rows * columns + drain
    return mainloop + epilogue if config.mma == "cooperative" else max(mainloop, epilogue)


def by_shards_seconds(facts: Facts, machine: Machine, sms: int) -> float:
    """An all-gather GEMM by copy engines, a gate and a cuBLAS product a shard (`backends.by_shards`)."""
    shard = facts.shard or shard_rows(facts.m, facts.world)
    _, _, k = facts.extents
    product = product_seconds(replace(facts, m=shard), machine, sms)
    copy, done = shard * k * DTYPE_BYTES[facts.dtype] / machine.copy_rate, product
    for number in range(1, facts.world):
        done = max(done, number * copy + machine.copy_start) + machine.gate + product
    return done + machine.gate


def copies_seconds(facts: Facts, machine: Machine) -> float:
    """Host time of an eager all-gather GEMM's copies: none where the kernel's warps send."""
    if not facts.spec.gathers_operand:
        return 0.0
    _, _, k = facts.extents
    nbytes = (facts.shard or shard_rows(facts.m, facts.world)) * k * DTYPE_BYTES[facts.dtype]
    return (facts.world - 1) * machine.copy_host if nbytes >= machine.copy_bytes else 0.0


def link_seconds(facts: Facts, machine: Machine) -> float:
    """The op's bytes at the link's full rate."""
    return facts.bytes_out / machine.link_rate


def collective_seconds(name: str, bytes_out: float, world: int, machine: Machine) -> float:
    """A collective's time, from the curve of the number of ranks that is nearest to `world`."""
    if world == 1:
        return 0.0
    curves = machine.collectives.get(name) or machine.collectives["all_gather"]  # as many bytes, as far
    nearest = min(curves, key=lambda ranks: (max(ranks / world, world / ranks), ranks))
    return interpolate(curves[nearest], bytes_out)


def interpolate(curve: Curve, size: float) -> float:
    """Seconds of `size` bytes: linear between points and after the last two, constant before the first."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    right = next((i for i, (b, _) in enumerate(curve) if b >= size), len(curve) - 1)
    (b0, s0), (b1, s1) = curve[right - 1], curve[right]
    return s0 + (s1 - s0) * (size - b0) / (b1 - b0)


def transfer_seconds(facts: Facts, machine: Machine, in_rank_order: bool = False) -> float:
    """The collectives of an op; `in_rank_order`: partial sums are added so, as `sequential` does."""
    names = facts.spec.collectives(in_rank_order)
    each = facts.bytes_out / len(names)
    seconds = sum(collective_seconds(name, each, facts.world, machine) for name in names)
    if facts.spec.gathers_output:  # by blocks of columns, which are laid side by side after
        m, n, _ = facts.extents
        # Measured: such a copy reaches a third of the memory's rate, after launches of its own.
        seconds += 2 * machine.launch + 3 * 2 * m * n * facts.result_bytes / machine.memory_rate
    if "all_to_all" in names:  # of blocks of columns, which are copied before or after
        seconds += machine.launch + 2 * facts.bytes_out / machine.memory_rate
    return seconds


@dataclass(frozen=True)
class FusedTime:
    """Where the model sees the time of a fused call go, in seconds.

    Attributes:
        waves: Tiles on the tensor cores.
        link: Packed tiles and flags at the kernel's own link rate.
        memory: Operands and result.
        fill: Before the link can begin: the first tile.
        tail: After the last wave: its bytes on the link, and its sums' where they go on.
        receive: The sum of the last tiles.
        launch: In addition to all tiles.
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
        """The call's time on the device."""
        return self.launch + max(self.waves + self.tail, self.fill + self.link, self.memory) + self.receive


class _Dealt(NamedTuple):
    """How an exchange cuts a rank's product.

    Attributes:
        clusters: Cluster tiles.
        copies: Of each tile, to other ranks.
        exists: The part of a tile that travels.
    """

    clusters: int
    copies: float
    exists: float


def _dealt(config: GemmConfig, facts: Facts, pattern: str) -> _Dealt:
    shape, spec, world = _shape_of(facts, pattern), PATTERNS[pattern], facts.world
    rows, columns = shape.block
    # A rank that owns nothing sends everything.
    copies = world - 1.0 if spec.to_all else (shape.owners - (shape.owners == world)) / shape.owners
    # Rows that do not exist do not travel; of reduce-scatter it was measured when they did.
    tall = config.cluster_tile[0]
    exists = 1.0 if spec.cut == "rows" else rows / (ceil_div(rows, tall) * tall)
    return _Dealt(shape.num_computed(config), copies, exists * _sent_columns(config, columns))


def _shape_of(facts: Facts, pattern: str) -> ExchangeShape:
    """The exchange of a call: rows of a rank's product, columns over all ranks."""
    (rows, _, _), (_, columns, _) = facts.local, facts.extents
    if PATTERNS[pattern].cut == "rows" and facts.shard:
        return ExchangeShape(rows, columns, facts.world, facts.shard, pattern)
    return ExchangeShape.even(rows, columns, facts.world, pattern, facts.blocks)


def fused_time(
    config: GemmConfig, facts: Facts, machine: Machine, sms: int, pattern: str | None = None
) -> FusedTime:
    """A fused call (a plain GEMM in a group of one) by the kernel of `config`.

    What other patterns add to a reduce-scatter is counted in bytes and arrivals, at the same rates.
    """
    m, n, k = facts.local
    pattern = pattern or patterns_of(facts.op)[0]
    world, size, spec = facts.world, facts.result_bytes, PATTERNS[pattern]
    clusters, copies, exists = _dealt(config, facts, pattern)
    resident = max(1, sms // config.cluster_ctas)
    num_waves = ceil_div(clusters, resident)
    told = world > 1 and num_waves > 1 and not config.sends_ll
    small = told and math.prod(config.cta_tile) <= machine.small_tile
    bulk_rate = machine.bulk_rate * (machine.small_tile_rate if small else 1)
    tile_bytes = config.tile_bytes * exists + FLAG_BYTES

    mainloop = _mainloop_seconds(config, k, machine, num_waves)
    ring = config.ring_stages * config.slot_subtile_bytes
    drain = copies * max(0, tile_bytes - ring) / (bulk_rate / sms)
    wave = _wave_seconds(config, mainloop, machine, drain)
    if told:
        wave = max(wave, machine.flag_step)
    sent = copies * tile_bytes * config.cluster_size / bulk_rate
    last = min(clusters, resident)
    link, tail, memory = clusters * sent, last * sent, _memory_seconds(facts, machine)
    read = memory / (machine.swap_ab_stream if config.is_swap_ab else machine.stream)
    # After the last wave: the slots of its tiles are read, and what they make is written.
    arrivals, received = 1, world * tile_bytes * last * config.cluster_size / machine.memory_rate
    if spec.returns:  # the sums go out as the partials did, and are copied
        arrivals, received = 2, 2 * received
        link, tail = 2 * link, 2 * tail
        memory += 2 * m * n * size / machine.memory_rate
    elif spec.to_all:  # every rank reads and writes what all send
        copies_of = world if facts.spec.sums else world - 1  # own results go straight to the output
        copied = 2 * copies_of * m * n * size / machine.memory_rate
        received *= 2
        memory += copied
        if not facts.spec.sums:  # measured: alongside the tensor cores they take what they take alone
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
    """Of the columns of a shard's tiles, the part that travels: whole subtiles that have some."""
    wide, tile = config.epi_tile[1], config.cluster_tile[1]
    return ceil_div(columns, wide) * wide / (ceil_div(columns, tile) * tile)


def fused_all_gather(config: GemmConfig, facts: Facts, machine: Machine, sms: int) -> FusedTime:
    """A fused all-gather GEMM by the kernel of `config`: shard after shard, each when it has arrived.

    The own shard is there; the others arrive one after the other at the link's full rate. What waits for a
    shard begins when it arrives, so the waves of its tiles and of those after them follow. What of the
    arrivals the product does not hide is `tail`.
    """
    m, n, k = facts.local
    world = facts.world
    shard = facts.shard or shard_rows(m, world)
    owners = num_owners(m, shard)
    tile_m, tile_n = config.cluster_tile
    per_shard = ceil_div(shard, tile_m) * ceil_div(n, tile_n)
    resident = max(1, sms // config.cluster_ctas)
    num_waves = ceil_div(owners * per_shard, resident)
    wave = _wave_seconds(config, _mainloop_seconds(config, k, machine, num_waves), machine)
    waves = done = num_waves * wave
    arrival = shard * k * DTYPE_BYTES[facts.dtype] / machine.link_rate
    for step in range(1, owners):
        left = ceil_div((owners - step) * per_shard, resident)
        done = max(done, step * arrival + machine.arrival + left * wave)
    return FusedTime(
        waves=waves,
        link=(owners - 1) * arrival,
        memory=_memory_seconds(facts, machine),
        fill=0.0,
        tail=done - waves,
        receive=0.0 if world == 1 else machine.arrival,
        launch=machine.launch,
    )
