"""gradcheck of the dualities, and the ways through backward that the matrix of test_ops does not take."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.dispatch import shard_ops
from overlap_gemm.nn import column_parallel_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import LAYOUTS
from tests.support.chosen import in_turn
from tests.support.counting import counted_ops

DOUBLE = {"dtype": torch.float64}


class Shard(torch.autograd.Function):
    """This rank's part of a replicated tensor; backward sums what the ranks know of the whole gradient."""

    @staticmethod
    def forward(ctx, whole, dim, rank, size):
        ctx.dim, ctx.rank, ctx.size, ctx.shape = dim, rank, size, whole.shape
        start, stop = Shards.even(whole.shape[dim], size).range(rank)
        return whole.narrow(dim, start, stop - start).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return Unshard.apply(grad, ctx.dim, ctx.shape[ctx.dim], ctx.rank, ctx.size), None, None, None


class Unshard(torch.autograd.Function):
    """The whole tensor from the ranks' parts; backward takes this rank's part of the gradient."""

    @staticmethod
    def forward(ctx, part, dim, total, rank, size):
        ctx.args = dim, rank, size
        whole = part.new_zeros(*part.shape[:dim], total, *part.shape[dim + 1 :])
        start, stop = Shards.even(total, size).range(rank)
        whole.narrow(dim, start, stop - start).copy_(part)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return Shard.apply(grad, *ctx.args), None, None, None, None


def of_whole_operands(rank, size, op, backend, m, n, k):
    """The op as a function of whole operands, and some."""
    torch.manual_seed(0)
    layout = LAYOUTS[op]

    def part(whole, dim):
        return whole if dim is None else Shard.apply(whole, dim, rank, size)

    def whole_to_whole(x, weight, bias):
        operands = part(x, layout.x), part(weight, layout.weight)
        lengths = OPS[op].arguments(m, n, k, least=True)
        out = getattr(overlap_gemm, op)(*operands, bias=part(bias, layout.bias), backend=backend, **lengths)
        return out if layout.out is None else Unshard.apply(out, layout.out, (m, n)[layout.out], rank, size)

    given = [torch.randn(shape, **DOUBLE, requires_grad=True) for shape in ((m, k), (n, k), (n,))]
    return whole_to_whole, given


def gradcheck(rank, size, *case):
    """Finite differences; all ranks step through them together."""
    assert torch.autograd.gradcheck(*of_whole_operands(rank, size, *case))


@pytest.mark.parametrize(
    ("world", "op", "backend"), in_turn(product([3, 1], OPS), ["sequential", "decomposed", "torch"])
)
def test_gradcheck(ranks, op, backend, world):
    ranks(world).run(gradcheck, op, backend, 4, 3, 2)


def gradgradcheck(rank, size, op, backend, needed):
    function, given = of_whole_operands(rank, size, op, backend, 4, 3, 2)
    for name, tensor in zip(("x", "weight", "bias"), given, strict=True):
        tensor.requires_grad_(name in needed)
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("needed", [("x", "weight", "bias"), ("weight", "bias")], ids=["all", "parameters"])
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_gradients(ranks, op, needed):
    ranks(2).run(gradgradcheck, op, "sequential", needed)


def gradgradcheck_of_a_list(rank, size, op):
    def products(x, *weights):
        outs = getattr(overlap_gemm, op)(Shard.apply(x, layout.x, rank, size), list(weights), **lengths)
        widths = [len(weight) for weight in weights] if layout.out else [4, 4]
        pairs = zip(outs, widths, strict=True)
        return tuple(Unshard.apply(out, layout.out, extent, rank, size) for out, extent in pairs)

    layout, lengths = LAYOUTS[op], OPS[op].arguments(4, 2, 2, least=True)
    torch.manual_seed(0)
    operands = [torch.randn(shape, **DOUBLE, requires_grad=True) for shape in ((4, 2), (2, 2), (3, 2))]
    assert torch.autograd.gradcheck(products, operands)
    assert torch.autograd.gradgradcheck(products, operands)


@pytest.mark.parametrize("op", ["gemm_all_to_all", "all_to_all_gemm"])
def test_gradients_of_gradients_of_a_list_of_weights(ranks, op):
    """Checks one dual for the list, and with second derivatives one for each weight, which adds."""
    ranks(2).run(gradgradcheck_of_a_list, op)


def gradgradcheck_of_moves(rank, size):
    group = dist.group.WORLD.group_name

    def whole_to_whole(x):
        own = shard_ops.keep_shard(x, 0, group).sin()
        summed = shard_ops.sum_over_ranks(own.square().sum(0, keepdim=True), group)
        return shard_ops.join_shards(own, 0, x.shape[0], group) + summed.exp()

    def in_one_process(x):
        return x.sin() + x.sin().square().sum(0, keepdim=True).exp()

    torch.manual_seed(0)
    x = torch.randn(4, 2, **DOUBLE, requires_grad=True)
    torch.testing.assert_close(whole_to_whole(x), in_one_process(x))
    assert torch.autograd.gradgradcheck(whole_to_whole, [x])


def test_gradients_of_gradients_through_moves(ranks):
    ranks(2).run(gradgradcheck_of_moves)


def written_in_place(rank, size, op, backend, watched):
    """What programs do with the result of an nn.Linear, also where shards are uneven."""
    layout = LAYOUTS[op]
    torch.manual_seed(0)
    x, weight = torch.randn(5, 6, **DOUBLE), torch.randn(7, 6, **DOUBLE)
    own_x, own_weight = layout.part(x, layout.x, rank, size), layout.part(weight, layout.weight, rank, size)
    own_x.requires_grad_()
    options = {"backend": backend, **OPS[op].arguments(5, 7, 6, least=True)}
    through = torch.autocast("cpu", torch.bfloat16) if watched else nullcontext()
    with through:  # torch's dispatcher, where somebody watches; autocast leaves float64
        out = getattr(overlap_gemm, op)(own_x, own_weight, **options)
        with torch.no_grad():
            frozen = getattr(overlap_gemm, op)(own_x, own_weight, **options)
    factor = torch.tensor(3, **DOUBLE).requires_grad_()
    out *= 3
    frozen *= factor
    for result in (out, frozen):
        torch.testing.assert_close(result, layout.part(3 * x @ weight.t(), layout.out, rank, size))
    assert frozen.requires_grad
    out.sum().backward()
    torch.testing.assert_close(own_x.grad, layout.part(3 * weight.sum(0).expand(5, 6), layout.x, rank, size))


@pytest.mark.parametrize(
    ("watched", "op", "backend"),
    in_turn(product([False, True], OPS), ["sequential", "decomposed", "torch"]),
)
def test_results_may_be_written_in_place(ranks, op, backend, watched):
    ranks(2).run(written_in_place, op, backend, watched)


def several_weights(rank, size, backend, return_gathered, save_gathered):
    """q/k/v in one gather; the gathered x is used as well and one product is not."""
    torch.manual_seed(0)
    whole = torch.randn(5, 6, **DOUBLE).requires_grad_()
    weights = [torch.randn(n, 6, **DOUBLE).requires_grad_() for n in (4, 7, 3)]
    biases = [torch.randn(n, **DOUBLE).requires_grad_() for n in (4, 7, 3)]
    products = [whole @ w.t() + b for w, b in zip(weights, biases, strict=True)]
    factors = [torch.randn_like(products[0]), torch.randn_like(products[1]), torch.randn_like(whole)]
    loss = (products[0] * factors[0]).sum() + (products[1] * factors[1]).sum()
    if return_gathered:
        loss = loss + (whole * factors[2]).sum()
    loss.backward()

    start, stop = Shards.even(5, size).range(rank)
    own = whole.detach()[start:stop].clone().requires_grad_()
    parts = [
        [t.detach().tensor_split(size)[rank].clone().requires_grad_() for t in ts] for ts in (weights, biases)
    ]
    result = overlap_gemm.all_gather_gemm(
        own,
        parts[0],
        bias=parts[1],
        rows=len(whole),
        backend=backend,
        return_gathered=return_gathered,
        save_gathered=save_gathered,
    )
    outs, gathered = result if return_gathered else (result, None)
    wanted = [product.detach().tensor_split(size, 1)[rank] for product in products]
    torch.testing.assert_close(outs, wanted)
    loss = sum((out * f.tensor_split(size, 1)[rank]).sum() for out, f in zip(outs[:2], factors, strict=False))
    if return_gathered:
        torch.testing.assert_close(gathered, whole.detach())
        # Every rank uses all rows of the gathered x; a P-th of the factor each makes the whole loss.
        loss = loss + (gathered * factors[2]).sum() / size
    loss.backward()
    torch.testing.assert_close(own.grad, whole.grad[start:stop])
    for part, tensor in zip(parts[0][:2] + parts[1][:2], weights[:2] + biases[:2], strict=True):
        torch.testing.assert_close(part.grad, tensor.grad.tensor_split(size)[rank])
    assert not any(t.grad is not None and t.grad.any() for t in (parts[0][2], parts[1][2]))


@pytest.mark.parametrize(
    ("save_gathered", "return_gathered", "world", "backend"),
    in_turn(product([False, True], [False, True], [1, 2, 3]), ["sequential", "decomposed", "torch"]),
)
def test_several_weights(ranks, save_gathered, return_gathered, backend, world):
    ranks(world).run(several_weights, backend, return_gathered, save_gathered)


def several_weights_of_replicated_rows(rank, size, backend, invariant):
    """Compares q/k/v of rows that every rank has: one sum of the gradient of x; one product is not used."""
    torch.manual_seed(0)
    full = torch.randn(5, 2, 6, **DOUBLE).requires_grad_()
    weights = [torch.randn(n * size, 6, **DOUBLE).requires_grad_() for n in (4, 7, 3)]
    biases = [torch.randn(n * size, **DOUBLE).requires_grad_() for n in (4, 7, 3)]
    products = [full @ w.t() + b for w, b in zip(weights, biases, strict=True)]
    factors = [torch.randn_like(product) for product in products[:2]]
    sum((one * factor).sum() for one, factor in zip(products[:2], factors, strict=True)).backward()
    x = full.detach().clone().requires_grad_()
    parts = [[t.detach().chunk(size)[rank].clone().requires_grad_() for t in ts] for ts in (weights, biases)]
    with counted_ops() as ops:
        outs = column_parallel_gemm(x, *parts, None, backend, invariant=invariant)
        pairs = zip(outs, factors, strict=False)
        sum((out * factor.chunk(size, -1)[rank]).sum() for out, factor in pairs).backward()
    torch.testing.assert_close(outs, [product.detach().chunk(size, -1)[rank] for product in products])
    torch.testing.assert_close(x.grad, full.grad)
    for part, tensor in zip(parts[0][:2] + parts[1][:2], weights[:2] + biases[:2], strict=True):
        torch.testing.assert_close(part.grad, tensor.grad.chunk(size)[rank])
    assert not any(t.grad is not None and t.grad.any() for t in (parts[0][2], parts[1][2]))
    assert ops["gemm_all_reduce"] == (3 if invariant == "ranks:2" else 1)


@pytest.mark.parametrize(
    ("backend", "invariant", "world"),
    [("sequential", None, 3), ("decomposed", "batch", 2), ("torch", None, 1), ("sequential", "ranks:2", 2)],
)
def test_several_weights_of_replicated_rows(ranks, backend, invariant, world):
    ranks(world).run(several_weights_of_replicated_rows, backend, invariant)


def gradgradcheck_of_replicated_rows(rank, size):
    def products(x, *weights):
        parts = [Shard.apply(weight, 0, rank, size) for weight in weights]
        outs = column_parallel_gemm(x, parts, None, None, "sequential")
        return tuple(Unshard.apply(out, 1, out.shape[1] * size, rank, size) for out in outs)

    torch.manual_seed(0)
    operands = [torch.randn(shape, **DOUBLE, requires_grad=True) for shape in ((3, 2), (2, 2), (4, 2))]
    assert torch.autograd.gradcheck(products, operands)
    assert torch.autograd.gradgradcheck(products, operands)


def test_gradients_of_gradients_of_several_weights_of_replicated_rows(ranks):
    ranks(2).run(gradgradcheck_of_replicated_rows)


def partly_frozen(rank, size, op, needed):
    """Only what needs a gradient gets one, and it is the same as with all of them."""
    torch.manual_seed(rank)
    grads = []
    for names in (("x", "weight", "bias"), needed):
        torch.manual_seed(10 + rank)
        operands = {"x": torch.randn(3 * size, 3), "weight": torch.randn(4, 3)}
        if OPS[op].weight is None:  # the same on every rank
            torch.manual_seed(15)
            operands["weight"] = torch.randn(4, 3 * size if OPS[op].reshards_k else 3)
        torch.manual_seed(20 if OPS[op].weight != "n" else 20 + rank)
        operands["bias"] = torch.randn(4)
        for name in names:
            operands[name].requires_grad_()
        out = getattr(overlap_gemm, op)(operands["x"], operands["weight"], bias=operands["bias"])
        torch.sin(out).sum().backward()
        grads.append({name: tensor.grad for name, tensor in operands.items()})
    for name in ("x", "weight", "bias"):
        if name in needed:
            torch.testing.assert_close(grads[1][name], grads[0][name], rtol=0, atol=0)
        else:
            assert grads[1][name] is None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("needed", [("x",), ("weight",), ("bias",)])
def test_partly_frozen(ranks, op, needed):
    ranks(2).run(partly_frozen, op, needed)
