"""Gradients of the fused ops through the public API, on two virtual ranks."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.emulated import joined_results
from tests.support.chosen import in_turn
from tests.support.emulated.op_runs import SMALL, world_of
from tests.support.references import reference
from tests.support.tolerances import assert_as_good_as


@pytest.mark.parametrize(("op", "arch"), in_turn(["gemm_all_reduce", "gemm_all_gather"], SMALL))
def test_every_gradient_is_as_good_as_one_process_s(arch, op):
    """The gradient of gemm_all_gather's input is a fused gemm_all_reduce; the other ops' are local."""
    case, layout = Case(op, 70, 144, 80, torch.bfloat16), LAYOUTS[op]
    given = operands(case)
    exact, baseline = reference(given), reference(given, case.dtype)
    more = {"columns": case.n} if op == "gemm_all_gather" else {}
    outs, grads = [], []
    with world_of(arch, 2) as world:
        for rank, group in enumerate(world.names):
            parts = [
                layout.part(tensor, dim, rank, 2).requires_grad_()
                for tensor, dim in (
                    (given.x, layout.x),
                    (given.weight, layout.weight),
                    (given.bias, layout.bias),
                )
            ]
            x, weight, bias = parts
            out = getattr(overlap_gemm, op)(x, weight, group=group, bias=bias, backend="fused", **more)
            outs.append(out.detach())
            # As autograd returns them: nothing may touch a gradient before its kernel has run.
            grads.append(torch.autograd.grad(out, parts, given.grad))
        world.synchronize()
    results = {
        "out": (outs, layout.out),
        "x": ([g[0] for g in grads], layout.x),
        "weight": ([g[1] for g in grads], layout.weight),
        "bias": ([g[2] for g in grads], layout.bias),
    }
    for what, (parts, dim) in results.items():
        assert_as_good_as(
            joined_results(parts, dim), getattr(baseline, what), getattr(exact, what), what=what, roundings=2
        )
