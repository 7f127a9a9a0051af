"""8-bit operands with scales on a GPU: kernels of P virtual ranks, and torch's products, against float64."""

from dataclasses import replace

import pytest
import torch

import overlap_gemm
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.tuning.settings import configured
from tests.support.emulated.scaled_cases import A2A, AG, AR, DUAL, GATHER, RS, Scaled, queue, share_of_bound

CASES = {
    "scattered": (Scaled(RS, 520, 264, 208), {}),
    "scattered-e5m2": (Scaled(RS, 200, 136, 112, torch.float8_e5m2, torch.float16, bias=False), {}),
    "one-shot": (Scaled(AR, 130, 128, 176), {"algorithm": "one_shot"}),
    "two-shot": (Scaled(AR, 520, 512, 208), {"algorithm": "two_shot"}),
    "gathered": (Scaled(AG, 130, 512, 256), {}),
    "rows-gathered": (Scaled(GATHER, 520, 136, 208), {}),
    "rows-gathered-e5m2": (Scaled(GATHER, 200, 72, 112, torch.float8_e5m2, torch.float16, bias=False), {}),
    "few-rows-gathered": (Scaled(GATHER, 32, 136, 208), {"mma": "swap_ab", "tile": (32, 64)}),
    "few-rows-joined": (Scaled(GATHER, 64, 1024, 1024), {"mma": "cooperative", "tile": (128, 128)}),
    "rows-exchanged": (Scaled(A2A, 520, 288, 208), {}),
    "columns-exchanged": (Scaled(DUAL, 520, 136, 1536, blocks=128), {}),
    "many-rows-gathered": (Scaled(GATHER, 2048, 1024, 1024), {}),
    "blocks": (Scaled(RS, 520, 264, 1088, blocks=128), {}),
    "blocks-e5m2": (
        Scaled(AR, 200, 136, 2304, torch.float8_e5m2, torch.float16, bias=False, blocks=128),
        {},
    ),
    "many-blocks": (Scaled(RS, 2048, 1024, 4096, blocks=128), {}),
    "many-tiles": (Scaled(RS, 2048, 1024, 1024), {}),
    "any-k": (Scaled(RS, 200, 136, 433), {}),
    "any-k-rows-gathered": (Scaled(GATHER, 200, 72, 117), {}),
    "any-k-blocks": (Scaled(RS, 200, 136, 2103, blocks=128), {}),
}


def on(device):
    return lambda rank, given: tuple(None if one is None else one.to(device) for one in given)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks(device, name, size):
    case, fields = CASES[name]
    if size == 1 and "algorithm" in fields:
        fields = {}
    if case.k % 16 == 0:
        case = replace(case, k=case.k // 16 // size * 16 * size)
    if case.blocks and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("scales of blocks are Hopper's")
    with configured(**fields), VirtualWorld(size, device=device) as world:
        launches = [queue(case, world, on(device)) for _ in range(3)]
        world.synchronize()
    for outs in launches:
        assert share_of_bound(case, [out.cpu() for out in outs]) <= 1


@pytest.mark.parametrize("promoted", [True, False])
def test_a_long_sum_is_promoted(device, promoted):
    """Positive products over K = 28672: without promotion a third of their sum is lost."""
    torch.manual_seed(0)
    x, weight = (torch.rand(128, 28672).add(0.5).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    with configured(fast_accum=not promoted), VirtualWorld(1, device=device) as world:
        out = overlap_gemm.gemm_reduce_scatter(
            x.to(device),
            weight.to(device),
            group=world.names[0],
            backend="fused",
            scale_x=scale,
            scale_w=scale,
        )
        world.synchronize()
    lost = float((1 - out.cpu().double() / (x.double() @ weight.double().t())).abs().max())
    assert lost < 2**-7 if promoted else lost > 0.1


@pytest.mark.parametrize("kind", [{"tensorwise": True}, {}, {"blocks": 128}], ids=str)
def test_torchs_product(device, kind):
    """Any number of columns; by `torch._scaled_mm` or, of blocks, `F.scaled_mm`, of a group of one."""
    if kind.get("blocks") and torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("torch has it on Hopper alone")
    overlap_gemm.init()
    try:
        for n, short in ((8, 0), (40, 11), (264, 0)):
            k = (384 if kind.get("blocks") else 208) - short
            case = Scaled(RS, 130, n, k, bias=False, **kind)
            x, weight, _, scale_x, scale_w = on(device)(0, case.operands(0, 1))
            out = overlap_gemm.gemm_reduce_scatter(
                x, weight, scale_x=scale_x, scale_w=scale_w, block=kind.get("blocks"), backend="torch"
            )
            assert share_of_bound(case, [out.cpu()]) <= 1
    finally:
        overlap_gemm.finalize()
