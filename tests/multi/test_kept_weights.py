"""Products of weights that are kept in 8 bits: results and gradients are those of their bits."""

from itertools import product

import pytest
import torch

from overlap_gemm import quantize_rows
from overlap_gemm.api.kept_weights import STORED, Stored
from overlap_gemm.testing.cases import LAYOUTS, Case, Layout, operands
from tests.support.chosen import in_turn
from tests.support.ops import SHARDED

PRODUCTS = {**{op: LAYOUTS[op] for op in SHARDED}, "column_parallel_gemm": Layout(None, 0, 0, 1)}
FORMS = ("rows", "tensor", "static", 128, 32)
E4M3 = torch.float8_e4m3fn


def rounded(matrix, block=None):
    """What 8 bits make of the rows of a matrix, or of their blocks, in float64."""
    values, scale = quantize_rows(matrix, block=block)
    scale = scale.double() if scale.shape[-1] == 1 else scale.double().repeat_interleave(block, -1)
    return values.double() * scale[:, : matrix.shape[1]]


def stored(weight, form):
    """A rank's weight in 8 bits, with scales that differ by much."""
    rows, columns = weight.shape
    steps = torch.arange(rows, dtype=torch.float32)
    match form:
        case "rows":
            return Stored((weight * 40).to(E4M3), 2.0 ** -(steps % 7).unsqueeze(1))
        case "tensor":
            return Stored((weight * 40).to(E4M3), torch.full((1, 1), 0.03))
        case "static":
            return Stored((weight * 40).to(E4M3), torch.full((1, 1), 0.03), torch.full((1, 1), 0.002))
    blocks = -(-rows // form), -(-columns // form)
    scale = 2.0 ** -(torch.arange(blocks[0] * blocks[1], dtype=torch.float32) % 5).view(blocks)
    return Stored((weight * 40).to(E4M3), scale, block=form)


def gradient(grad, weight):
    """That of x, by the rules: the scales of rows belong to y's gradient; blocks are transposed."""
    exact = weight.dequantized(torch.float64)
    if weight.block is not None:
        return rounded(grad, weight.block) @ exact
    return rounded(grad * weight.scale.t()) @ weight.values.double()


def check(rank, ranks, op, form, backend, rows=24):
    layout = PRODUCTS[op]
    whole = operands(Case(op, rows, 256 * ranks, 256 * ranks))
    by_columns = layout.weight == 0
    weights = [stored(layout.part(whole.weight, layout.weight, r, ranks), form) for r in range(ranks)]
    x, bias = (
        layout.part(getattr(whole, name), getattr(layout, name), rank, ranks).requires_grad_()
        for name in ("x", "bias")
    )
    if op == "column_parallel_gemm":
        (out,) = STORED.column_parallel_gemm(x, [weights[rank]], [bias], None, backend)
    else:
        out = getattr(STORED, op)(x, weights[rank], bias=bias, backend=backend)
    (out,) = out if isinstance(out, list) else (out,)
    found = (out, *torch.autograd.grad(out, (x, bias), layout.part(whole.grad, layout.out, rank, ranks)))

    def cut(matrix):
        return [layout.part(matrix, 1, r, ranks) for r in range(ranks)]

    block, static = weights[0].block, weights[0].input_scale
    xs = [whole.x] * ranks if by_columns else cut(whole.x)
    grads = cut(whole.grad) if by_columns else [whole.grad] * ranks
    xs = [
        rounded(x, block)
        if static is None
        else (x / static).clamp(-448, 448).to(E4M3).double() * static.double()
        for x in xs
    ]
    outs = [x @ weight.dequantized(torch.float64).t() for x, weight in zip(xs, weights, strict=True)]
    grad_xs = [gradient(grad, weight) for grad, weight in zip(grads, weights, strict=True)]
    plain = [grad.double() @ w.dequantized(torch.float64) for grad, w in zip(grads, weights, strict=True)]
    expected, grad_x, without_rounding = (
        (torch.cat(outs, 1), sum(grad_xs), sum(plain))
        if by_columns
        else (sum(outs), torch.cat(grad_xs, 1), torch.cat(plain, 1))
    )
    wanted = expected + whole.bias.double(), grad_x, whole.grad.double().sum(0)
    for one, other, dim in zip(found, wanted, (layout.out, layout.x, layout.bias), strict=True):
        torch.testing.assert_close(
            one.double(),
            layout.part(other, dim, rank, ranks),
            rtol=1e-4,
            atol=2e-5 * float(other.abs().max()),
        )
    assert 0 < (grad_x - without_rounding).norm() < 0.04 * without_rounding.norm()


@pytest.mark.parametrize(("form", "op", "world"), in_turn(product(FORMS, PRODUCTS), [1, 2, 3]))
def test_results_and_gradients_are_those_of_the_bits(ranks, op, form, world):
    ranks(world).run(check, op, form, "sequential")


def other_backends(rank, ranks, op):
    for form in FORMS:
        for backend in ("decomposed", "auto"):
            check(rank, ranks, op, form, backend)


@pytest.mark.parametrize("op", PRODUCTS)
def test_on_every_backend(ranks, op):
    ranks(2).run(other_backends, op)


def several(rank, ranks, form, sizes):
    """Weights that share a gather: of one rank their rows need not end on borders of blocks."""
    torch.manual_seed(0)
    x, grads = torch.randn(5, 160), [torch.randn(5 * ranks, n) for n in sizes]
    weights = [stored(torch.randn(n, 160), form) for n in sizes]
    x.requires_grad_()
    outs = STORED.all_gather_gemm(x, weights, rows=5 * ranks)
    (found,) = torch.autograd.grad(outs, x, grads)
    if weights[0].block is None:
        scaled = [grad * weight.scale.t() for grad, weight in zip(grads, weights, strict=True)]
        values = torch.cat([weight.values.double() for weight in weights])
        expected = ranks * rounded(torch.cat(scaled, 1)) @ values
        expected = expected[rank * 5 : rank * 5 + 5]
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )
    plain = sum(g.double() @ w.dequantized(torch.float64) for g, w in zip(grads, weights, strict=True))
    plain = ranks * plain[rank * 5 : rank * 5 + 5]
    assert 0 < (found - plain).norm() < 0.05 * plain.norm()
    with pytest.raises(RuntimeError, match="no gradients of its gradients"):
        torch.autograd.grad(STORED.all_gather_gemm(x, weights[0]).sum(), x, create_graph=True)
    wanting = Stored(torch.zeros(16, 160, dtype=E4M3).requires_grad_(), torch.ones(1, 1))
    with pytest.raises(TypeError, match="all_gather_gemm: a weight kept in 8 bits has no gradient"):
        STORED.all_gather_gemm(x, wanting)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_share_a_gather(ranks, form):
    ranks(1).run(several, form, (40, 200, 8))
    ranks(2).run(several, form, (128, 256))


def saved(rank, ranks):
    """Of x nothing is kept for backward."""
    x = torch.randn(64, 256, requires_grad=True)
    weight, kept = stored(torch.randn(32, 256), "rows"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        STORED.column_parallel_gemm(x, weight, None, None)
    assert kept == [weight.values.shape, weight.scale.shape]


def test_x_is_not_saved_for_backward(ranks):
    ranks(1).run(saved)
