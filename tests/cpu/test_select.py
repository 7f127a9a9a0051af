import pytest
import torch

from overlap_gemm.backends.base import OPS, Problem
from overlap_gemm.backends.decomposed import LEAST_CHUNK_ROWS
from overlap_gemm.backends.select import choose


def problem(op="gemm_reduce_scatter", rows=4096, world_size=4) -> Problem:
    return Problem(op, rows, 1024, torch.bfloat16, "cpu", world_size)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 8])
def test_auto_cuts_long_operands_only(op, world_size):
    enough = LEAST_CHUNK_ROWS * world_size
    assert choose(problem(op, enough, world_size)).backend.name == "decomposed"
    assert choose(problem(op, enough - 1, world_size)).backend.name == "sequential"


def test_the_choice_says_why():
    printed = str(choose(problem(rows=16)))
    assert "runs as 'sequential'" in printed
    assert f"chunks of 4 rows would be slower than one GEMM: under {LEAST_CHUNK_ROWS} rows" in printed
    assert "fused: no, " in printed


def test_what_is_asked_for_is_not_second_guessed():
    assert choose(problem(rows=16), "decomposed").backend.name == "decomposed"


def test_one_rank_overlaps_nothing():
    assert choose(problem(world_size=1)).backend.name == "sequential"
