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
    assert "gated: after the op" in str(
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


def results_with_scales(rank, size, op):
    """Compares with `quantize_rows` of the function, in rows of zeros and NaN, too."""
    call, along = (
        getattr(overlap_gemm, op),
        {"dim": 1} if op in ("all_gather_gemm", "gemm_reduce_scatter") else {},
    )
    generator = torch.Generator().manual_seed(3 + rank * (op == "gemm_reduce_scatter"))
    x, weight = torch.randn(2, 6, 32, generator=generator), torch.randn(512, 32, generator=generator)
    x[0, 0], x[1, 2] = 0, torch.nan
    plain = call(x, weight, **along)
    for one, function in (
        (epilogues.to_e4m3_blocks, lambda sums: sums),
        (epilogues.swiglu_e4m3_blocks, lambda sums: epilogues.swiglu.on_tensors(sums, ())[0]),
    ):
        expected = overlap_gemm.quantize_rows(function(plain), block=128)
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            values, scales = run(x, weight, epilogue=one(), **along)
            assert values.dtype == E4M3 and scales.shape == (*values.shape[:-1], values.shape[-1] // 128)
            torch.testing.assert_close(
                values.float(), expected.values.float(), equal_nan=True, rtol=0, atol=0
            )
            torch.testing.assert_close(scales, expected.scale, equal_nan=True, rtol=0, atol=0)
        if plain.shape[0] == 2 and op != "gemm_reduce_scatter":
            assert (scales[0, 0] == 2.0**-60).all() and scales[1].isnan().any()
    with pytest.raises(
        ValueError, match="scales blocks of 128 columns; the 64 columns of this rank's result"
    ):
        call(x, weight[:64], epilogue=epilogues.to_e4m3_blocks(), **along)


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_scales_of_blocks_of_the_result(ranks, op):
    ranks(2).run(results_with_scales, op)


def a_pair_of_products_in_8_bits(rank, size):
    generator = torch.Generator().manual_seed(rank)
    x, down = torch.randn(6, 32, generator=generator), torch.randn(40, 256, generator=generator)
    both = [torch.randn(256, 32, generator=generator) for _ in range(2)]
    values, scales = overlap_gemm.all_gather_gemm(x, both, epilogue=epilogues.swiglu_e4m3_blocks())
    rows, scale_w = overlap_gemm.quantize_rows(down, block=128)
    weight = {"scale_w": scale_w[:1], "block": 128}  # a scale for 128 rows
    out = overlap_gemm.gemm_reduce_scatter(values, rows, scale_x=scales, **weight)
    wide = [values.float().unflatten(1, (-1, 128)) * scales[..., None], rows.float().unflatten(1, (-1, 128))]
    product = [wide[0].flatten(1), (wide[1] * scale_w[:1, :, None]).flatten(1)]
    expected = overlap_gemm.gemm_reduce_scatter(*product)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)


def test_the_result_is_an_operand_of_the_next_product(ranks):
    ranks(2).run(a_pair_of_products_in_8_bits)


@pytest.mark.parametrize(
    "declared",
    [
        {"block": 64, "result": "e4m3"},
        {"block": 128},
        {"block": 128, "result": "e4m3", "outputs": {"y": "element"}},
    ],
)
def test_scales_are_of_8_bit_results_without_outputs(declared):
    def unchanged(x):
        return x

    with pytest.raises(ValueError, match="block must be 128, with result='e4m3' and without outputs"):
        epilogue(unchanged, **declared)
