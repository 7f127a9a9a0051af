"""Epilogues of 8-bit operands with scales, in kernels on virtual ranks: they act on the scaled fp32 sums."""

import pytest
import torch

from overlap_gemm import epilogue, epilogues
from overlap_gemm.backends.fused import compiled
from overlap_gemm.device import result_scales
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.runtime.compile_cache import CompileCache
from tests.support.emulated.epilogue_cases import (
    AR,
    RS,
    STREAM,
    Called,
    errors_of_blocks,
    gated,
    refuse,
    worst,
)
from tests.support.emulated.op_runs import world_of
from tests.support.emulated.scaled_cases import A2A, AG, DUAL, GATHER


@epilogue(inputs={"rstd": "rows", "gamma": "columns"}, of="partial")
def of_partial(x, rstd, gamma):
    return epilogues.relu(x * rstd * gamma)


CASES = [
    pytest.param(
        "sm_90a", 2, GATHER, "rows", gated, (70, 144, 80), {"has_bias": True}, marks=pytest.mark.slow
    ),
    pytest.param(
        "sm_100a", 1, GATHER, "rows", epilogues.swiglu_e4m3, (70, 192, 80), {}, marks=pytest.mark.slow
    ),
    ("sm_90a", 2, GATHER, 128, epilogues.swiglu, (70, 256, 272), {}),
    ("sm_100a", 2, GATHER, "rows", epilogues.swiglu, (70, 384, 80), {"two_weights": "up-first"}),
    ("sm_100a", 2, RS, "rows", STREAM, (70, 144, 80), {}),
    pytest.param("sm_90a", 1, RS, 128, gated, (70, 144, 272), {"has_bias": True}, marks=pytest.mark.slow),
    pytest.param("sm_90a", 2, RS, 32, gated, (70, 144, 80), {}, marks=pytest.mark.slow),
    ("sm_100a", 2, RS, "mx", gated, (70, 144, 160), {"has_bias": True}),
    ("sm_90a", 2, AR, "rows", epilogues.to_e4m3, (70, 144, 80), {}),
    pytest.param("sm_90a", 2, AG, "rows", gated, (70, 192, 80), {}, marks=pytest.mark.slow),
    pytest.param("sm_90a", 2, A2A, "rows", gated, (70, 288, 80), {}, marks=pytest.mark.slow),
    ("sm_90a", 2, DUAL, 128, gated, (70, 144, 512), {}),
]


@pytest.mark.parametrize(
    ("arch", "world", "op", "scales", "one", "sizes", "how"), CASES,
    ids=lambda one: getattr(one, "name", str(one)),
)  # fmt: skip
def test_kernels_apply_epilogues_to_scaled_sums(arch, world, op, scales, one, sizes, how):
    """Compares with float64; what takes the place of an epilogue that no kernel applies raises here."""
    fields = {"mma": "1cta", "tile": (128, 128), "cluster": (1, 1)} if scales == "mx" else None
    with world_of(arch, world, fields) as ranks:
        assert worst(Called(op, world, one, sizes, scales=scales, otherwise=refuse, **how), ranks) <= 1


def test_an_epilogue_of_partial_sums_precedes_the_sum_over_ranks():
    """Checks that the function acts on each rank's scaled sums; inputs are those of its product."""
    alone = [Called(RS, 1, of_partial, (70, 144, 80), seed=seed, scales="rows") for seed in range(2)]
    with world_of("sm_90a", 2) as ranks:
        outs = [case.call(0, name) for case, name in zip(alone, ranks.names, strict=True)]
        ranks.synchronize()
    parts = [case.exact[0][0] for case in alone]
    bound = sum(case.bounds[0][0] for case in alone)
    assert ((torch.cat(outs).double() - sum(parts)).abs() <= bound + 2**-8 * sum(parts).abs()).all()


@pytest.mark.slow
def test_an_epilogue_before_the_scales_is_noticed(monkeypatch):
    visitors = Visits._visitors
    monkeypatch.setattr(Visits, "_visitors", lambda self, extras: visitors(self, extras)[::-1])
    monkeypatch.setattr(compiled, "_cache", lambda on_disk: CompileCache(folder=None))
    with world_of("sm_90a", 2) as ranks:
        assert worst(Called(GATHER, 2, gated, (70, 144, 80), scales="rows"), ranks) > 1


WIDE = {"tile": (128, 256), "mma": "cooperative"}, {"tile": (128, 256), "mma": "1cta"}
TALL = {"tile": (256, 128), "mma": "2cta", "cluster": (2, 1)}
BLOCKS = [
    ("sm_90a", 2, epilogues.to_e4m3_blocks, (70, 512, 80), None, {}),
    pytest.param("sm_90a", 1, epilogues.swiglu_e4m3_blocks, (66, 256, 80), None, {}, marks=pytest.mark.slow),
    ("sm_90a", 1, epilogues.swiglu_e4m3_blocks, (70, 512, 80), None, WIDE[0]),
    ("sm_100a", 2, epilogues.swiglu_e4m3_blocks, (71, 1024, 80), "rows", WIDE[1]),
    ("sm_100a", 1, epilogues.to_e4m3_blocks, (300, 256, 80), None, TALL),
]


@pytest.mark.parametrize(("arch", "world", "one", "sizes", "scales", "fields"), BLOCKS,
    ids=lambda one: getattr(one, "name", str(one)),
)  # fmt: skip
def test_scales_of_blocks_of_8_bit_results(arch, world, one, sizes, scales, fields):
    """Checks ragged rows and shards; the result is an operand of a product with `block=128`."""
    order = "" if fields else "up-first" * one.pairs
    with world_of(arch, world, {"cluster": (1, 1), **fields}) as ranks:
        case = Called(GATHER, world, one, sizes, scales=scales, otherwise=refuse, two_weights=order)
        assert errors_of_blocks(case, ranks) <= 1


@pytest.mark.slow
def test_a_scale_of_one_lanes_columns_is_noticed(monkeypatch):
    monkeypatch.setattr(result_scales, "BLOCK", 32)
    monkeypatch.setattr(compiled, "_cache", lambda on_disk: CompileCache(folder=None))
    with world_of("sm_90a", 1, {"tile": (64, 128), "mma": "pingpong", "cluster": (1, 1)}) as ranks:
        assert errors_of_blocks(Called(GATHER, 1, epilogues.to_e4m3_blocks, (70, 128, 80)), ranks) > 1
