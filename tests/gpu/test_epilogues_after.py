"""Epilogues after an op on a GPU: one Triton kernel computes what torch's operations do."""

import pytest
import torch

import overlap_gemm
from overlap_gemm import epilogues
from overlap_gemm.backends.epilogues import Applying
from overlap_gemm.backends.triton_kernels.launchable import is_launchable
from tests.support.rows_after import KINDS, operands

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3}
"""Two values that differ in fp32 may be rounded to neighbours."""


@pytest.fixture(autouse=True)
def triton(device):
    if not is_launchable(device):
        pytest.skip("Triton does not run here")


def compare(one, sums, inputs, monkeypatch):
    applying = Applying(one, tuple(tensor.dtype for tensor in inputs), sums.dtype)
    expected = applying.on_sums(sums, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(Applying, "on_sums", None)  # so that it raises
        made = applying.in_one_pass(sums, inputs)
    for actual, wanted in zip(made, expected, strict=True):
        assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
        rounding = ULP.get(actual.dtype, 5e-6)
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=rounding, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one", KINDS, ids=lambda one: one.name)
def test_a_kernel_computes_what_torch_does(device, monkeypatch, one, dtype):
    for rows, width, wide in ((4, 70, 0), (5, 300, 24), (33, 4096, 0), (7, 5000, 8), (1000, 8192, 0)):
        sums, inputs = operands(one, rows, width, dtype, wide)
        on_gpu = [tensor.to(device) for tensor in inputs]
        if wide:  # rows of wider matrices, as `to` makes dense copies
            on_gpu = [
                torch.nn.functional.pad(tensor, (0, wide))[:, :width] if tensor.ndim == 2 else tensor
                for tensor in on_gpu
            ]
        compare(one, sums.to(device), on_gpu, monkeypatch)


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"])
def test_a_rank_alone_captures_it(device, op):
    """Runs an op of one rank with outputs eagerly, and captured after that."""
    overlap_gemm.init()
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((512, 256), (384, 256)))
    residual = torch.randn(512, 384, device=device).bfloat16()
    exact = x.double() @ weight.double().t() + residual.double()

    def call():
        return getattr(overlap_gemm, op)(
            x, weight, epilogue=epilogues.add_residual_squared(residual=residual), backend="torch"
        )

    eager = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    for stream, squares in (eager, captured):
        torch.testing.assert_close(stream.double(), exact, rtol=2**-7, atol=0.25)
        torch.testing.assert_close(squares.double(), exact.square().sum(-1), rtol=0.02, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(eager, captured, strict=True))
