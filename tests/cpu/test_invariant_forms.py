"""Norms and attention of parallelized models with `invariant=`: forms of torch whose rows stand alone."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import overlap_gemm
from overlap_gemm.parallel.modules import invariant
from overlap_gemm.parallel.modules.parts import ReplicatedForward


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("promise", [{}, {"invariant": "batch"}, {"invariant": "ranks:2"}])
def test_the_mean_of_a_norm_reads_a_row_alone(norm, promise, monkeypatch):
    module = norm(48, eps=1e-5).double()
    x = torch.randn(3, 5, 48, dtype=torch.float64, requires_grad=True)
    expected = module(x)
    of_x, of_weight = torch.autograd.grad(expected.square().sum(), [x, module.weight])
    calls = []
    forward = torch.native_layer_norm
    monkeypatch.setattr(torch, "native_layer_norm", lambda *args: calls.append(args) or forward(*args))
    result = ReplicatedForward(module, None, **promise)(x)
    assert len(calls) == len(promise)
    # Norms compute in float32, whatever the input.
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(result.square().sum(), [x, module.weight]),
        (of_x, of_weight),
        rtol=1e-5,
        atol=1e-5,
    )
    with overlap_gemm.promising(invariant="batch"):
        ReplicatedForward(module, None)(x)
    assert len(calls) == len(promise) + 1


def test_other_means_are_torchs():
    x = torch.randn(4, 6, dtype=torch.float64)
    with invariant.RowMeans():
        results = [
            x.mean(), x.mean(0), x.mean(-1), x.mean(0, keepdim=True),
            torch.mean(x, -1, keepdim=True, dtype=x.dtype),
        ]  # fmt: skip
        of_rows = torch.mean(x, -1, keepdim=True), x.mean(dim=(-1,), keepdim=True), x.mean([-1], keepdim=True)
    expected = [x.mean(), x.mean(0), x.mean(-1), x.mean(0, keepdim=True), x.mean(-1, keepdim=True)]
    assert all(map(torch.equal, results, expected))
    for mean in of_rows:
        torch.testing.assert_close(mean, expected[-1], rtol=1e-14, atol=1e-14)


def test_a_mean_has_the_dtype_of_its_rows(monkeypatch):
    statistics = torch.zeros(4, 1)  # float32, as on GPUs of 16-bit rows
    monkeypatch.setattr(torch, "native_layer_norm", lambda *_: (None, statistics, None))
    with invariant.RowMeans():
        assert torch.ones(4, 6).bfloat16().mean(-1, keepdim=True).dtype is torch.bfloat16


def test_attention_leaves_out_kernels_that_divide_keys_by_the_size_of_the_batch():
    enabled = torch.backends.cuda.flash_sdp_enabled
    assert enabled()
    with invariant.attention("batch", SimpleNamespace(is_cuda=True)):
        assert not enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        # Where torch prefers cuDNN, it puts it first when a process first runs attention: so does the list.
        assert torch._C._get_sdp_priority_order()[:2] == [int(one) for one in invariant.ATTENTION[:2]]
    assert enabled()
    for promise, on_gpu in ((None, True), ("batch", False)):
        with invariant.attention(promise, SimpleNamespace(is_cuda=on_gpu)):
            assert enabled()


ONE_ROW = """
import torch, overlap_gemm
overlap_gemm.init()
x, weight = torch.randn(130, 512), torch.randn(64, 512)
print(torch.equal(overlap_gemm.gemm_all_reduce(x, weight)[:1], overlap_gemm.gemm_all_reduce(x[:1], weight)))
overlap_gemm.finalize()
"""


@pytest.mark.parametrize(
    ("value", "prints"),
    [("batch", "True"), (None, "False"), ("rows", "OVERLAP_GEMM_INVARIANT must be none or batch")],
    ids=["batch", "without", "another"],
)
def test_the_environment_is_the_default_of_all_calls(value, prints):
    env = {key: one for key, one in os.environ.items() if key != "OVERLAP_GEMM_INVARIANT"}
    env |= {} if value is None else {"OVERLAP_GEMM_INVARIANT": value}
    done = subprocess.run(
        [sys.executable, "-c", ONE_ROW], env=env, capture_output=True, text=True, check=False
    )
    assert prints in (done.stderr if value == "rows" else done.stdout), done.stderr
