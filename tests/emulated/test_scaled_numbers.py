"""8-bit operands: long sums, and scales that are NaN or zero."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.testing.emulated import joined_results
from tests.support.emulated.op_runs import world_of
from tests.support.emulated.scaled_cases import ACCUMULATION, GATHER, RS, Scaled, queue


def long_sum(fast_accum):
    """Positive products over K = 28672 on two ranks; what of their sum is lost, as a share."""
    torch.manual_seed(0)
    x, weight = (torch.rand(16, 28672).add(0.5).to(torch.float8_e4m3fn) for _ in range(2))
    scales = {"scale_x": torch.rand(16, 1) + 0.5, "scale_w": torch.rand(16, 1) + 0.5}
    fields = {"mma": "swap_ab", "tile": (16, 64), "cluster": (1, 1), "k_split": 1}
    halves = [slice(0, 14336), slice(14336, 28672)]
    with world_of("sm_90a", 2, {**fields, "fast_accum": fast_accum}) as world:
        outs = [
            overlap_gemm.gemm_all_reduce(
                x[:, half].contiguous(), weight[:, half].contiguous(), group=name, backend="fused", **scales
            )
            for name, half in zip(world.names, halves, strict=True)
        ]
        world.synchronize()
    exact = (x.double() * scales["scale_x"]) @ (weight.double() * scales["scale_w"]).t()
    return float((1 - outs[0].double() / exact).abs().max())


def test_long_sums_are_right_because_they_are_promoted():
    assert long_sum(fast_accum=False) < 2 * 2**-8 + ACCUMULATION
    assert long_sum(fast_accum=True) > 0.1


SPECIAL = [Scaled(RS, 70, 72, 96, bias=False), Scaled(GATHER, 70, 64, 48, bias=False)]
SPECIAL.append(Scaled(RS, 70, 136, 2 * 272, bias=False, blocks=128))


@pytest.mark.parametrize("case", SPECIAL, ids=lambda case: f"{case.op}-{case.blocks}")
def test_a_nan_or_zero_scale_is_its_rows_alone(case):
    """Rank 1's: of its own row of a gather, of a row of its partial sums; the other ranks' stay."""

    def special(rank, given):
        scale = given[3].clone()
        if rank == 1:
            scale[2, -1] = torch.nan
            scale[3] = 0
        return *given[:3], scale, given[4]

    with world_of("sm_90a", 2) as world:
        plain, outs = queue(case, world), queue(case, world, special)
        world.synchronize()
    dim = {"m": 0, "n": 1}.get(OPS[case.op].out)
    plain, found = joined_results(plain, dim), joined_results(outs, dim)
    first = 35 if case.op == GATHER else 0
    assert found[first + 2].isnan().all()
    others = [row for row in range(70) if row not in (first + 2, first + 3)]
    assert torch.equal(found[others], plain[others])
    if case.op == GATHER:
        assert (found[first + 3] == 0).all()
    else:
        assert found[3].isfinite().all() and not torch.equal(found[3], plain[3])
