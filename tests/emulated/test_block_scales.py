"""Scales of blocks where shards, tiles and memory do not begin with a block, or with 16 bytes."""

import pytest

from overlap_gemm.backends.block_scales import Lines
from overlap_gemm.backends.operands import widened

from .op_runs import world_of
from .test_scaled_ops import AR, RS, Scaled, check, queue, share_of_bound

FIELDS = {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 1)}


@pytest.mark.parametrize("n", [264, pytest.param(384, marks=pytest.mark.slow)])
def test_owners_of_columns_begin_with_a_block(n):
    """A two-shot's second rank owns columns from 256 on, not from 192, the middle of a block."""
    with world_of("sm_90a", 2, FIELDS, algorithm="two_shot") as world:
        check(Scaled(AR, 20, n, 2 * 144, blocks=128), world)


@pytest.mark.parametrize("size", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_lines_begin_anew_with_an_owners_rows(size, monkeypatch):
    """Shards of 5 rows, 20 bytes. Were lines not filled up to 16 bytes, boxes would begin elsewhere."""
    case = Scaled(RS, 13, 136, 3 * (size + 17), blocks=size)
    with world_of("sm_90a", 3, FIELDS) as world:
        check(case, world)
        monkeypatch.setattr(Lines, "of_a", lambda self, scale, shape, step=None: widened(scale.t()))
        outs = queue(case, world)
        world.synchronize()
        assert share_of_bound(case, outs) > 1
