"""After a warm-up the ranks ask each other nothing, and nothing is prepared, whatever the caller says."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.dispatch import choosing
from overlap_gemm.nn import RowParallelLinear
from overlap_gemm.runtime import agree
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from tests.support.chosen import in_turn
from tests.support.ops import EVERY, SCALED

M, N, K = 9, 7, 10


def calls_of(op, rank, size):
    call = getattr(overlap_gemm, op)
    x, weight = OPS[op].shapes(M, N, K, Shards.owned_by(size, rank))
    arguments = {
        "all_gather_gemm": ({"rows": M}, {"rows": M, "columns": N}),
        "gemm_all_gather": ({"columns": N},),
        "gemm_all_to_all": ({"rows": M},),
        "all_to_all_gemm": ({},),
    }.get(op, ({}, {"k": K}))
    for extents in arguments:
        given = torch.randn(x, requires_grad=True), torch.randn(weight, requires_grad=True)
        yield lambda given=given, extents=extents: call(*given, **extents), given


def warmed_up(rank, size, op):
    overlap_gemm.warmup(op, (M, N, K), (4, 4, 4), dtype=torch.float32, backward=True)
    never = mock.Mock(side_effect=AssertionError("found out after the warm-up"))
    with (
        mock.patch.object(choosing, "choose", never),
        mock.patch.object(dist, "isend", never),
        mock.patch("overlap_gemm.dispatch.lowering._check", never),
        mock.patch.object(agree, "_exchange", never),
    ):
        for call, given in calls_of(op, rank, size):
            out = call()
            torch.autograd.grad(out, given, torch.randn(out.shape))
        x, weight = OPS[op].shapes(4, 4, 4, Shards.owned_by(size, rank))
        getattr(overlap_gemm, op)(torch.ones(x), torch.ones(weight))  # equal shards: nothing is to be said
    assert overlap_gemm.reserve(max_rows=64, columns=64) == 0  # no fused kernels here


@pytest.mark.parametrize("op", EVERY)
def test_a_warm_up_leaves_nothing_to_find_out(ranks, op):
    ranks(2).run(warmed_up, op)


def prepared_for_captures(rank, size, op):
    """Calls an op while "auto" captures another backend, which the first call is to run as well."""
    ran, real_bind = [], choosing.bind_as

    def choose(problem, requested, real=choosing.choose):
        return real(problem, "sequential" if problem.captured else "decomposed")

    def bind(kernel, backend, *arguments):
        run = real_bind(kernel, backend, *arguments)
        return lambda operands: ran.append(backend.name) or run(operands)

    x, weight = (torch.randn(shape) for shape in OPS[op].shapes(8, 4, 12, Shards.owned_by(size, rank)))
    call = partial(getattr(overlap_gemm, op), **OPS[op].arguments(8, 4, 12))
    with mock.patch.object(choosing, "choose", choose), mock.patch.object(choosing, "bind_as", bind):
        first = call(x.requires_grad_(), weight)
        assert ran == ["sequential", "decomposed"]
        strided = x.detach().t().contiguous().t() if rank == 0 else x  # new to one rank alone
        for again in (x, strided):
            torch.testing.assert_close(call(again, weight), first)
        assert ran[2:] == ["decomposed"] * 2, "prepared twice, on one rank alone"
        torch.autograd.grad(first, x, torch.ones_like(first))
        is_local = op == "gemm_all_reduce"  # the gradient of its x
        assert ran[4:] == ([] if is_local else ["sequential", "decomposed"])


@pytest.mark.parametrize("op", EVERY)
def test_a_first_call_prepares_what_captures_take(ranks, op):
    ranks(2).run(prepared_for_captures, op)


def prepared_epilogues(rank, size, in_graphs, has_autocast):
    """Calls a layer while a captured call applies its epilogue elsewhere, which the first call is to run."""
    ran, real_bind = [], choosing.bind_as

    def choose(problem, requested, real=choosing.choose):
        return real(problem, "sequential" if problem.captured == in_graphs else "decomposed")

    def why_after(choice, problem, columns):
        return None if problem.captured == in_graphs else "elsewhere"

    def bind(kernel, backend, problem, *arguments):
        ran.append((backend.name, problem.applying is not None))
        if problem.applying is None:
            return real_bind(kernel, backend, problem, *arguments)
        return choosing.applied_after(
            real_bind(kernel, backend, problem.without_epilogue(), *arguments), problem.applying
        )

    rows, width = 6 + 2 * in_graphs, 4 + 4 * has_autocast  # no case's calls are prepared by another
    layer = RowParallelLinear(8, width, bias=False, sequence_parallel=True, dtype=torch.bfloat16)
    x, residual = torch.randn(rows, 8 // size).bfloat16(), torch.randn(rows // size, width).bfloat16()
    with (
        mock.patch.object(choosing, "choose", choose),
        mock.patch.object(choosing.select, "why_after", why_after),
        mock.patch.object(choosing, "bind_as", bind),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=has_autocast),
    ):
        for _ in range(2):
            out = layer(x, residual)
    torch.testing.assert_close(out, residual + layer(x), rtol=0.02, atol=0.02)
    assert {("sequential", True), ("decomposed", False)} <= set(ran), ran


@pytest.mark.parametrize("has_autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("in_graphs", [False, True], ids=["follows in graphs", "applied in graphs"])
def test_a_first_call_prepares_where_captures_apply_epilogues(ranks, in_graphs, has_autocast):
    ranks(2).run(prepared_epilogues, in_graphs, has_autocast)


def warmed_up_for_a_list(rank, size, op):
    widths, local = (4, 6, 3), Shards.owned_by(size, rank)
    overlap_gemm.warmup(op, (M, widths, K), dtype=torch.float32, backward=True)
    never = mock.Mock(side_effect=AssertionError("found out after the warm-up"))
    shapes = [OPS[op].shapes(M, n, K, local) for n in widths]
    x, *weights = [torch.randn(one).requires_grad_() for one in (shapes[0][0], *(of for _, of in shapes))]
    with (
        mock.patch.object(choosing, "choose", never),
        mock.patch("overlap_gemm.dispatch.lowering._check", never),
        mock.patch.object(agree, "_exchange", never),
    ):
        outs = getattr(overlap_gemm, op)(x, weights, **OPS[op].arguments(M, sum(widths), K))
        torch.autograd.grad(outs, (x, *weights), [torch.randn(out.shape) for out in outs])


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_all_to_all", "all_to_all_gemm"])
def test_a_warm_up_is_for_lists_of_weights(ranks, op):
    ranks(2).run(warmed_up_for_a_list, op)


def warmed_up_with_a_promise(rank, size, op):
    overlap_gemm.warmup(op, (8, 16, 32), dtype=torch.float32, invariant="ranks")
    never = mock.Mock(side_effect=AssertionError("compared after the warm-up"))
    x, weight = OPS[op].shapes(8, 16, 32, Shards.owned_by(size, rank))
    extents = OPS[op].arguments(8, 16, 32)
    with mock.patch.object(choosing, "choose", never), mock.patch.object(agree, "_exchange", never):
        getattr(overlap_gemm, op)(torch.ones(x), torch.ones(weight), invariant="ranks", **extents)
        with pytest.raises(AssertionError, match="compared after"):  # another promise is another call
            getattr(overlap_gemm, op)(torch.ones(x), torch.ones(weight), invariant="batch", **extents)


def warmed_up_with_an_epilogue(rank, size, op):
    local = Shards.owned_by(size, rank)
    kinds = {"row_factors": "gathered_rows" if op == "all_gather_gemm" else "rows", "factor": "scalar"}
    scaled = overlap_gemm.epilogues.epilogue(times, inputs={"residual": "element", **kinds})
    overlap_gemm.warmup(op, (8, 16, 32), dtype=torch.float32, backward=True, bias=True, epilogue=scaled)
    never = mock.Mock(side_effect=AssertionError("compared after the warm-up"))
    x, weight = (torch.ones(shape, requires_grad=True) for shape in OPS[op].shapes(8, 16, 32, local))
    out = OPS[op].result(8, 16, local)
    factors = torch.full((len(x) if op == "all_gather_gemm" else out[0],), 2.0)
    applied = scaled(residual=torch.ones(out), row_factors=factors, factor=torch.ones(1))
    extents, bias = OPS[op].arguments(8, 16, 32), torch.ones(len(weight), requires_grad=True)
    with mock.patch.object(choosing, "choose", never), mock.patch.object(agree, "_exchange", never):
        with torch.no_grad():
            getattr(overlap_gemm, op)(x, weight, bias=bias, epilogue=applied, **extents)
        result = getattr(overlap_gemm, op)(x, weight, bias=bias, epilogue=applied, **extents)
        torch.autograd.grad(result, (x, weight, bias), torch.ones(out))
    assert (result == 2 * 33 + 1).all()


def times(total, residual, row_factors, factor):
    return total * row_factors * factor + residual


@pytest.mark.parametrize("op", EVERY)
def test_a_warm_up_is_for_calls_with_its_epilogue(ranks, op):
    ranks(2).run(warmed_up_with_an_epilogue, op)


@pytest.mark.parametrize("op", EVERY)
def test_a_warm_up_is_for_calls_with_its_promise(ranks, op):
    ranks(2).run(warmed_up_with_a_promise, op)


def warmed_up_in_8_bits(rank, size, op, block):
    e4m3 = torch.float8_e4m3fn
    m, n, k = 8, 32, 25 if block is None else 576
    if op not in SCALED:
        k = 4 * 128  # x is sent in parts of K, of whole blocks
    if op not in SCALED and block is None:
        with pytest.raises(TypeError, match="x is sent in parts of K, each with its rank's scales"):
            overlap_gemm.warmup(op, (m, n, k), dtype=e4m3, block=block)
        return
    overlap_gemm.warmup(op, (m, n, k), dtype=e4m3, bias=True, block=block)
    never = mock.Mock(side_effect=AssertionError("found out after the warm-up"))
    x, weight = OPS[op].shapes(m, n, k, Shards.owned_by(size, rank))
    given = {"bias": torch.ones(weight[0], dtype=torch.bfloat16), **OPS[op].arguments(m, n, k)}
    along = [1 if block is None else -(-depth // {"mx": 32}.get(block, block)) for _, depth in (x, weight)]
    scales = torch.ones(x[0], along[0]), torch.ones(1 if block == 128 else weight[0], along[1])
    if block == "mx":
        scales = tuple(map(overlap_gemm.swizzle_scales, scales))
    given |= {"scale_x": scales[0], "scale_w": scales[1], "block": block}
    with (
        mock.patch.object(choosing, "choose", never),
        mock.patch("overlap_gemm.dispatch.lowering._check", never),
    ):
        getattr(overlap_gemm, op)(torch.ones(x).to(e4m3), torch.ones(weight).to(e4m3), **given)
    with pytest.raises(TypeError, match="have no gradients"):
        overlap_gemm.warmup(op, (m, n, k), dtype=e4m3, block=block, backward=True)


@pytest.mark.parametrize(("op", "block"), in_turn(EVERY, [None, 128, "mx"]))
def test_a_warm_up_in_8_bits(ranks, op, block):
    ranks(2).run(warmed_up_in_8_bits, op, block)


def no_captures(rank, size):
    with (
        mock.patch("overlap_gemm.api.ahead._device", lambda group, given: torch.device("cuda", 0)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        for ahead in (
            lambda: overlap_gemm.warmup("gemm_all_reduce", (4, 4, 4)),
            lambda: overlap_gemm.reserve(max_rows=4, columns=4),
        ):
            with pytest.raises(overlap_gemm.CaptureError, match="while a CUDA graph is captured"):
                ahead()
    with pytest.raises(ValueError, match="gemm_all_reduce takes one weight, and N must be a number"):
        overlap_gemm.warmup("gemm_all_reduce", (4, (4, 4), 4))
    with pytest.raises(ValueError, match="op must be one of"):
        overlap_gemm.warmup("gemm", (4, 4, 4))


def test_not_while_a_graph_is_captured(ranks):
    ranks(1).run(no_captures)
