import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from overlap_gemm.spec.sharding import Shards


@given(total=st.integers(0, 200), parts=st.integers(1, 17))
def test_shards_are_those_of_torch_chunk(total, parts):
    chunks = [len(chunk) for chunk in torch.empty(total).chunk(parts)] if total else []
    assert Shards.even(total, parts).sizes == chunks + [0] * (parts - len(chunks))


@given(total=st.integers(0, 60), parts=st.integers(1, 9), unit=st.integers(1, 7))
def test_shards_cover_every_row_once_in_whole_units(total, parts, unit):
    shards = Shards.even(total * unit, parts, unit)
    rows = [row for rank in range(parts) for row in range(*shards.range(rank))]
    assert rows == list(range(total * unit))
    assert all(size % unit == 0 for size in shards.sizes)


@pytest.mark.parametrize("total", range(12))
def test_shards_are_those_of_dtensor(total):
    for parts in range(1, 6):
        found = [Shard.local_shard_size_and_offset(total, parts, rank)[0] for rank in range(parts)]
        assert Shards.even(total, parts).sizes == found
