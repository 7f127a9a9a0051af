"""Epilogues of 8-bit layers: results and gradients are those of the quantised operands, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overlap_gemm
from overlap_gemm import epilogues, quantize_rows
from overlap_gemm.api import float8
from overlap_gemm.api.kept_weights import STORED, Stored
from overlap_gemm.dispatch.with_epilogue import call_with_epilogue
from overlap_gemm.nn import Float8, ParallelMLP
from overlap_gemm.spec.sharding import Shards

K, N, INNER = 64, 40, 96


def rounded(matrix):
    """Returns the values of a matrix's rows in 8 bits, in float64."""
    values, scale = quantize_rows(matrix.float())
    return values.double() * scale.double()


class Product(torch.autograd.Function):
    """One rank's products of x and its weights, by the rules of `Float8`."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return tuple(rounded(x) @ rounded(weight).t() for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        grad_x = rounded(torch.cat(grads, 1)) @ rounded(torch.cat(weights).t()).t()
        return grad_x, *(grad.t() @ x for grad in grads)


def part(tensor, dim, rank, size):
    start, stop = Shards.even(tensor.shape[dim], size).range(rank)
    return tensor.narrow(dim, start, stop - start)


def local(tensor, dim, rank, size, dtype=torch.float32):
    return part(tensor.detach(), dim, rank, size).to(dtype, copy=True).requires_grad_()


def close(result, wanted, name=""):
    error = float((result.double() - wanted).norm() / wanted.norm())
    assert result.shape == wanted.shape and error < 2e-6, f"{name}: {error}"


def mlp_and_residual(rank, size, fuse, rows):
    torch.manual_seed(3)
    gate, up, down = (nn.Linear(a, b, dtype=torch.float64) for a, b in ((K, INNER), (K, INNER), (INNER, K)))
    x, residual, grad = (torch.randn(rows, K, dtype=torch.float64).requires_grad_() for _ in range(3))
    outs = []
    for r in range(size):
        of_gate, of_up, bias, bias_up = (
            part(one, 0, r, size) for one in (gate.weight, up.weight, gate.bias, up.bias)
        )
        gates, ups = Product.apply(x, of_gate, of_up)
        hidden = F.silu(gates + bias) * (ups + bias_up)
        outs.append(Product.apply(hidden, part(down.weight, 1, r, size))[0])
    expected = sum(outs) + down.bias + residual
    expected.backward(grad.detach())
    narrow = [nn.Linear(one.in_features, one.out_features) for one in (gate, up, down)]
    for one, other in zip(narrow, (gate, up, down), strict=True):
        one.load_state_dict(other.state_dict())
    options = {"sequence_parallel": True, "fuse": fuse, "float8": Float8(), "rows": rows}
    mlp = ParallelMLP.from_linears(*narrow, **options)
    sharded, added = (local(one, 0, rank, size) for one in (x, residual))
    names = applied(lambda: close(mlp(sharded, added), part(expected, 0, rank, size), "without gradients"))
    assert names == ([] if fuse is False else ["swiglu", "add_residual"])
    out = mlp(sharded, added)
    close(out, part(expected, 0, rank, size), "out")
    out.backward(part(grad.detach(), 0, rank, size).float())
    close(sharded.grad, part(x.grad, 0, rank, size), "x")
    close(added.grad, part(residual.grad, 0, rank, size), "residual")
    for layer, linear, dim in ((mlp.gate_proj, gate, 0), (mlp.up_proj, up, 0), (mlp.down_proj, down, 1)):
        close(layer.weight.grad, part(linear.weight.grad, dim, rank, size), "weight")
        close(
            layer.bias.grad, part(linear.bias.grad, 0, rank, size) if dim == 0 else linear.bias.grad, "bias"
        )


def applied(run):
    """Returns the names of epilogues that 8-bit products pass to ops in `run`, without gradients."""
    names = []

    def counted(*operands):
        names.append(operands[-1].epilogue.name)
        return call_with_epilogue(*operands)

    float8.call_with_epilogue = counted
    try:
        with torch.no_grad():
            run()
    finally:
        float8.call_with_epilogue = call_with_epilogue
    return names


@pytest.mark.parametrize(("world", "fuse", "rows"), [(2, True, 7), (2, None, 6), (2, False, 6), (3, True, 8)])
def test_mlp_with_a_residual(ranks, world, fuse, rows):
    ranks(world).run(mlp_and_residual, fuse, rows)


def statistics_of_rows(rank, size):
    """Checks the residual stream and its sums of squares, with gradients of both, of [B, S, K]."""
    torch.manual_seed(1)
    x, weight, bias, residual = (
        torch.randn(shape, dtype=torch.float64).requires_grad_()
        for shape in ((2, 5, K * size), (N, K * size), (N,), (2, 5, N))
    )
    of_x = x.flatten(0, 1)
    products = [Product.apply(part(of_x, 1, r, size), part(weight, 1, r, size))[0] for r in range(size)]
    stream = (sum(products) + bias).view(2, 5, N) + residual
    squares = stream.square().sum(-1)
    grads = torch.randn_like(stream), torch.randn_like(squares)
    torch.autograd.backward((stream, squares), grads)
    sharded = [local(x, 2, rank, size), local(weight, 1, rank, size), local(bias, 0, 0, 1)]
    added = local(residual, 1, rank, size)
    outs = Float8().gemm_reduce_scatter(
        *sharded[:2], bias=sharded[2], dim=1, epilogue=epilogues.add_residual_squared(residual=added)
    )
    for out, wanted in zip(outs, (stream, squares), strict=True):
        close(out, part(wanted, 1, rank, size), "result")
    torch.autograd.backward(outs, [part(grad, 1, rank, size).float() for grad in grads])
    close(sharded[0].grad, part(x.grad, 2, rank, size), "x")
    close(sharded[1].grad, part(weight.grad, 1, rank, size), "weight")
    close(sharded[2].grad, bias.grad, "bias")
    close(added.grad, part(residual.grad, 1, rank, size), "residual")


def test_residual_and_statistics_of_rows(ranks):
    ranks(2).run(statistics_of_rows)


def scales_of_gathered_rows(rank, size, rows):
    torch.manual_seed(2)
    x, weight, scale = (
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((7, K), (N * size, K), (7,))
    )
    sums = torch.cat([Product.apply(x, part(weight, 0, r, size))[0] for r in range(size)], 1)
    expected = sums * scale[:, None]
    grad = torch.randn_like(expected)
    expected.backward(grad)
    sharded = [local(one, 0, rank, size) for one in (x, weight, scale)]
    one = epilogues.scale_gathered_rows(scale=sharded[2])
    names = applied(lambda: Float8().all_gather_gemm(*sharded[:2], rows=rows, epilogue=one))
    assert names == ["scale_gathered_rows"]
    out = Float8().all_gather_gemm(*sharded[:2], rows=rows, epilogue=one)
    close(out, part(expected, 1, rank, size), "result")
    out.backward(part(grad, 1, rank, size).float())
    for tensor, full in zip(sharded, (x, weight, scale), strict=True):
        close(tensor.grad, part(full.grad, 0, rank, size))


def test_scales_of_gathered_rows(ranks):
    for rows in (7, "exchange"):
        ranks(2).run(scales_of_gathered_rows, rows)


def kept_weights(rank, size):
    """Checks weights that stay in 8 bits: the residual is applied once, and has a gradient."""
    torch.manual_seed(4)
    x, residual, grad = torch.randn(6, K), torch.randn(6, N), torch.randn(6, N)
    values, scale = quantize_rows(torch.randn(N, K))
    results = []
    for is_fused in (True, False):
        one, added = x.clone().requires_grad_(), residual.clone().requires_grad_()
        bias = torch.ones(N, requires_grad=True)
        how = {"epilogue": epilogues.add_residual(residual=added)} if is_fused else {}
        out = STORED.gemm_all_reduce(one, Stored(values, scale), bias=bias, **how)
        out = out if is_fused else out + added
        results.append([out.detach(), *torch.autograd.grad(out, (one, added, bias), grad)])
    for fused, after in zip(*results, strict=True):
        assert torch.equal(fused, after)
    pair = [Stored(values, scale)] * 2
    gate, up = STORED.all_gather_gemm(x, pair)
    out = STORED.all_gather_gemm(x, pair, epilogue=epilogues.swiglu())
    torch.testing.assert_close(out, F.silu(gate) * up)


def test_weights_that_stay_in_8_bits(ranks):
    ranks(2).run(kept_weights)


def refused(rank, size):
    x, weight = torch.ones(4, 32, requires_grad=True), torch.ones(64, 32)
    with pytest.raises(TypeError, match="epilogue to_e4m3 has an 8-bit result and no gradient"):
        Float8().gemm_all_reduce(x, weight, epilogue=epilogues.to_e4m3(scale=2.0))
    with pytest.raises(TypeError, match="must be an epilogue with its inputs"):
        Float8().gemm_all_reduce(x, weight, epilogue=epilogues.add_bias)
    with torch.no_grad():
        out = Float8().gemm_all_reduce(x, weight, epilogue=epilogues.to_e4m3(scale=2.0))
    assert torch.equal(out.float(), torch.full((4, 64), min(16.0 * size, 448.0)))
    assert "swiglu of gate and up is an epilogue of all_gather_gemm" in str(
        overlap_gemm.explain(ParallelMLP(K, INNER, sequence_parallel=True, float8=Float8()))
    )


def test_results_without_gradients(ranks):
    ranks(1).run(refused)
