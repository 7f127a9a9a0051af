"""`gemm_all_to_all` and `all_to_all_gemm` as attention calls them: batches, lists of weights, heads."""

import pytest
import torch
import torch.nn.functional as F

import overlap_gemm
from overlap_gemm import all_to_all_gemm, gemm_all_to_all

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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 3])
def test_attention_equals_the_unsharded_one_with_its_gradients(ranks, world, backend, dim):
    ranks(world).run(equals_the_unsharded_one, backend, dim)


def exchanges(rank, size):
    """Transfers of one call, as the group counts them."""
    x, weights = torch.randn(2, 8), [torch.randn(n, 8) for n in (4, 8, 6)]
    counted = []
    plain = torch.distributed.all_to_all_single

    def counting(*arguments, **options):
        counted.append(arguments[0].numel())
        return plain(*arguments, **options)

    torch.distributed.all_to_all_single = counting
    try:
        outs = gemm_all_to_all(x, weights, backend="torch")
    finally:
        torch.distributed.all_to_all_single = plain
    assert [out.shape for out in outs] == [(2 * size, n // size) for n in (4, 8, 6)]
    return counted


def test_a_list_of_weights_is_exchanged_at_once(ranks):
    assert ranks(2).run(exchanges) == [[4 * (2 + 4 + 3)]] * 2


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
    with pytest.raises(TypeError, match="operands with scales are not sent in parts of K"):
        all_to_all_gemm(values, scaled, scale_x=scale, scale_w=scale_w)
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


def with_an_epilogue(rank, size):
    from overlap_gemm.epilogues.library import add_residual

    torch.manual_seed(0)
    x, weight, residual = torch.randn(6, 8, **DOUBLE), torch.randn(4, 8, **DOUBLE), torch.randn(6, 4)
    part = residual.chunk(2, 1)[rank].contiguous()
    out = gemm_all_to_all(
        x[3 * rank : 3 * rank + 3].float(), weight.float(), epilogue=add_residual(residual=part)
    )
    torch.testing.assert_close(out, ((x @ weight.t()).float() + residual).chunk(2, 1)[rank])


def test_an_epilogue_is_applied_after_the_exchange(ranks):
    ranks(2).run(with_an_epilogue)
