"""What is legal, what fits, and where things lie in a workspace: no DSL, no GPU."""

import itertools

import pytest

from overlap_gemm.kernels.config import CLUSTERS, MMA_KINDS, SMEM_BYTES, TILES, GemmConfig
from overlap_gemm.kernels.geometry import (
    CONTROL_BYTES,
    FLAG_BYTES,
    ExchangeShape,
    slots_offset,
    staged_flags_offset,
    workspace_bytes,
)
from overlap_gemm.pipelines.publication import LaggedPublication

EVERY_TILE = [
    GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster)
    for arch in ("sm_90a", "sm_100a")
    for mma in MMA_KINDS[arch]
    for tile in TILES[mma]
    for cluster in CLUSTERS[mma]
]


@pytest.mark.parametrize("config", EVERY_TILE, ids=lambda c: c.name)
def test_every_legal_configuration_fits(config):
    assert config.ab_stages >= 2
    used = config.ab_stages * config.ab_stage_bytes + config.ring_stages * config.stage_bytes
    assert used <= SMEM_BYTES
    assert used + config.ab_stage_bytes > SMEM_BYTES - 1024, "shared memory left over for another stage"
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
        ({"arch": "sm_90a", "mma": "swapped", "tile": (16, 64), "slot_dtype": "f32"}, "swapped.*f32"),
        ({"arch": "sm_90a", "mma": "swapped", "tile": (128, 64), "k_split": 2}, "k_split.*128"),
        ({"k_split": 2}, "k_split"),
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
        staged = staged_flags_offset(slots)
        assert staged >= CONTROL_BYTES + FLAG_BYTES * flags
        assert slots >= staged + FLAG_BYTES * flags
        assert staged % FLAG_BYTES == 0 and slots % 1024 == 0
        assert workspace_bytes(flags, 4096) == slots + 2 * 4096
        assert workspace_bytes(flags, 4096, staging=True) == slots + 4 * 4096


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
