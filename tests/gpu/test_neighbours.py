"""Fused kernels beside others' communication: NCCL on another stream, FSDP's prefetch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import overlap_gemm
from overlap_gemm.backends.fused import fused_backend as fused
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.nn import ColumnParallelLinear, RowParallelLinear
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.runtime.peers import local_peers
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.tuning.settings import configured, settings

GPUS = torch.cuda.device_count()
WORLDS = [size for size in (2, 4) if size <= GPUS]


def beside_nccl(rank, size, reserve):
    """All-gathers on a stream of their own, while calls run: no hang, same bits."""
    case = Case("gemm_reduce_scatter", 4096, 4096, 2048, torch.bfloat16, bias=False)
    device, layout = torch.device("cuda", rank), LAYOUTS[case.op]
    given = operands(case).to(device)
    x, weight = (layout.part(getattr(given, n), getattr(layout, n), rank, size) for n in ("x", "weight"))
    own = torch.full((1 << 22,), float(rank), device=device)
    gathered = torch.empty(size << 22, device=device)
    every, everybody = torch.arange(size, device=device, dtype=torch.float), resolve(group_name(None))
    with configured(reserve_sms=reserve):
        alone = overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
        everybody.all_gather(gathered, own)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        for turn in range(20):
            with torch.cuda.stream(side):
                gathered.fill_(-1)
                everybody.all_gather(gathered, own)
            outs = [overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused") for _ in range(3)]
            if turn % size == rank:
                torch.cuda._sleep(2_000_000)
            with torch.cuda.stream(side):
                everybody.all_gather(gathered, own)
            torch.cuda.synchronize()
            assert all(torch.equal(out, alone) for out in outs)
            assert torch.equal(gathered.view(size, -1), every[:, None].expand(size, 1 << 22))
    grids = [
        product.num_clusters * product.config.cluster_size
        for side in local_peers()
        for plan in side.plans.values()
        if plan.is_open and isinstance(plan, Plan)  # not the caller's products, shard by shard
        for product in plan.products
    ]
    sms = torch.cuda.get_device_properties(rank).multi_processor_count
    assert grids and all(grid <= sms - reserve for grid in grids)
    overlap_gemm.close_workspaces()


class Block(nn.Module):
    """A residual MLP, parallel over `group`, its rows sharded; the second product is `backend`'s."""

    def __init__(self, width, group, backend, device):
        super().__init__()
        options = {
            "bias": False,
            "sequence_parallel": True,
            "tp_group": group,
            "device": device,
            "dtype": torch.bfloat16,
        }
        self.up = ColumnParallelLinear(width, 4 * width, backend="sequential", rows="equal", **options)
        self.down = RowParallelLinear(4 * width, width, backend=backend, **options)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def model(width, group, backend, device):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, group, backend, device) for _ in range(4)))


def fsdp_and_tensor_parallel(rank, size, kind, backend, reserve):
    """Blocks sharded over dp by FSDP2, which prefetches them, and over tp by us: same bits as without."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    mesh = init_device_mesh(kind, (2, size // 2), mesh_dim_names=("dp", "tp"))
    width, rows = (1024, 1024) if kind == "cuda" else (32, 16)
    plain, sharded = (model(width, mesh["tp"], backend, device) for _ in range(2))
    for block in sharded:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    torch.manual_seed(10 + rank)
    with configured(reserve_sms=reserve):
        for _ in range(3):
            x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
            grad = torch.randn_like(x)
            results = []
            for net in (plain, sharded):
                net.zero_grad()
                given = x.clone().requires_grad_()
                out = net(given)
                out.backward(grad)
                results.append((out, given.grad))
            (out, x_grad), (sharded_out, sharded_x_grad) = results
            assert out.isfinite().all() and out.std() > 0.5
            assert torch.equal(out, sharded_out) and torch.equal(x_grad, sharded_x_grad)
            for whole, part in zip(plain.parameters(), sharded.parameters(), strict=True):
                mean = whole.grad.float()
                dist.all_reduce(mean, group=mesh["dp"].get_group())
                torch.testing.assert_close(part.grad.full_tensor().float(), mean / 2, rtol=2**-7, atol=1e-3)
    if kind == "cuda":
        overlap_gemm.close_workspaces()


def backward_with_settings(rank, size):
    """Autograd runs backward in a thread of its own, and there what checkpointing computes again."""
    device = torch.device("cuda", rank)
    seen = []
    make = fused.plan_for

    def noted(*given):
        seen.append(settings().reserve_sms)
        return make(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "plan_for", noted)
        net = model(256, None, "fused", device)
        x = torch.randn(256 // size, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        with configured(reserve_sms=8):
            checkpoint(net, x, use_reentrant=False).sum().backward()
    assert seen and set(seen) == {8}, seen
    torch.cuda.synchronize()
    overlap_gemm.close_workspaces()


@pytest.mark.parametrize("world", WORLDS)
def test_nccl_on_another_stream(ranks, world):
    ranks(world).run(beside_nccl, 32)


@pytest.mark.parametrize("world", [4] if GPUS >= 4 else [])
def test_fsdp_and_tensor_parallel(ranks, world):
    ranks(world).run(fsdp_and_tensor_parallel, "cuda", "fused", 32)


@pytest.mark.parametrize("world", WORLDS)
def test_settings_reach_backwards_threads(ranks, world):
    ranks(world).run(backward_with_settings)
