"""Scales of blocks where shards, tiles and memory do not begin with a block, or with 16 bytes."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.scales.scale_layouts import PaddedScaleRows
from overlap_gemm.backends.scales.tma_operands import widened
from overlap_gemm.testing.emulated import joined_results, poisoned_allocations
from tests.support.emulated.op_runs import world_of
from tests.support.emulated.scaled_cases import AR, RS, Scaled, check, dequantised, queue, share_of_bound

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
        monkeypatch.setattr(PaddedScaleRows, "of_a", lambda self, scale, shape, step=None: widened(scale.t()))
        outs = queue(case, world)
        world.synchronize()
        assert share_of_bound(case, outs) > 1


@pytest.mark.parametrize("op", [RS, pytest.param(AR, marks=pytest.mark.slow)])
def test_k_of_a_rank_may_be_several_blocks_or_one_or_none(op):
    """By the same kernel on every rank; the rank without any K sends zeros."""
    cases = [Scaled(op, 70, 136, 3 * depth, bias=False, blocks=128, seed=depth) for depth in (272, 96, 0)]
    parts = [case.operands(rank, 3) for rank, case in enumerate(cases)]
    with world_of("sm_90a", 3, FIELDS, mode="random") as world, poisoned_allocations():
        outs = [
            getattr(overlap_gemm, op)(
                x, weight, group=name, scale_x=scale_x, scale_w=scale_w, block=128, backend="fused",
                deterministic=False,
            )
            for name, (x, weight, _, scale_x, scale_w) in zip(world.names, parts, strict=True)
        ]  # fmt: skip
        world.synchronize()
    exact = rounded = torch.zeros((), dtype=torch.float64)
    for x, weight, _, scale_x, scale_w in parts:
        partial = dequantised(x, scale_x, 128) @ dequantised(weight, scale_w, 128).t()
        exact, rounded = exact + partial, rounded + partial.abs()
    found = joined_results(outs, 0 if op == RS else None).double()
    assert bool(((found - exact).abs() <= 2.0**-8 * (rounded + exact.abs()) + 1e-3).all())
