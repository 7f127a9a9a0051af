"""Tile orders and ownership on Python integers: the same code runs in the kernel on Int32."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_gemm.config.orders import (
    InterleavedShards,
    LinearOrder,
    TileGrid,
    WorkList,
    grouped_raster,
)
from overlap_gemm.spec.sharding import Shards, num_owners, shard_rows

grids = st.builds(TileGrid, st.integers(1, 12), st.integers(1, 12))
groups = st.integers(1, 5)


@given(rows=st.integers(1, 300), world=st.integers(1, 12))
def test_ownership_is_torch_chunk(rows, world):
    chunks = [len(c) for c in torch.arange(rows).chunk(world)]
    shards = Shards(rows, world, shard_rows(rows, world))
    assert shards.sizes == chunks + [0] * (world - len(chunks))
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
def test_linear_order_visits_every_tile_once(grid, group):
    order, work = LinearOrder(group), WorkList(grid, 0, 1)
    places = [order.place(t, work) for t in range(order.num_tiles(work))]
    assert len({(p.m, p.n) for p in places}) == grid.rows * grid.cols == len(places)
    assert {p.shard for p in places} == {0}


@st.composite
def work_lists(draw):
    """The lists of all ranks of one call."""
    world = draw(st.integers(1, 9))
    owners, grid = draw(st.integers(1, world)), draw(grids)
    return [WorkList(grid, rank, owners) for rank in range(world)]


def places_of(order, work):
    return [order.place(t, work) for t in range(order.num_tiles(work))]


@given(works=work_lists(), group=groups)
def test_every_tile_of_every_owner_is_dealt_once(works, group):
    order = InterleavedShards(group)
    for work in works:
        places = places_of(order, work)
        per_shard = work.grid.rows * work.grid.cols
        assert len(set(places)) == len(places) == work.owners * per_shard
        assert Counter(p.shard for p in places) == dict.fromkeys(range(work.owners), per_shard)
        assert all((p.m, p.n) == order.tile(p.index, work) for p in places)
        assert all(0 <= p.m < work.grid.rows and 0 <= p.n < work.grid.cols for p in places)


@given(works=work_lists())
def test_a_tile_has_the_same_index_on_every_rank(works):
    order = InterleavedShards()
    named = {place for work in works for place in places_of(order, work)}
    assert len(named) == works[0].owners * works[0].grid.rows * works[0].grid.cols


@given(works=work_lists())
def test_no_two_ranks_send_to_one_owner_at_once(works):
    order = InterleavedShards()
    owners = [work for work in works if work.rank < work.owners]
    for shards in zip(*([p.shard for p in places_of(order, work)] for work in owners), strict=True):
        assert sorted(shards) == list(range(len(owners)))


@given(works=work_lists())
def test_the_link_is_asked_evenly(works):
    """Any turn holds one tile for each owner."""
    for work in works:
        places = places_of(InterleavedShards(), work)
        for turn in range(0, len(places), work.owners):
            assert len({p.shard for p in places[turn : turn + work.owners]}) == work.owners


@given(works=work_lists(), group=groups)
def test_indices_of_an_owner_come_in_order(works, group):
    """The receive role takes an owner's tiles by index: so they should arrive."""
    for work in works:
        indices = {}
        for place in places_of(InterleavedShards(group), work):
            assert place.index == indices.get(place.shard, -1) + 1
            indices[place.shard] = place.index
