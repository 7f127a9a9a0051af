"""Norms of results by `add_residual_rms_norm`, after every op: values, gradients, graphs."""

import pytest
import torch
import torch.nn.functional as F

import overlap_gemm
from overlap_gemm.epilogues import add_residual_rms_norm, add_residual_rms_norm_e4m3
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS
from tests.support.applied import assert_applied

M, N, K, EPS = 9, 40, 12, 1e-3


def norms(rank, size, op, backend):
    """Compares results (of some ops a rank's columns) with torch's norm."""

    def ours(residual, gamma):
        return add_residual_rms_norm(residual=residual, weight=gamma, eps=EPS)

    def torchs(out, residual, gamma):
        stream = out + residual
        return F.rms_norm(stream, stream.shape[-1:], gamma, EPS), stream

    assert_applied(op, (M, N, K), rank, size, ours, torchs, backend=backend)


@pytest.mark.parametrize(("op", "backend"), [
    ("gemm_all_reduce", "sequential"), ("gemm_all_reduce", "torch"), ("gemm_reduce_scatter", "decomposed"),
    ("all_gather_gemm", "auto"), ("gemm_all_gather", "sequential"),
])  # fmt: skip
def test_norms_and_their_gradients_are_torchs(ranks, op, backend):
    ranks(2).run(norms, op, backend)


def bits(rank, size):
    """Compares bfloat16 rows with torch's operations; the second call launches nothing for its number."""
    torch.manual_seed(rank)
    x, weight = torch.randn(5, K).bfloat16(), torch.randn(N, K).bfloat16()
    torch.manual_seed(9)
    residual, gamma = torch.randn(5, N).bfloat16(), torch.randn(N).bfloat16()
    stream = overlap_gemm.gemm_all_reduce(x, weight) + residual
    for _ in range(2):
        applied = add_residual_rms_norm(residual=residual, weight=gamma, eps=EPS)
        normed, result = overlap_gemm.gemm_all_reduce(x, weight, epilogue=applied)
        assert torch.equal(result, stream)
        assert torch.equal(normed, F.rms_norm(stream, (N,), gamma, EPS))


def test_after_an_op_bits_are_those_of_torchs_sum_and_norm(ranks):
    ranks(2).run(bits)


def in_8_bits(rank, size, op, backend):
    """Compares 8-bit rows with those of 16 bits, and the product that takes them with that of the norm."""
    torch.manual_seed(0)
    full = [torch.randn(shape).bfloat16() for shape in ((2, 4 * size, K * size), (N * size, K * size))]
    layout, spec = LAYOUTS[op], OPS[op]
    dims = None if layout.x is None else layout.x + 1, layout.weight
    x, weight = (layout.part(*pair, rank, size) for pair in zip(full, dims, strict=True))
    plain = getattr(overlap_gemm, op)
    options = {"backend": backend, **({"dim": 1} if "m" in (spec.x, spec.out) else {})}
    torch.manual_seed(9 if layout.out is None else rank)
    like = plain(x, weight, **options)
    residual, gamma = torch.randn_like(like), torch.rand(like.shape[-1]).bfloat16() + 0.5
    inputs = {"residual": residual, "weight": gamma, "eps": EPS}

    def ours(applied):
        return plain(x, weight, epilogue=applied, **options)

    normed, stream = ours(add_residual_rms_norm(**inputs))
    of_graph = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
    for call in (ours, of_graph):
        values, scale, same = call(add_residual_rms_norm_e4m3(**inputs))
        assert torch.equal(same, stream) and values.shape == stream.shape and scale.shape == stream.shape[:-1]
        assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        wide = values.float() * scale[..., None]
        error = (wide - normed.float()).abs()
        assert (error <= (2**-4 + 2**-7) * normed.float().abs() + 2**-9 * scale[..., None]).all()
    torch.manual_seed(5)
    column, of_column = overlap_gemm.quantize_rows(torch.randn(16, values.shape[-1]).bfloat16())
    product = overlap_gemm.gemm_all_reduce(values, column, scale_x=scale[..., None], scale_w=of_column)
    wanted = wide.double() @ (column.double() * of_column.double()).t()
    torch.distributed.all_reduce(wanted)
    torch.testing.assert_close(product.double(), wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))
    with pytest.raises(TypeError, match="has an 8-bit result and no gradient"):
        plain(x, weight.detach().requires_grad_(), epilogue=add_residual_rms_norm_e4m3(**inputs), **options)


@pytest.mark.parametrize(("op", "backend"), [
    ("gemm_all_reduce", "torch"), ("gemm_reduce_scatter", "sequential"), ("all_gather_gemm", "decomposed"),
    ("gemm_all_gather", "auto"),
])  # fmt: skip
def test_normed_rows_in_8_bits_are_an_operand_of_the_next_product(ranks, op, backend):
    ranks(2).run(in_8_bits, op, backend)
