"""Kernels of FlashInfer in CuTe DSL that work by rows, against torch: norms, quantization."""

import sys

import torch
from bare import bare

bare("flashinfer", "flashinfer.norm", "flashinfer.cute_dsl")

which = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(x)
if which == "rmsnorm":
    from flashinfer.norm.kernels.rmsnorm import rmsnorm_cute

    rmsnorm_cute(x, weight, out)
    want = torch.nn.functional.rms_norm(x.float(), (1024,), weight.float(), 1e-6)
else:
    from flashinfer.norm.kernels.layernorm import layernorm_cute

    gamma, beta = weight.float(), torch.randn(1024, device="cuda")
    layernorm_cute(out, x, gamma, beta)
    want = torch.nn.functional.layer_norm(x.float(), (1024,), gamma, beta, 1e-6)
torch.testing.assert_close(out.float(), want, rtol=2**-6, atol=2**-6)
