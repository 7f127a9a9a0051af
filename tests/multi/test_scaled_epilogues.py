"""Epilogues of 8-bit operands with scales by portable backends: the function, applied to the op's result."""

import pytest
import torch

import overlap_gemm
from overlap_gemm import epilogue, epilogues
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from tests.support.ops import SHARDED

M, N, K = 9, 64, 32
E4M3 = torch.float8_e4m3fn
BACKENDS = "sequential", "decomposed", "torch", "auto"


@epilogue(inputs={"residual": "element", "gamma": "columns"}, outputs={"largest": "row_max"})
def gated(x, residual, gamma):
    y = epilogues.silu(x) * gamma + residual
    return y, abs(y)


@epilogue(inputs={"gamma": "columns"}, of="partial")
def of_partial(x, gamma):
    return epilogues.relu(x * gamma)


def operands(rank, size, op, seed=0):
    """Returns (x, weight, keywords) of a rank, with scales of rows."""
    local = lambda extent: Shards.even(extent, size).size(rank)  # noqa: E731
    generator = torch.Generator().manual_seed(100 * seed + (rank if OPS[op].x is not None else 0))
    tensors = []
    for shape in OPS[op].shapes(M, N, K * size, local):
        tensors += [
            torch.randn(shape, generator=generator).to(E4M3),
            torch.rand(shape[0], 1, generator=generator),
        ]
    x, scale_x, weight, scale_w = tensors
    return x, weight, {"scale_x": scale_x, "scale_w": scale_w, **OPS[op].arguments(M, N, K * size)}


def function_of_the_result(rank, size, op):
    call = getattr(overlap_gemm, op)
    x, weight, how = operands(rank, size, op)
    for backend in BACKENDS:
        plain = call(x, weight, backend=backend, **how)
        inputs = [torch.randn(plain.shape), torch.randn(plain.shape[-1])]
        one = gated(residual=inputs[0], gamma=inputs[1])
        expected, largest = gated.on_tensors(plain, inputs)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager") if backend == "auto" else call
        for run in (call, compiled):
            out, most = run(x, weight, epilogue=one, backend=backend, **how)
            assert torch.equal(out, expected.bfloat16()) and torch.equal(most, largest)
        out = call(x, weight, epilogue=epilogues.to_e4m3(scale=0.02), backend=backend, **how)
        assert torch.equal(out.float(), (plain.float() / 0.02).clamp(-448, 448).to(E4M3).float())
    assert "gated: by torch after the op" in str(
        overlap_gemm.explain(op, x, weight, epilogue=one, backend="sequential", **how)
    )
    overlap_gemm.warmup(op, (M, N, K * size), dtype=E4M3, epilogue=gated)
    inputs[0].requires_grad_()
    call(x, weight, epilogue=one, **how)[0].sum().backward()
    assert torch.equal(inputs[0].grad, torch.ones_like(inputs[0])), "the operands alone have no gradient"
    how["scale_x"].requires_grad_()
    with pytest.raises(TypeError, match="operands with scales have no gradients"):
        call(x, weight, epilogue=one, **how)


@pytest.mark.parametrize("op", SHARDED)
def test_the_function_of_the_scaled_result(ranks, op):
    ranks(2).run(function_of_the_result, op)


def pairs_of_two_weights(rank, size):
    x, weight, how = operands(rank, size, "all_gather_gemm")
    both, scales = weight.chunk(2), how.pop("scale_w").chunk(2)
    how |= {"scale_w": list(scales), "columns": None}
    gate, up = overlap_gemm.all_gather_gemm(x, list(both), **how)
    out = overlap_gemm.all_gather_gemm(x, list(both), epilogue=epilogues.swiglu(), **how)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
    overlap_gemm.warmup("all_gather_gemm", (M, 64 * size, K), dtype=E4M3, epilogue=epilogues.swiglu)


def test_pairs_of_two_weights(ranks):
    ranks(2).run(pairs_of_two_weights)


def before_the_sum_over_ranks(rank, size, op):
    gamma = torch.randn(N, generator=torch.Generator().manual_seed(1))
    x, weight, how = operands(rank, size, op)
    out = getattr(overlap_gemm, op)(
        x, weight, epilogue=of_partial(gamma=gamma), out_dtype=torch.float32, **how
    )
    total = torch.zeros(M, N, dtype=torch.float64)
    for peer in range(size):
        x, weight, how = operands(peer, size, op)
        sums = (x.double() * how["scale_x"]) @ (weight.double() * how["scale_w"]).t()
        total += torch.relu(sums * gamma)
    rows = slice(*Shards.even(M, size).range(rank)) if op == "gemm_reduce_scatter" else slice(None)
    torch.testing.assert_close(out.double(), total[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_epilogues_of_scaled_partial_sums(ranks, op):
    ranks(3).run(before_the_sum_over_ranks, op)
