"""What a transport can get wrong: order of sums, stale data, skewed ranks."""

import time
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from tests.support.chosen import in_turn
from tests.support.ops import EVERY

BACKENDS = ("sequential", "decomposed")


def parts_of(case, rank, size):
    given, layout = operands(case), LAYOUTS[case.op]
    return (
        layout.part(given.x, layout.x, rank, size),
        layout.part(given.weight, layout.weight, rank, size),
        layout.part(given.bias, layout.bias, rank, size),
    )


def call(case, rank, size, backend, **options):
    x, weight, bias = parts_of(case, rank, size)
    lengths = OPS[case.op].arguments(case.m, case.n, case.k, least=True)
    return getattr(overlap_gemm, case.op)(x, weight, bias=bias, backend=backend, **lengths, **options)


def sums_in_rank_order(rank, size, op, dtype, backend):
    """Partial sums chosen so that only one order of float32 additions gives this very result.

    Rank r's partial of every element is values[r] exactly: x is values[r], weight is one.
    """
    values = [1e4, 3.1415, -1e4, 2.7182, 1e-3, 1e3][:size]
    shards = Shards.even(6, size)
    x = torch.full((6, 1), values[rank], dtype=dtype)
    out = getattr(overlap_gemm, op)(x, torch.ones(2, 1, dtype=dtype), backend=backend)
    wanted = torch.zeros((), dtype=torch.float32)
    for value in values:
        wanted = wanted + torch.tensor(value, dtype=dtype).float()
    rows = shards.size(rank) if op == "gemm_reduce_scatter" else 6
    assert torch.equal(out, wanted.to(dtype).expand(rows, 2))
    backwards = torch.zeros((), dtype=torch.float32)
    for value in reversed(values):
        backwards = backwards + torch.tensor(value, dtype=dtype).float()
    assert size < 4 or dtype != torch.float32 or backwards != wanted, "the values no longer tell orders apart"


@pytest.mark.parametrize(
    ("op", "dtype", "backend", "world"),
    in_turn(
        product(["gemm_reduce_scatter", "gemm_all_reduce"], [torch.float32, torch.bfloat16], BACKENDS),
        [2, 3, 4],
    ),
    ids=str,
)
def test_sums_in_rank_order(ranks, op, dtype, backend, world):
    ranks(world).run(sums_in_rank_order, op, dtype, backend)


def torchs_own_way(rank, size, op):
    """Backend torch in forward and backward: no rank-order sum, no transfer but torch's one collective.

    An all-to-all is the collective of the ops that deal columns.
    """
    case = Case(op, 7, 6, 8)
    x, weight, bias = (
        None if tensor is None else tensor.requires_grad_() for tensor in parts_of(case, rank, size)
    )
    ours = mock.Mock(side_effect=AssertionError("not torch's own way"))
    is_dealt = "all_to_all" in OPS[op].collectives(in_rank_order=False)
    exchange = mock.Mock(side_effect=dist.all_to_all_single)
    with (
        mock.patch.object(dist, "all_to_all_single", exchange if is_dealt else ours),
        mock.patch.object(dist, "batch_isend_irecv", ours),
        mock.patch("overlap_gemm.backends.collectives.sum_in_rank_order", ours),
        mock.patch("overlap_gemm.backends.portable_arithmetic.sum_in_rank_order", ours),
    ):
        options = {"return_gathered": True} if op == "all_gather_gemm" else {}
        options |= OPS[op].arguments(7, 6, 8, least=True)
        out = getattr(overlap_gemm, op)(x, weight, bias=bias, backend="torch", **options)
        outs = out if isinstance(out, tuple) else (out,)
        sum(part.square().sum() for part in outs).backward()
    assert exchange.call_count == 2 * is_dealt


@pytest.mark.parametrize("op", EVERY)
def test_backend_torch_is_torchs_collective_and_nothing_else(ranks, op):
    ranks(3).run(torchs_own_way, op)


def repeats(rank, size, op, backend, calls):
    """Many calls with other data each time, ranks skewed; the same data gives the same bits every time."""
    first = {}
    for i in range(calls):
        case = Case(op, 5 + i % 7, 6, 8).with_seed(i % 14)
        if (i + rank) % 13 == 0:
            time.sleep(0.002)
        out = call(case, rank, size, backend)
        again = first.setdefault(case, out)
        assert torch.equal(out, again), f"call {i} of {case} differs from the first one"
    if op in ("gemm_all_reduce", "gemm_all_gather"):
        gathered = [torch.empty_like(out) for _ in range(size)]
        dist.all_gather(gathered, out)
        assert all(torch.equal(out, other) for other in gathered)
    alone = call(case, rank, size, "sequential")
    torch.testing.assert_close(out, alone)


@pytest.mark.parametrize(("op", "backend", "world"), in_turn(EVERY, BACKENDS, [4]))
def test_many_calls_with_changing_data(ranks, op, backend, world):
    """Repeats each of 14 cases four times."""
    ranks(world).run(repeats, op, backend, 56)


def leading_dimensions(rank, size, op, dim):
    torch.manual_seed(0)
    whole = torch.randn(5, 4, 3, 6, dtype=torch.float64)
    if op == "all_gather_gemm":
        weight, bias = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
        start, stop = Shards.even(whole.shape[dim], size).range(rank)
        x = whole.narrow(dim, start, stop - start)
        options = {"dim": dim, "rows": whole.shape[dim], "return_gathered": True}
        out, gathered = overlap_gemm.all_gather_gemm(x, weight, bias=bias, **options)
        torch.testing.assert_close(gathered, whole)
        torch.testing.assert_close(out, whole @ weight.t() + bias)
        return
    weight = torch.randn(7, 6, dtype=torch.float64)
    columns = slice(*Shards.even(6, size).range(rank))
    if op == "gemm_all_gather":
        rows = slice(*Shards.even(7, size).range(rank))
        out = overlap_gemm.gemm_all_gather(whole, weight[rows], columns=7)
        torch.testing.assert_close(out, whole @ weight.t())
        return
    start, stop = Shards.even(whole.shape[dim], size).range(rank)
    if op == "gemm_all_to_all":
        x, rows = whole.narrow(dim, start, stop - start), slice(*Shards.even(7, size).range(rank))
        out = overlap_gemm.gemm_all_to_all(x, weight, dim=dim, rows=whole.shape[dim])
        torch.testing.assert_close(out, (whole @ weight.t())[..., rows])
        return
    x, part = whole[..., columns], weight[:, columns]
    if op == "all_to_all_gemm":
        part = weight
    if op == "gemm_all_reduce":
        torch.testing.assert_close(overlap_gemm.gemm_all_reduce(x, part), whole @ weight.t())
        return
    out = getattr(overlap_gemm, op)(x, part, dim=dim)
    torch.testing.assert_close(out, (whole @ weight.t()).narrow(dim, start, stop - start))


@pytest.mark.parametrize(("dim", "op", "world"), in_turn(product([0, 1, 2], EVERY), [1, 2, 3]))
def test_leading_dimensions(ranks, op, dim, world):
    ranks(world).run(leading_dimensions, op, dim)
