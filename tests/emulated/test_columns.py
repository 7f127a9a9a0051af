"""Columns beyond a shard's end do not travel: what ranks store at others, and in slots, is counted.

288 columns in tiles of 128 are two and a quarter of them. What a subtile of the last tile has no column of is
not sent, by whatever transport; of a subtile that has some, all columns are.
"""

import pytest
import torch

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.exchange.send import Destination
from overlap_gemm.runtime.memory import workspace
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from tests.support.emulated.op_runs import SMALL, world_of

ROWS, COLUMNS, DEPTH, RANKS = 128, 288, 64, 2
POISON = 0x5A
WAYS = {
    "scatter": ("gemm_reduce_scatter", "reduce_scatter", None),
    "one-shot": ("gemm_all_reduce", "one_shot", "one_shot"),
    "two-shot": ("gemm_all_reduce", "two_shot", "two_shot"),
    "gather": ("gemm_all_gather", "output_gather", None),
}
WIDE = {
    "sm_100a": {"mma": "1cta", "tile": (128, 128), "cluster": (1, 2)},
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 2)},
}
KERNELS = [(arch, fields) for kinds in (SMALL, WIDE) for arch, fields in kinds.items()]
EVERY = [
    (way, kernel, transport)
    for kernel in range(len(KERNELS))
    for way in WAYS
    for transport in ("peer_bulk", "ll", "nvshmem")
]
QUICK = [
    ("gather", 1, "peer_bulk"),
    ("scatter", 0, "peer_bulk"),
    ("one-shot", 3, "ll"),
    ("two-shot", 2, "peer_bulk"),
]


def whole(config, columns):
    """Columns of the subtiles that have any of these."""
    wide = config.epi_tile[1]
    return -(-columns // wide) * wide


def expected(config, shape, rank):
    """(bytes that a rank sends to the other one, bytes that lie in its slots at the end)."""
    own, other = (min(max(shape.cols - r * shape.shard, 0), shape.shard) for r in (rank, 1 - rank))
    wide = whole(config, shape.cols)
    elements = {
        "reduce_scatter": (ROWS * wide, RANKS * ROWS * wide),
        "one_shot": (ROWS * wide, RANKS * ROWS * wide),
        "two_shot": (ROWS * (other + own), ROWS * (RANKS * own + other)),
        "output_gather": (ROWS * whole(config, own), ROWS * whole(config, other)),
    }[shape.pattern]
    return [2 * number for number in elements]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "kernel", "transport"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY if each not in QUICK)],
)
def test_columns_that_do_not_exist_are_neither_sent_nor_received(way, kernel, transport):
    """The second call's results are right over poisoned slots, of which it fills those places alone."""
    (op, pattern, algorithm), (arch, fields) = WAYS[way], KERNELS[kernel]
    columns = COLUMNS * (RANKS if pattern in ("two_shot", "output_gather") else 1)
    rows = ROWS * (RANKS if pattern == "reduce_scatter" else 1)
    case, config = Case(op, rows, columns, DEPTH, torch.bfloat16), GemmConfig(arch=arch, **fields)
    shape = ExchangeShape.even(rows, columns, RANKS, pattern)
    with world_of(arch, RANKS, fields, algorithm=algorithm, transport=transport) as world:
        list(run_launches(case, world, 1))
        emulator, spaces = world.executor(0).emulator, workspace.workspaces()
        slots = [
            space.memory.local[space.size.zeroed :][: 2 * space.size.buffer].view(torch.uint8)
            for space in spaces
        ]
        if transport != "ll":
            for buffer in slots:
                buffer.fill_(POISON)
        emulator.report.sent.clear()
        [(given, outs)] = run_launches(case.with_seed(1), world, 1)
        verdict = judge(case, given, outs, case.dtype)
        assert verdict.holds, verdict
        sent = dict(emulator.report.sent)
        filled = [16 * int((buffer.view(-1, 16) != POISON).any(1).sum()) for buffer in slots]
        ranks = [space.group.rank for space in spaces]
    flags = 8 * (shape.num_flags(config) + 1)
    for rank in range(RANKS):
        nbytes, lying = expected(config, shape, rank)
        # with flags; of words each rank is sent its own, too, and puts leave the own tiles in slots as well
        assert 0 <= sent[rank, 1 - rank] - nbytes <= flags
        if transport == "peer_bulk":
            assert filled[ranks.index(rank)] == lying


def test_a_subtile_is_sent_if_it_has_a_column():
    """Two subtiles of 64 columns, of 64 rows in two units."""
    config = GemmConfig("sm_90a", (64, 128), mma="pingpong")
    sent = {
        columns: [max(0, Destination(None, None, 32, columns).num_bytes(config, s)) for s in (0, 1)]
        for columns in (-8, 0, 8, 64, 72, 128)
    }
    assert sent == {-8: [0, 0], 0: [0, 0], 8: [4096, 0], 64: [4096, 0], 72: [4096, 4096], 128: [4096, 4096]}


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (200, 200, 32768),
        (128, 64, 8192 * 3),
        (64, 72, 16384),
        (32, 8, 4096),
        (33, 8, 8192),
        (0, 8, 0),
        (8, -8, 0),
    ],
)
def test_what_is_put_ends_with_the_last_subtile_that_is_sent(rows, columns, nbytes):
    """Two by two subtiles of 8 KiB; what lies between them is put with them."""
    config = GemmConfig("sm_90a", (128, 128), mma="pingpong")
    assert max(0, Destination(None, None, rows, columns).put_bytes(config)) == nbytes
