"""Kernels whose MMA takes the weight's features as its rows (`mma="swapped"`), for few tokens."""

import pytest

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.send import Parcel

from .op_runs import run

TILES = [(16, 64), (32, 64), (64, 64), (128, 64)]
SENDERS = {
    "one_shot": ("gemm_all_reduce", {"algorithm": "one_shot"}),
    "two_shot": ("gemm_all_reduce", {"algorithm": "two_shot"}),
    "reduce_scatter": ("gemm_reduce_scatter", {}),
    "output_gather": ("gemm_all_gather", {}),
    "all_gather": ("all_gather_gemm", {}),
}
QUICK = [
    ("one_shot", 2, 1, (16, 64)),
    ("one_shot", 3, 40, (32, 64)),
    ("output_gather", 3, 17, (16, 64)),
    ("reduce_scatter", 2, 130, (64, 64)),
]
SWEEP = [
    (sender, world, rows, TILES[(world + rows) % len(TILES)])
    for sender in SENDERS
    for world in (1, 2, 3, 4, 8)
    for rows in (1, 7, 16, 17, 40, 64, 130)
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sender", "world", "rows", "tile"),
    [*QUICK, *(pytest.param(*way, marks=pytest.mark.slow) for way in SWEEP if way not in QUICK)],
    ids=str,
)
def test_every_world_and_few_rows(sender, world, rows, tile):
    """N and K are no multiples of a tile and of a stage; two launches, on changing data."""
    op, fields = SENDERS[sender]
    columns = 72 * world if sender == "output_gather" else 136
    sizes = rows, columns, 104
    run(op, "sm_90a", world, sizes, {"mma": "swapped", "tile": tile}, launches=2, mode="lazy", **fields)


def test_rows_that_do_not_exist_are_not_sent():
    """A tile's rows by whole units, of four rows here; a tile behind all rows sends nothing."""
    config = GemmConfig("sm_90a", (16, 64), mma="swapped")
    sent = [Parcel(None, rows).num_bytes(config, 0) for rows in (-16, 0, 1, 4, 5, 16, 100)]
    assert sent == [-2048, 0, 512, 512, 1024, 2048, 2048]
