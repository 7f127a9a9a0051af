"""SGLang's GEMM of few tokens in CuTe DSL against torch; its host modules are stand-ins."""

import sys

import torch
from bare import bare

bare(
    "sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.gemm", "sglang.srt",
    sglang__kernels__kernel_api_logging={"debug_kernel_api": lambda function: function},
    sglang__srt__utils={"get_device_sm": lambda: 100},
    sglang__srt__utils__common={"direct_register_custom_op": lambda **options: None},
)  # fmt: skip
from sglang.kernels.ops.gemm.cutedsl_dsv3_fused_a_gemm import _dsv3_fused_a_gemm_run  # noqa: E402

K = int(sys.argv[1].rpartition("-")[2])
torch.manual_seed(0)
x = torch.randn(4, K, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(32, K, device="cuda", dtype=torch.bfloat16)
out = _dsv3_fused_a_gemm_run(x, weight.t())
torch.testing.assert_close(out.float(), x.float() @ weight.float().T, rtol=2**-6, atol=2**-1)
