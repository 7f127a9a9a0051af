"""Every op, backend, dtype and world size against float64, forward and backward."""

from itertools import product

import pytest
import torch

from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from tests.support.chosen import in_turn
from tests.support.gradients import forward_and_backward
from tests.support.references import reference
from tests.support.tolerances import assert_as_good_as

BACKENDS = ("sequential", "decomposed", "torch")
CASES = {
    "even": (24, 24, 48, 4, torch.float32),
    "uneven-alone": (23, 13, 29, 1, torch.float32),
    "uneven-2": (23, 13, 29, 2, torch.float32),
    "uneven-3": (23, 13, 29, 3, torch.float32),
    "empty": (2, 5, 7, 4, torch.float32),
    "one": (1, 1, 1, 2, torch.float32),
    "wide": (5, 200, 3, 3, torch.float32),
    "bfloat16": (23, 13, 29, 4, torch.bfloat16),
    "float16": (24, 24, 48, 3, torch.float16),
}
"""M, N, K, ranks and dtype: shards of every kind (equal, ragged, empty), any number of ranks, any dtype."""


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


@pytest.mark.parametrize(("case", "op", "backend"), in_turn(product(CASES, OPS), BACKENDS))
def test_matches_the_whole_product(ranks, op, backend, case):
    m, n, k, world, dtype = CASES[case]
    ranks(world).run(matches_the_whole, Case(op, m, n, k, dtype), backend)


@pytest.mark.parametrize(("op", "backend"), in_turn(OPS, BACKENDS))
def test_without_bias(ranks, op, backend):
    ranks(3).run(matches_the_whole, Case(op, 10, 9, 8, bias=False), backend)


@pytest.mark.parametrize(
    ("m", "exchange", "backend"), in_turn(product([0, 1, 3, 4, 9], [False, True]), BACKENDS)
)
def test_any_number_of_rows(ranks, m, backend, exchange):
    """None, fewer than ranks, as many, and a ragged last shard."""
    for op in OPS:
        ranks(4).run(matches_the_whole, Case(op, m, 6, 5), backend, exchange)
