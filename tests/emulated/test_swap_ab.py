"""Kernels whose MMA takes the weight's features as its rows (`mma="swap_ab"`), for few tokens."""

import pytest

from overlap_gemm.config.arch import ARCHS
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.rules import K_SPLITS, may_split
from overlap_gemm.exchange.send import Destination
from tests.support.chosen import in_turn
from tests.support.emulated.op_runs import SMALL, run

SENDERS = {
    "one_shot": ("gemm_all_reduce", {"algorithm": "one_shot"}),
    "two_shot": ("gemm_all_reduce", {"algorithm": "two_shot"}),
    "reduce_scatter": ("gemm_reduce_scatter", {}),
    "output_gather": ("gemm_all_gather", {}),
    "all_gather": ("all_gather_gemm", {}),
}
QUICK = [
    ("one_shot", 2, 1, (16, 64), 4),
    ("output_gather", 3, 17, (32, 64), 1),
    ("all_gather", 4, 40, (16, 64), 2),
]
SWEEP = [
    ("one_shot", 3, 40, (32, 64), 1),
    ("output_gather", 2, 70, (64, 64), 2),
    ("reduce_scatter", 2, 130, (64, 64), 1),
]
SWEEP += [
    (sender, world, rows, tile, K_SPLITS[rows % 3] if may_split("swap_ab", tile) else 1)
    for sender in SENDERS
    for world in (1, 2, 3, 4, 8)
    for rows in (1, 7, 16, 17, 40, 64, 130)
    for tile in [ARCHS["sm_90a"].mma["swap_ab"].tiles[(world + rows) % 4]]
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sender", "world", "rows", "tile", "split", "arch"),
    [
        *in_turn(QUICK, SMALL),
        *(
            pytest.param(*way, arch, marks=pytest.mark.slow)
            for way in SWEEP
            if way not in QUICK
            for arch in SMALL
        ),
    ],
    ids=str,
)
def test_every_world_and_few_rows(arch, sender, world, rows, tile, split):
    """N and K are no multiples of a tile and of a stage; two launches, on changing data."""
    op, fields = SENDERS[sender]
    columns = 72 * world if sender == "output_gather" else 136
    depth = 104 if sender in ("all_gather", "output_gather") else 104 * world
    kernel = {"mma": "swap_ab", "tile": tile, "k_split": split}
    run(op, arch, world, (rows, columns, depth), kernel, launches=2, mode="lazy", num_sms=8, **fields)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("split", "depth"),
    [(2, 72), *(pytest.param(*way, marks=pytest.mark.slow) for way in ((4, 8), (2, 328), (4, 328)))],
)
def test_parts_of_k_take_turns(arch, split, depth):
    """A CTA sums several tiles, in turns; K is less than the parts, or no multiple of them."""
    kernel = {"mma": "swap_ab", "tile": (16, 64), "k_split": split}
    run("gemm_all_reduce", arch, 1, (40, 136, depth), kernel, mode="random", seed=depth, num_sms=split)


def test_rows_that_do_not_exist_are_not_sent():
    """A tile's rows by whole units, of four rows here; a tile after all rows sends nothing."""
    config = GemmConfig("sm_90a", (16, 64), mma="swap_ab")
    sent = [Destination(None, None, rows, 64).num_bytes(config, 0) for rows in (-16, 0, 1, 4, 5, 16, 100)]
    assert sent == [-2048, 0, 512, 512, 1024, 2048, 2048]
