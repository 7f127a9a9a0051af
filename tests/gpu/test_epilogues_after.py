"""Epilogues after an op on a GPU: one Triton kernel computes what torch's operations do."""

from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm import epilogues
from overlap_gemm.backends.epilogues import Applying
from overlap_gemm.backends.triton_kernels import epilogue_rows
from overlap_gemm.backends.triton_kernels.launchable import is_launchable
from overlap_gemm.epilogues import Applied
from overlap_gemm.epilogues.library import TORCH_OPERATIONS
from overlap_gemm.nn import ParallelMLP
from tests.support.emulated.epilogue_cases import refuse
from tests.support.rows_after import KINDS, ULP, operands


@pytest.fixture(autouse=True)
def triton(device):
    if not is_launchable(device):
        pytest.skip("Triton does not run here")


def compare(one, sums, inputs, monkeypatch):
    parts = sums if isinstance(sums, tuple) else (sums,)
    applying, of_torch = Applying(one, tuple(tensor.dtype for tensor in inputs), parts[0].dtype), sums
    by = applying
    if one.key in TORCH_OPERATIONS:  # which round between two operations
        wide = tuple(part.float() for part in parts)
        by, of_torch = applying._replace(out_dtype=torch.float32), wide if len(wide) > 1 else wide[0]
    expected = by.on_sums(of_torch, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(Applying, "on_sums", None)  # so that it raises
        made = applying.in_one_pass(sums, inputs)
    for actual, wanted in zip(made, expected, strict=True):
        assert actual.shape == wanted.shape
        relative = ULP.get(actual.dtype, 1e-5)
        absolute = 2**-9 if actual.element_size() == 1 else 1e-4  # the least step of e4m3
        torch.testing.assert_close(
            actual.float(), wanted.float(), rtol=relative, atol=absolute, equal_nan=True
        )


def on_device(tensor, device, wide):
    """Returns a copy; a matrix as columns of one that is wider."""
    if tensor.ndim < 2 or not wide:
        return tensor.to(device)
    return torch.nn.functional.pad(tensor.to(device), (0, wide))[:, : tensor.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one", KINDS, ids=lambda one: one.name)
def test_a_kernel_computes_what_torch_does(device, monkeypatch, one, dtype):
    step = 128 if one.block else 32 if one.pairs else 1
    for rows, width, wide in ((4, 70, 0), (5, 300, 24), (33, 4096, 0), (7, 5000, 8), (1000, 8192, 0)):
        width = -(-width // step) * step
        for bands in (False, True) if one.pairs else (False,):
            sums, inputs = operands(one, rows, width, dtype, wide, bands)
            parts = tuple(
                on_device(part, device, wide) for part in (sums if one.pairs and not bands else (sums,))
            )
            on_gpu = [on_device(tensor, device, wide) for tensor in inputs]
            compare(one, parts if len(parts) > 1 else parts[0], on_gpu, monkeypatch)


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


def test_layers_apply_their_epilogue_by_it(device):
    """Passes what takes the place of an epilogue that no kernel applies, which raises here."""
    overlap_gemm.init()
    x = torch.randn(7, 3, 256, device=device).bfloat16()
    weights = [torch.randn(384, 256, device=device).bfloat16() / 16 for _ in range(2)]
    residual, gamma = (
        torch.randn(7, 3, 384, device=device).bfloat16(),
        torch.rand(384, device=device).bfloat16(),
    )
    with torch.no_grad():
        applied = Applied(epilogues.add_residual_rms_norm, (residual, gamma, 1e-6), refuse)
        normed, stream = overlap_gemm.gemm_all_reduce(x, weights[0], epilogue=applied, backend="torch")
        applied = Applied(epilogues.swiglu, (), refuse)
        gated = overlap_gemm.all_gather_gemm(x, weights, epilogue=applied, backend="torch")
        products = [(x @ weight.t()).double() for weight in weights]
    exact = products[0] + residual.double()
    torch.testing.assert_close(stream.double(), exact, rtol=2**-7, atol=2**-6)
    wanted = torch.nn.functional.rms_norm(exact, (384,), gamma.double(), 1e-6)
    torch.testing.assert_close(normed.double(), wanted, rtol=2**-6, atol=2**-6)
    exact = torch.nn.functional.silu(products[0]) * products[1]
    torch.testing.assert_close(gated.double(), exact, rtol=2**-6, atol=2**-6)


def test_a_gated_mlp_applies_its_activation_by_it(device, monkeypatch):
    overlap_gemm.init()
    mlp = ParallelMLP(256, 384, device=device, dtype=torch.bfloat16)
    x = torch.randn(7, 3, 256, device=device).bfloat16()
    launched = mock.Mock(wraps=epilogue_rows.launch)
    monkeypatch.setattr(epilogue_rows, "launch", launched)
    with torch.no_grad():
        result = mlp(x)
        gate, up, down = (layer.weight.double() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        gated = torch.nn.functional.silu(x.double() @ gate.t()) * (x.double() @ up.t())
    assert launched.call_count == 1
    torch.testing.assert_close(result.double(), gated @ down.t(), rtol=2**-5, atol=2**-7)
