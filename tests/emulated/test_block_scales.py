"""Scales of blocks where shards, tiles and memory do not begin with a block, or with 16 bytes."""

import pytest

from .op_runs import world_of
from .test_scaled_ops import AR, Scaled, check

FIELDS = {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 1)}


@pytest.mark.parametrize("n", [264, pytest.param(384, marks=pytest.mark.slow)])
def test_owners_of_columns_begin_with_a_block(n):
    """A two-shot's second rank owns columns from 256 on, not from 192, the middle of a block."""
    with world_of("sm_90a", 2, FIELDS, algorithm="two_shot") as world:
        check(Scaled(AR, 20, n, 2 * 144, blocks=128), world)
