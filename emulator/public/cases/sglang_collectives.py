"""SGLang's all-gather GEMM and GEMM reduce-scatter in CuTe DSL against torch, one thread a rank."""

import sys

import torch
import torch.distributed as dist
from bare import bare

OPS, LAYERS = "sglang.kernels.ops", "sglang.srt.layers"
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
if "sglang" not in sys.modules:
    from cute_emulator.clients import per_process

    bare(
        "sglang",
        "sglang.kernels",
        OPS,
        f"{OPS}.communication",
        "sglang.srt",
        LAYERS,
        f"{LAYERS}.communication",
    )
    per_process(f"{OPS}.communication.sp_collective_gemm", _compiled=dict)
    per_process(f"{LAYERS}.communication.sp_collective_gemm_workspace", _workspaces=dict)
from sglang.kernels.ops.communication import sp_collective_gemm as gemms  # noqa: E402
from sglang.srt.layers.communication.sp_collective_gemm_workspace import (  # noqa: E402
    sp_collective_gemm_workspace as workspace,
)

name, rows, n, k = sys.argv[1], 40, 128, 128
random = torch.Generator().manual_seed(0)
local = 1 if name == "all-gather-gemm" else world
everybody = [torch.randn(rows * local, k, generator=random).bfloat16() for _ in range(world)]
weights = [torch.randn(n, k, generator=random).bfloat16() for _ in range(world)]
x, weight = everybody[rank].cuda(), weights[rank].cuda()
for _ in range(2):
    if name == "all-gather-gemm":
        out = gemms.all_gather_matmul(x, weight, dist.group.WORLD, workspace=workspace, backend="cutlass")
    else:
        out = gemms.matmul_reduce_scatter(x, weight, dist.group.WORLD, workspace=workspace)
torch.cuda.synchronize()
if name == "all-gather-gemm":
    want = torch.cat(everybody).double() @ weights[rank].double().T
else:
    parts = zip(everybody, weights, strict=True)
    want = sum(one.double() @ its.double().T for one, its in parts).chunk(world)[rank]
torch.testing.assert_close(out.cpu().double(), want, rtol=2**-6, atol=2**-3)
