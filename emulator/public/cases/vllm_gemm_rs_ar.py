"""vLLM's GEMM with reduce-scatter or all-reduce against torch; its host modules are stand-ins."""

import logging
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from bare import bare

KERNELS = "vllm.model_executor.kernels.linear"


class Unquantized:
    """Stands for vLLM's class of the same use."""


def group() -> SimpleNamespace:
    """What the kernel's owner asks of vLLM's group."""
    return SimpleNamespace(
        device_group=dist.group.WORLD, rank_in_group=dist.get_rank(), world_size=dist.get_world_size(),
        barrier=dist.barrier,
    )  # fmt: skip


dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
if "vllm" not in sys.modules:
    bare(
        "vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.kernels", KERNELS,
        f"{KERNELS}.cute_dsl", f"{KERNELS}.mxfp8",
        vllm__distributed={"get_tp_group": group},
        vllm__logger={"init_logger": logging.getLogger},
        vllm__platforms={"current_platform": None},
        vllm__model_executor__layers__linear={"LinearBase": object, "UnquantizedLinearMethod": Unquantized},
        vllm__model_executor__kernels__linear__mxfp8__flashinfer={
            "FlashInferCutedslMxfp8LinearKernel": tuple, "FlashInferCutlassMxfp8LinearKernel": tuple,
        },
    )  # fmt: skip
from vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar import GemmRsAr  # noqa: E402

m, n, k = 128, 256, 128
everybody = [torch.randn(2, max(m, n), k, generator=torch.Generator().manual_seed(r)) for r in range(world)]
x = everybody[rank][0, :m].bfloat16().cuda()
weight = everybody[rank][1, :n].bfloat16().cuda()
layer = SimpleNamespace(weight=weight, quant_method=Unquantized())
op = GemmRsAr(max_M=m, N=n, all_reduce=sys.argv[1] == "gemm-ar")
for _ in range(2):
    out = op.apply(x, layer)
torch.cuda.synchronize()
want = sum(e[0, :m].bfloat16().float() @ e[1, :n].bfloat16().float().T for e in everybody)
if sys.argv[1] == "gemm-rs":
    want = want.chunk(world)[rank]
torch.testing.assert_close(out.cpu().float(), want, rtol=2**-6, atol=2**-3)
