"""GEMMs of quack-kernels against torch: plain, and over ragged parts of K, one of them empty."""

import sys

import torch
from quack.gemm_interface import gemm

torch.manual_seed(0)
m, n, parts = 128, 136, (64, 128, 40, 0, 72) if sys.argv[1] == "ragged-k" else (304,)
a = torch.randn(sum(parts), m, device="cuda", dtype=torch.bfloat16).T
b = torch.randn(sum(parts), n, device="cuda", dtype=torch.bfloat16)
if sys.argv[1] == "ragged-k":
    ends = torch.tensor((0, *parts)).cumsum(0).int().cuda()
    out = gemm(a, b, cu_seqlens_k=ends, tuned=False)
else:
    out = gemm(a, b, tuned=False)[None]
want = [x.float() @ y.float() for x, y in zip(a.split(parts, 1), b.split(parts), strict=True)]
torch.testing.assert_close(out.float(), torch.stack(want), rtol=2**-7, atol=2**-7)
