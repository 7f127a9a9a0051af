"""Tile orders and ownership on Python integers: the same code runs in the kernel on Int32."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_gemm.schedules import (
    LinearOrder,
    RotatedShards,
    TileGrid,
    num_owners,
    owned_rows,
    shard_rows,
)
from overlap_gemm.schedules.orders import grouped_raster

grids = st.builds(TileGrid, st.integers(1, 12), st.integers(1, 12))
groups = st.integers(1, 5)


@given(rows=st.integers(1, 300), world=st.integers(1, 12))
def test_ownership_is_torch_chunk(rows, world):
    chunks = [len(c) for c in torch.arange(rows).chunk(world)]
    assert [owned_rows(rows, shard_rows(rows, world), r) for r in range(world)] == chunks + [0] * (
        world - len(chunks)
    )
    assert num_owners(rows, shard_rows(rows, world)) == len(chunks)
    assert shard_rows(rows, world) == chunks[0]


@given(grid=grids, group=groups)
def test_raster_visits_every_tile_once(grid, group):
    visited = [grouped_raster(i, grid, group) for i in range(grid.rows * grid.cols)]
    assert sorted(visited) == [(m, n) for m in range(grid.rows) for n in range(grid.cols)]


@given(grid=grids, group=groups)
def test_raster_bands_bound_the_working_set(grid, group):
    wave = group * 2
    for begin in range(0, grid.rows * grid.cols, wave):
        tiles = [
            grouped_raster(i, grid, group) for i in range(begin, min(begin + wave, grid.rows * grid.cols))
        ]
        bands = {m // group for m, _ in tiles}
        assert len(bands) <= 2 or grid.cols < 2 or grid.rows % group


@given(grid=grids, group=groups)
def test_linear_order_is_all_own(grid, group):
    order = LinearOrder(group)
    assert order.num_foreign(grid, 0, 1) == 0
    places = [order.place(t, grid, 0, 1) for t in range(order.num_tiles(grid, 0, 1))]
    assert len({(p.m, p.n) for p in places}) == grid.rows * grid.cols == len(places)
    assert {p.shard for p in places} == {0}


@given(grid=grids, group=groups, world=st.integers(1, 9), data=st.data())
def test_rotated_order(grid, group, world, data):
    owners = data.draw(st.integers(1, world))
    order, per_shard = RotatedShards(group), grid.rows * grid.cols
    for rank in range(world):
        total, foreign = order.num_tiles(grid, rank, owners), order.num_foreign(grid, rank, owners)
        places = [order.place(t, grid, rank, owners) for t in range(total)]
        assert Counter(p.shard for p in places) == dict.fromkeys(range(owners), per_shard)
        assert len(set(places)) == total, "every tile once"
        assert all(p.shard != rank for p in places[:foreign])
        assert all(p.shard == rank for p in places[foreign:]), "own tiles last"
        assert total - foreign == (per_shard if rank < owners else 0)


@given(grid=grids, world=st.integers(2, 9))
def test_each_owner_receives_from_one_source_per_step(grid, world):
    order = RotatedShards()
    for t in range(order.num_foreign(grid, 0, world)):
        owners = [order.place(t, grid, rank, world).shard for rank in range(world)]
        assert sorted(owners) == list(range(world))


@given(grid=grids, world=st.integers(2, 6))
def test_a_tile_has_the_same_index_on_every_rank(grid, world):
    order = RotatedShards()
    named = {
        (p.shard, p.index, p.m, p.n)
        for rank in range(world)
        for p in (order.place(t, grid, rank, world) for t in range(order.num_tiles(grid, rank, world)))
    }
    assert len(named) == world * grid.rows * grid.cols
