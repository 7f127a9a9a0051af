"""`gemm_all_to_all` and `all_to_all_gemm` as attention calls them: batches, lists of weights, heads."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import overlap_gemm
from overlap_gemm import all_to_all_gemm, gemm_all_to_all
from overlap_gemm.backends.collectives import columns_to_rows
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.backends.scales.scaling import Scaled
from overlap_gemm.epilogues import add_residual
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.workload import OpTensors
from overlap_gemm_tools import baselines
from tests.support.chosen import in_turn

BACKENDS = "sequential", "decomposed", "torch"
DOUBLE = {"dtype": torch.float64}


def attended(x, weights, heads):
    """Computes attention in one process: x [S, B, hidden]; weights of q, k, v and the output."""
    q, k, v = (split(x @ w.t(), n) for w, n in zip(weights, heads, strict=False))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return merged(out) @ weights[3].t()


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def merged(out):
    return out.permute(2, 0, 1, 3).flatten(2)


def equals_the_unsharded_one(rank, size, backend, dim):
    torch.manual_seed(0)
    sequence, batch, hidden, heads = 2 * size + 1, 2, 10, (2 * size, size, size)
    widths = [6 * n for n in heads]
    x = torch.randn(sequence, batch, hidden, **DOUBLE, requires_grad=True)
    weights = [torch.randn(width, hidden, **DOUBLE, requires_grad=True) for width in widths]
    weights.append(torch.randn(hidden, widths[0], **DOUBLE, requires_grad=True))
    bias = torch.randn(hidden, **DOUBLE, requires_grad=True)
    factor = torch.randn(sequence, batch, hidden, **DOUBLE)
    wanted = attended(x, weights, heads) + bias
    (wanted * factor).sum().backward()

    local = [one.detach().clone().requires_grad_() for one in (x.tensor_split(1)[0], *weights, bias)]
    whole_x, *own_weights, own_bias = local
    chunk = -(-sequence // size)
    place = slice(rank * chunk, min((rank + 1) * chunk, sequence))
    local_x = whole_x[place].transpose(0, dim)
    how = {"backend": backend, "dim": dim}
    projected = gemm_all_to_all(local_x, own_weights[:3], rows=sequence, **how)
    q, k, v = (split(one.transpose(0, dim), n // size) for one, n in zip(projected, heads, strict=True))
    out = merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    out = all_to_all_gemm(out.transpose(0, dim), own_weights[3], bias=own_bias, **how).transpose(0, dim)
    torch.testing.assert_close(out, wanted.detach()[place])
    (out * factor[place]).sum().backward()
    torch.testing.assert_close(whole_x.grad[place], x.grad[place])
    for one, exact in zip((*own_weights, own_bias), (*weights, bias), strict=True):
        torch.testing.assert_close(one.grad, exact.grad)


@pytest.mark.parametrize(("backend", "dim", "world"), in_turn(product(BACKENDS, [0, 1]), [3, 1]))
def test_attention_equals_the_unsharded_one_with_its_gradients(ranks, world, backend, dim):
    ranks(world).run(equals_the_unsharded_one, backend, dim)


def exchanges(rank, size):
    """Transfers of one call, as the group counts them."""
    x, weights = torch.randn(2, 8).requires_grad_(), [torch.randn(n, 8) for n in (4, 8, 6)]
    counted = []
    plain = torch.distributed.all_to_all_single

    def counting(*arguments, **options):
        counted.append(arguments[0].numel())
        return plain(*arguments, **options)

    torch.distributed.all_to_all_single = counting
    try:
        outs = gemm_all_to_all(x, weights, backend="torch")
        torch.autograd.grad(outs, x, [out.detach() for out in outs])
    finally:
        torch.distributed.all_to_all_single = plain
    assert [out.shape for out in outs] == [(2 * size, n // size) for n in (4, 8, 6)]
    return counted


def test_a_list_of_weights_is_exchanged_at_once(ranks):
    """Counts elements of the results, then of their gradients."""
    assert ranks(2).run(exchanges) == [[4 * (2 + 4 + 3)] * 2] * 2


def weights_in_rank_order(rank, size):
    torch.manual_seed(0)
    x, weights = torch.randn(3 * size, 8, **DOUBLE), [torch.randn(n * size, 8, **DOUBLE) for n in (4, 2, 2)]
    parts = zip(*(one.chunk(size) for one in weights), strict=True)
    out = gemm_all_to_all(x.chunk(size)[rank], torch.cat([part for of_rank in parts for part in of_rank]))
    for view, weight in zip(out.split([4, 2, 2], -1), weights, strict=True):
        torch.testing.assert_close(view, x @ weight.chunk(size)[rank].t())


def test_one_weight_in_the_order_of_ranks_has_views_of_each_ranks_columns(ranks):
    ranks(2).run(weights_in_rank_order)


def refused(rank, size):
    x, weight = torch.randn(2, 8), torch.randn(6, 16)
    with pytest.raises(ValueError, match="weight must be .N, K. as in nn.Linear with K=8 of x .2, 8."):
        gemm_all_to_all(x, weight)
    with pytest.raises(ValueError, match="with K=16 of the first .6, 16., got .6, 8."):
        all_to_all_gemm(x, [weight, torch.randn(6, 8)])
    with pytest.raises(ValueError, match="of K=18 of weight .6, 18. rank . of 2 owns 9 .* but x has 8"):
        all_to_all_gemm(x, torch.randn(6, 18))
    values, scale = overlap_gemm.quantize_rows(x)
    scaled, scale_w = overlap_gemm.quantize_rows(weight)
    with pytest.raises(
        TypeError, match="has no scale; pass scales of blocks .block=128 or .* got block=None"
    ):
        all_to_all_gemm(values, scaled, scale_x=scale, scale_w=scale_w)
    for call in (all_to_all_gemm, torch.compile(all_to_all_gemm, backend="aot_eager", fullgraph=True)):
        with pytest.raises(
            Exception, match="K=16 in 2 parts is 8 a rank, .* a multiple of block=128, because"
        ):
            call(values, scaled, scale_x=torch.ones(2, 1), scale_w=torch.ones(1, 1), block=128)
    with pytest.raises(TypeError, match="all_to_all_gemm: no keyword rows; it has dim, backend"):
        all_to_all_gemm(x, weight, rows=4)
    with pytest.raises(ValueError, match="fused kernels need a Hopper or Blackwell GPU"):
        gemm_all_to_all(x.bfloat16(), torch.randn(16, 8).bfloat16(), backend="fused")


def test_what_does_not_fit_is_named(ranks):
    ranks(2).run(refused)


def scaled(rank, size):
    torch.manual_seed(0)
    (x, scale_x), (weight, scale_w) = (overlap_gemm.quantize_rows(torch.randn(rows, 32)) for rows in (6, 16))
    exact = (x.double() * scale_x.double()) @ (weight.double() * scale_w.double()).t()
    place = slice(3 * rank, 3 * rank + 3)
    for backend in ("sequential", "decomposed"):
        out = gemm_all_to_all(x[place], weight, scale_x=scale_x[place], scale_w=scale_w, backend=backend)
        torch.testing.assert_close(out.double(), exact.chunk(2, 1)[rank], rtol=2**-8, atol=1e-2)


def test_rows_of_8_bits_with_their_scales(ranks):
    ranks(2).run(scaled)


def scaled_by_blocks(rank, size, backend):
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 2 * 256).to(torch.float8_e4m3fn) for rows in (5, 136))
    scale_x, scale_w = torch.rand(5, 4) + 0.5, torch.rand(2, 4) + 0.5
    wide = [
        scale_x.repeat_interleave(128, 1),
        scale_w.repeat_interleave(128, 0)[:136].repeat_interleave(128, 1),
    ]
    exact = (x.double() * wide[0]) @ (weight.double() * wide[1]).t()
    parts = [one.chunk(2, 1)[rank] for one in (x, scale_x)]
    out = all_to_all_gemm(
        parts[0].contiguous(), weight, scale_x=parts[1], scale_w=scale_w, block=128, backend=backend
    )
    torch.testing.assert_close(out.double(), exact.split([3, 2])[rank], rtol=2**-8, atol=1e-2)
    group = resolve(group_name(None))  # as backend "torch" sends them, which multiplies on GPUs only
    exchange = partial(columns_to_rows, shards=Shards.even(5, size), group=group)
    types = ProductTypes(parts[0].dtype, None, torch.bfloat16, (1, 128, 128))
    sent = Scaled(parts[0].contiguous(), parts[1], types).exchanged(exchange, 512)
    for rows, of_all in ((sent.values, x), (sent.scale, scale_x)):
        torch.testing.assert_close(rows.float(), of_all.split([3, 2])[rank].float(), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_parts_of_k_are_sent_with_their_scales_of_blocks(ranks, backend):
    ranks(2).run(scaled_by_blocks, backend)


def of_mx_types(rank, size):
    torch.manual_seed(0)
    matrices = torch.randn(256, 256), torch.randn(24, 256)
    parts = [overlap_gemm.quantize_rows(one, block=32, power_of_two=True) for one in matrices]
    a, b = (one.values.double() * one.scale.double().repeat_interleave(32, 1) for one in parts)
    (x, scale_x), (weight, scale_w) = parts
    local = x.chunk(2, 1)[rank].contiguous(), overlap_gemm.swizzle_scales(scale_x.chunk(2, 1)[rank])
    swizzled = overlap_gemm.swizzle_scales(scale_w)
    for backend in ("sequential", "decomposed"):
        out = all_to_all_gemm(
            local[0], weight, scale_x=local[1], scale_w=swizzled, block="mx", backend=backend
        )
        torch.testing.assert_close(out.double(), (a @ b.t()).chunk(2)[rank], rtol=2**-8, atol=1e-2)
    group = resolve(group_name(None))
    sent = baselines._exchanged(
        OpTensors(local[0], weight, local[1], swizzled), 256, group
    )  # as `bench` sends
    rows = overlap_gemm.swizzle_scales(scale_x.chunk(2)[rank].contiguous())
    for one, exact in ((sent.x, x.chunk(2)[rank]), (sent.scale_x, rows)):
        torch.testing.assert_close(one.float(), exact.float(), rtol=0, atol=0)


def test_parts_of_k_of_mx_types_are_sent_with_their_scales(ranks):
    ranks(2).run(of_mx_types)


def with_an_epilogue(rank, size):
    torch.manual_seed(0)
    x, weight, residual = torch.randn(6, 8, **DOUBLE), torch.randn(4, 8, **DOUBLE), torch.randn(6, 4)
    part = residual.chunk(2, 1)[rank].contiguous()
    out = gemm_all_to_all(
        x[3 * rank : 3 * rank + 3].float(), weight.float(), epilogue=add_residual(residual=part)
    )
    torch.testing.assert_close(out, ((x @ weight.t()).float() + residual).chunk(2, 1)[rank])


def test_an_epilogue_is_applied_after_the_exchange(ranks):
    ranks(2).run(with_an_epilogue)


def dealt_by_heads(rank, size, backend, heads):
    """Compares results and gradients with those of the weight, every rank of which has its heads."""
    torch.manual_seed(0)
    weights = [torch.randn(3 * n, 10, **DOUBLE, requires_grad=True) for n in heads]
    biases = [torch.randn(3 * n, **DOUBLE, requires_grad=True) for n in heads]
    x = torch.randn(2 * size, 2, 10, **DOUBLE, requires_grad=True)
    columns = [
        [[3 * h + i for h in heads_of(r, size, n) for i in range(3)] for r in range(size)] for n in heads
    ]
    factors = [[torch.randn(2 * size, 2, len(of), **DOUBLE) for of in each] for each in columns]
    products = [x @ weight.t() + bias for weight, bias in zip(weights, biases, strict=True)]
    sum(
        (product[..., of] * factor).sum()
        for product, each, of_each in zip(products, columns, factors, strict=True)
        for of, factor in zip(each, of_each, strict=True)
    ).backward()
    local = [one.detach().clone().requires_grad_() for one in (*weights, *biases)]
    local_x = x.detach()[2 * rank : 2 * rank + 2].requires_grad_()
    outs = gemm_all_to_all(
        local_x, local[: len(heads)], bias=local[len(heads) :], heads=heads, backend=backend
    )
    for out, sharded, each in zip(outs, products, columns, strict=True):
        torch.testing.assert_close(out, sharded.detach()[..., each[rank]])
    sum((out * each[rank]).sum() for out, each in zip(outs, factors, strict=True)).backward()
    torch.testing.assert_close(local_x.grad, x.grad[2 * rank : 2 * rank + 2])
    for one, exact in zip(local, (*weights, *biases), strict=True):
        torch.testing.assert_close(one.grad, exact.grad)


def heads_of(rank, size, heads):
    if heads < size:
        return [rank * heads // size]
    return list(range(heads)[rank * -(-heads // size) : (rank + 1) * -(-heads // size)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_heads_are_replicated_and_no_head_is_cut(ranks, backend):
    """Gradients are summed over the replicas; the last of 4 ranks gets none of 5 or 6 heads."""
    ranks(4).run(dealt_by_heads, backend, (8, 2, 1))
    ranks(4).run(dealt_by_heads, backend, (5, 6, 4))


def multiplied_by_heads(rank, size, backend):
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 5 * 3, **DOUBLE, requires_grad=True) for n in (2 * size, 7))
    factor = torch.randn(2 * size, 7, **DOUBLE)
    ((wanted := x @ weight.t()) * factor).sum().backward()
    of = slice(6 * rank, 6 * rank + 6)
    local_x, local_weight = (one.detach().clone().requires_grad_() for one in (x[:, of], weight))
    out = all_to_all_gemm(local_x, local_weight, heads=5, backend=backend)
    place = slice(2 * rank, 2 * rank + 2)
    torch.testing.assert_close(out, wanted.detach()[place])
    (out * factor[place]).sum().backward()
    torch.testing.assert_close(local_x.grad, x.grad[:, of])
    torch.testing.assert_close(local_weight.grad, weight.grad)

    residual = torch.randn(2 * size, 7)
    added = add_residual(residual=residual[place])
    out = all_to_all_gemm(x[:, of].float(), weight.float(), heads=5, epilogue=added, backend=backend)
    torch.testing.assert_close(out, (wanted.float() + residual)[place])


def empty_heads(rank, size):
    x = torch.randn(2, 3)
    for heads in (1, size, size + 1):
        assert gemm_all_to_all(x, torch.randn(0, 3), heads=heads).shape == (2 * size, 0)
    for heads in (size, size + 1):
        out = all_to_all_gemm(torch.randn(2 * size, 0), torch.randn(5, 0), heads=heads)
        assert torch.equal(out, torch.zeros(2, 5))


def test_heads_may_be_empty(ranks):
    ranks(2).run(empty_heads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_the_ranks_do_not_divide_are_multiplied(ranks, backend):
    ranks(4).run(multiplied_by_heads, backend)


def scaled_by_heads(rank, size):
    torch.manual_seed(0)
    (x, scale_x), (weight, scale_w) = (overlap_gemm.quantize_rows(torch.randn(rows, 32)) for rows in (8, 32))
    exact = (x.double() * scale_x.double()) @ (weight.double() * scale_w.double()).t()
    place = slice(2 * rank, 2 * rank + 2)
    for heads in (2, 8):
        out = gemm_all_to_all(
            x[place], weight, scale_x=scale_x[place], scale_w=scale_w, heads=heads, backend="sequential"
        )
        of = slice(16 * (rank // 2), 16 * (rank // 2) + 16) if heads == 2 else slice(8 * rank, 8 * rank + 8)
        torch.testing.assert_close(out.double(), exact[:, of], rtol=2**-8, atol=1e-2)
        how = {"scale_x": scale_x[place], "heads": heads, "backend": "sequential"}
        assert torch.equal(gemm_all_to_all(x[place], weight, scale_w=scale_w.t(), **how), out)
        ones = [torch.ones(shape) for shape in ((32, 1), (1, 1), (1,), ())]
        first, *others = (gemm_all_to_all(x[place], weight, scale_w=one, **how) for one in ones)
        assert all(torch.equal(first, other) for other in others)


def test_few_heads_of_8_bits_are_replicated(ranks):
    ranks(4).run(scaled_by_heads)


def refused_heads(rank, size):
    x, weight = torch.randn(2, 24), torch.randn(24, 24)
    for heads, message in (
        (5, "heads=5 must divide the 24 columns"),
        (3, "heads=3 are fewer than the 4 ranks, and must divide their number"),
        (0, "heads must be a number, 1 or more, got 0"),
        ([8, 2], "heads must be a number, or one for each of the 1 weights, got .8, 2."),
    ):
        with pytest.raises(ValueError, match=message):
            gemm_all_to_all(x, weight, heads=heads)
    with pytest.raises(TypeError, match="heads=2 on 4 ranks are replicated or padded, which epilogue"):
        gemm_all_to_all(x, weight, heads=2, epilogue=add_residual(residual=torch.randn(8, 12)))
    with pytest.raises(ValueError, match="heads=2 must be the number of ranks, 4, or more"):
        all_to_all_gemm(x, weight, heads=2)
    with pytest.raises(ValueError, match="columns, .* of 24 in 6 heads on 4 ranks, got .2, 24."):
        all_to_all_gemm(x, weight, heads=6)
    for bias in (torch.ones(32), torch.ones(()), torch.ones(24, 1)):  # 32: the padded weight
        with pytest.raises(ValueError, match=r"bias must be \[24\] for weight \[24, 24\], got"):
            gemm_all_to_all(x, weight, bias=bias, heads=6)
    for weights, bias in (([weight] * 2, [torch.ones(24), None]), (weight, "none")):
        with pytest.raises(TypeError, match="bias must be a Tensor, got"):
            gemm_all_to_all(x, weights, bias=bias, heads=6)
    for op, part in ((gemm_all_to_all, x), (all_to_all_gemm, x[:, : 8 if rank < 3 else 0])):
        with pytest.raises(ValueError, match="weight is an empty list"):
            op(part, [], heads=6)
        with pytest.raises(TypeError, match="weight must be a Tensor, got NoneType"):
            op(part, None, heads=6)
        with pytest.raises(TypeError, match="x must be a Tensor, got NoneType"):
            op(None, weight, heads=6)
        for one in (weight[0], weight[0, 0]):
            with pytest.raises(ValueError, match="weight must be .N, K. as in nn.Linear"):
                op(part, one, heads=6)


def test_heads_that_do_not_fit_are_named(ranks):
    ranks(4).run(refused_heads)
