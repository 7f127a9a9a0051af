"""Every op, backend, dtype and world size against float64, forward and backward."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.base import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.references import reference
from overlap_gemm.testing.tolerances import assert_as_good_as

BACKENDS = ("sequential", "decomposed")
WORLDS = (1, 2, 3, 4)
SHAPES = {
    "even": (24, 24, 48),
    "uneven": (23, 13, 29),
    "empty": (2, 5, 7),
    "one": (1, 1, 1),
    "wide": (5, 200, 3),
}


def forward_and_backward(rank: int, size: int, case: Case, backend: str) -> None:
    given = operands(case)
    layout = LAYOUTS[case.op]
    x = layout.part(given.x, layout.x, rank, size).requires_grad_()
    weight = layout.part(given.weight, layout.weight, rank, size).requires_grad_()
    bias = layout.part(given.bias, layout.bias, rank, size)
    if bias is not None:
        bias.requires_grad_()
    out = getattr(overlap_gemm, case.op)(x, weight, bias=bias, backend=backend)
    out.backward(layout.part(given.grad, layout.out, rank, size))

    exact, baseline = reference(given), reference(given, case.dtype)
    # In forward the summands of an output, in backward those of the input gradient, are rounded once per
    # rank.
    reduces_out = case.op in ("gemm_reduce_scatter", "gemm_all_reduce")
    for name, result, dim in (
        ("out", out.detach(), layout.out),
        ("x", x.grad, layout.x),
        ("weight", weight.grad, layout.weight),
        ("bias", None if bias is None else bias.grad, layout.bias),
    ):
        wanted = layout.part(getattr(baseline, name), dim, rank, size)
        if wanted is None:
            assert result is None
            continue
        summed = reduces_out if name == "out" else name == "x" and not reduces_out
        truth = layout.part(getattr(exact, name), dim, rank, size)
        assert_as_good_as(result, wanted, truth, what=name, roundings=size if summed else 0)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_matches_the_whole_product(ranks, op, shape, backend, dtype, world):
    ranks(world).run(forward_and_backward, Case(op, *SHAPES[shape], dtype), backend)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_without_bias(ranks, op, backend, world):
    ranks(world).run(forward_and_backward, Case(op, 10, 9, 8, bias=False), backend)


@pytest.mark.parametrize("m", range(10))
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_rows(ranks, m, backend):
    for op in OPS:
        ranks(4).run(forward_and_backward, Case(op, m, 6, 5), backend)
