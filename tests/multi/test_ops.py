"""Every op, backend, dtype and world size against float64, forward and backward."""

import pytest
import torch

from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from tests.support.gradients import forward_and_backward
from tests.support.references import reference
from tests.support.tolerances import assert_as_good_as

BACKENDS = ("sequential", "decomposed", "torch")
WORLDS = (1, 2, 3, 4)
SHAPES = {
    "even": (24, 24, 48),
    "uneven": (23, 13, 29),
    "empty": (2, 5, 7),
    "one": (1, 1, 1),
    "wide": (5, 200, 3),
}


def matches_the_whole(rank: int, size: int, case: Case, backend: str, exchange: bool = False) -> None:
    given, layout = operands(case), LAYOUTS[case.op]
    exact, baseline = reference(given), reference(given, case.dtype)
    for name, result, dim, roundings in forward_and_backward(case.op, given, rank, size, backend, exchange):
        wanted = layout.part(getattr(baseline, name), dim, rank, size)
        if wanted is None:
            assert result is None
            continue
        truth = layout.part(getattr(exact, name), dim, rank, size)
        assert_as_good_as(result, wanted, truth, what=name, roundings=roundings)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_matches_the_whole_product(ranks, op, shape, backend, dtype, world):
    ranks(world).run(matches_the_whole, Case(op, *SHAPES[shape], dtype), backend)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_without_bias(ranks, op, backend, world):
    ranks(world).run(matches_the_whole, Case(op, 10, 9, 8, bias=False), backend)


@pytest.mark.parametrize("exchange", [False, True], ids=["known", "exchange"])
@pytest.mark.parametrize("m", range(10))
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_rows(ranks, m, backend, exchange):
    for op in OPS:
        ranks(4).run(matches_the_whole, Case(op, m, 6, 5), backend, exchange)
