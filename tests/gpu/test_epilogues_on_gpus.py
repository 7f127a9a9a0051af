"""Epilogues on virtual ranks of one GPU: the cases of the emulator, many times."""

import pytest

from overlap_gemm import epilogues
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.emulated.epilogue_cases import Called, gated, worst
from tests.support.ops import SHARDED

SIZES = {"few-rows": (16, 1024, 512), "even": (1024, 1024, 512), "ragged": (1000, 1088, 520)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", SHARDED)
def test_inputs_of_every_kind(device, op, sizes, ranks):
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(8):
            assert worst(Called(op, ranks, gated, SIZES[sizes], seed, device), world) <= 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_row_statistics(device, op, sizes, ranks):
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(8):
            case = Called(op, ranks, epilogues.add_residual_squared, SIZES[sizes], seed, device)
            assert worst(case, world) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pairs_of_columns(device, ranks):
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(8):
            case = Called("all_gather_gemm", ranks, epilogues.swiglu, (1000, 1024, 520), seed, device)
            assert worst(case, world) <= 1
