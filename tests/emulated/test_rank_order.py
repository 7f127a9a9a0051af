"""Sums over the ranks are taken in rank order: values of which every other order leaves something else.

A reversed order changes a rounding here and there, which a tolerance, and 99 of 100 equal elements, let pass.
"""

import pytest
import torch

import overlap_gemm
from tests.support.emulated.op_runs import world_of

HUGE = 2.0**30
"""In float32 it swallows a 1 that is added to it."""
SUMS = {(HUGE, -HUGE, 1.0): 1.0, (1.0, HUGE, -HUGE): 0.0, (-HUGE, 1.0, HUGE): 0.0}
"""The partial sums of three ranks, and their sum in rank order; the first two are each other's opposite."""
FEW_ROWS = {"mma": "swap_ab", "tile": (16, 64)}


@pytest.mark.parametrize(
    ("arch", "op", "algorithm", "fields"),
    [
        ("sm_90a", "gemm_reduce_scatter", None, None),
        ("sm_90a", "gemm_all_reduce", "two_shot", None),
        ("sm_90a", "gemm_all_reduce", "one_shot", FEW_ROWS),
        pytest.param("sm_100a", "gemm_reduce_scatter", None, None, marks=pytest.mark.slow),
        *(
            pytest.param("sm_100a", "gemm_all_reduce", way, fields, marks=pytest.mark.slow)
            for way, fields in (("two_shot", None), ("one_shot", FEW_ROWS))
        ),
    ],
)
def test_sums_are_taken_in_rank_order(arch, op, algorithm, fields):
    rows, columns, depth = (16, 64, 64) if fields else (192, 72, 64)
    with world_of(arch, 3, fields, algorithm=algorithm) as world:
        queued = []
        for partials in SUMS:
            x, weight = torch.zeros(rows, depth), torch.zeros(columns, depth)
            x[:, 0] = 1
            outs = []
            for partial, group in zip(partials, world.names, strict=True):
                weight[:, 0] = partial
                operands = x.bfloat16(), weight.bfloat16()
                outs.append(getattr(overlap_gemm, op)(*operands, group=group, backend="fused"))
            queued.append(outs)
        world.synchronize()
        for wanted, outs in zip(SUMS.values(), queued, strict=True):
            for rank, out in enumerate(outs):
                assert (out == wanted).all(), (rank, wanted, out.unique())
