"""What is legal, what fits, and where things lie in a workspace: no DSL, no GPU."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_gemm.config.arch import ARCHS
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.exchange.geometry import (
    CONTROL_BYTES,
    FLAG_BYTES,
    SHARD_PIECES,
    SLOT_BUFFERS,
    ExchangeShape,
    shard_puts,
    slots_offset,
    staged_flags,
    tile_puts,
)
from overlap_gemm.pipelines.publication import LaggedPublication
from overlap_gemm.spec import PATTERNS

EVERY_TILE = [
    GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster)
    for arch in ("sm_90a", "sm_100a")
    for mma, kind in ARCHS[arch].mma.items()
    for tile in kind.tiles
    for cluster in kind.clusters
]


@pytest.mark.parametrize("config", EVERY_TILE, ids=lambda c: c.name)
def test_every_legal_configuration_fits(config):
    assert config.ab_stages >= 2
    used = config.ab_stages * config.ab_stage_bytes + config.ring_stages * config.stage_bytes
    assert used <= config.on.smem_bytes
    left = config.on.smem_bytes - used
    assert left < config.ab_stage_bytes + 1024, "there is room for another stage"
    assert (
        config.subtiles * config.epi_tile[0] * config.epi_tile[1] == config.cta_tile[0] * config.cta_tile[1]
    )
    assert config.slot_subtile_bytes % (16 * config.epilogue_threads) == 0, "whole 16-byte chunks per thread"
    assert config.slot_subtile_bytes % config.unit_bytes == 0
    assert config.lane_chunks * 32 * 16 == config.unit_bytes


def test_names_are_unique():
    assert len({c.name for c in EVERY_TILE}) == len(EVERY_TILE)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"arch": "sm_80"}, "sm_80"),
        ({"mma": "pingpong"}, "pingpong"),
        ({"tile": (96, 128)}, r"\(96, 128\)"),
        ({"cluster": (3, 1)}, r"\(3, 1\)"),
        ({"mma": "2cta", "tile": (256, 128)}, r"\(1, 1\)"),
        ({"in_dtype": "f32"}, "f32"),
        ({"in_dtype": "f16"}, "bf16"),
        ({"ring_stages": 2, "inflight": 2}, "inflight=2"),
        ({"inflight": 0}, "inflight=0"),
        ({"arch": "sm_90a", "mma": "swap_ab", "tile": (16, 64), "slot_dtype": "f32"}, "swap_ab.*f32"),
        ({"arch": "sm_90a", "mma": "swap_ab", "tile": (128, 64), "k_split": 2}, "k_split.*128"),
        ({"k_split": 2}, "k_split"),
        ({"weights": 9}, "weights must be 1 to 8 in one kernel, got 9"),
        ({"weights": 3, "leaves": 2, "slot_dtype": "f32"}, "weights=3 is for .* got leaves=2, blocks=None"),
        ({"raster_group": 0}, "raster_group=0"),
        ({"tile": (128, 256), "out_dtype": "f32", "ring_stages": 10}, "at least 2"),
    ],
)
def test_errors_carry_the_value(fields, named):
    with pytest.raises(ValueError, match=named):
        GemmConfig(**fields)


@pytest.mark.parametrize("config", EVERY_TILE[::5], ids=lambda c: c.name)
@pytest.mark.parametrize(("rows", "cols", "world"), [(1, 8, 4), (8192, 4096, 8), (1000, 264, 3)])
def test_slots_hold_every_tile_of_every_source(config, rows, cols, world):
    shape = ExchangeShape.even(rows, cols, world)
    grid = shape.grid(config)
    per_shard = -(-rows // world)
    assert grid.rows * config.cluster_tile[0] >= per_shard > (grid.rows - 1) * config.cluster_tile[0]
    assert grid.cols * config.cluster_tile[1] >= cols > (grid.cols - 1) * config.cluster_tile[1]
    tile_bytes = config.subtiles * config.slot_subtile_bytes
    assert shape.buffer_bytes(config) == world * shape.cta_tiles(config) * tile_bytes
    assert shape.num_flags(config) == world * shape.cta_tiles(config)


def test_workspace_layout_does_not_overlap():
    for flags in (0, 1, 256, 1000):
        slots = slots_offset(flags)
        staged = staged_flags(slots, 1)[0, 0]
        assert staged >= CONTROL_BYTES + FLAG_BYTES * flags
        assert slots >= staged + FLAG_BYTES * flags
        assert staged % FLAG_BYTES == 0 and slots % 1024 == 0


@pytest.mark.parametrize(("subtiles", "inflight"), list(itertools.product(range(1, 9), range(9))))
def test_publication_is_at_the_first_commit_that_proves_a_tile_written(subtiles, inflight):
    due = LaggedPublication(subtiles, inflight)
    published = []
    for tile, subtile in itertools.product(range(12), range(subtiles)):
        committed = tile * subtiles + subtile + 1
        if subtile == due.subtile and tile >= due.lag:
            published.append(tile - due.lag)
            written = committed - inflight
            assert written == (tile - due.lag + 1) * subtiles
    assert published == list(range(12 - due.lag)), "the flush has exactly `lag` tiles left"


# --- what a relay puts ---


def pieces(puts):
    """(number, offset, bytes) of each piece that a rank gets."""
    return [
        (i, at, min(puts.piece, puts.nbytes - at)) for i, at in enumerate(range(0, puts.nbytes, puts.piece))
    ]


def overlapping(ranges):
    ordered = sorted(ranges)
    return [pair for pair in itertools.pairwise(ordered) if pair[0][0] + pair[0][1] > pair[1][0]]


@given(st.integers(1, 700), st.integers(1, 40), st.integers(2, 5), st.sampled_from(list(PATTERNS)))
def test_puts_of_all_ranks_have_places_and_flags_of_their_own(rows, columns, world, pattern):
    config = GemmConfig(arch="sm_90a", mma="pingpong", tile=(64, 128), cluster=(2, 1), out_dtype="f32")
    shape = ExchangeShape.even(rows, 8 * columns, world, pattern)
    slots, buffer = slots_offset(shape.num_flags(config)), shape.buffer_bytes(config)
    received, raised, read = [], [], []
    for rank in range(world):
        for puts in tile_puts(config, shape, rank, slots, buffer):
            assert puts.piece % 16 == 0 and puts.ranks <= world
            for number, at, nbytes in pieces(puts):
                assert nbytes == puts.piece, "whole tiles, or units of them"
                received.append((puts.target + at, nbytes))
                raised.append((puts.flag + number) * world + rank)
                for to in range(puts.ranks):
                    assert puts.staged + puts.staged_pitch * to + FLAG_BYTES * number * world < slots
                    if rank == 0 and to:
                        read.append((puts.source + puts.source_pitch * to + at, nbytes))
    assert not overlapping(received) and len(set(raised)) == len(raised)
    assert all(at >= 0 and at + nbytes <= buffer for at, nbytes in received)
    assert all(flag < shape.num_flags(config) for flag in raised)
    if pattern == "reduce_scatter":  # staging, where nobody puts to
        assert not overlapping(read)
        assert all(SLOT_BUFFERS * buffer <= at < SLOT_BUFFERS * buffer + buffer for at, _ in read)


@given(st.integers(1, 500), st.integers(1, 400), st.integers(2, 9))
def test_puts_of_shards_are_the_gather_buffer(rows, chunks, world):
    row_bytes, shard = 16 * chunks, -(-rows // world)
    received = []
    for rank in range(world):
        own = max(min(rows - rank * shard, shard), 0) * row_bytes
        (puts,) = shard_puts(rank, world, shard * row_bytes, own)
        assert len(pieces(puts)) <= SHARD_PIECES
        received += [(puts.target + at, nbytes) for _, at, nbytes in pieces(puts)]
    assert not overlapping(received)
    assert sum(nbytes for _, nbytes in received) == rows * row_bytes


def test_small_tiles_are_sent_as_words_by_themselves():
    sent = {
        tile: GemmConfig("sm_90a", tile, mma="swap_ab").sends_ll
        for tile in ARCHS["sm_90a"].mma["swap_ab"].tiles
    }
    assert sent == {(16, 64): True, (32, 64): True, (64, 64): True, (128, 64): False}
    assert not GemmConfig("sm_90a", (64, 128), mma="pingpong").sends_ll


def legal(base, **fields):
    """The configuration with other fields, or None if no kernel exists for it."""
    try:
        return replace(base, **fields)
    except ValueError:
        return None


def test_a_legal_configuration_has_room_for_all_that_a_kernel_has():
    """Also for rings of many stages, whose barriers take room, and for what is no stage."""
    found = 0
    for base in EVERY_TILE:
        for stages in range(2, 64):
            for k_split in (1, 2, 4):
                if (config := legal(base, ring_stages=stages, inflight=1, k_split=k_split)) is not None:
                    found += 1
                    assert config.smem_bytes <= config.on.smem_bytes, config
    assert found > 500
    with pytest.raises(ValueError, match="bytes of barriers; there is room for 2048"):
        GemmConfig(arch="sm_90a", mma="swap_ab", tile=(16, 64), ring_stages=60)
