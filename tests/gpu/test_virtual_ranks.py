"""GEMM reduce-scatter of P ranks on one GPU: grids that are resident together, streams of their own."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.device.failure import NOTHING, Role
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import GEMM_REDUCE_SCATTER
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.hopper import HOPPER_KERNELS
from tests.support.ranks import Ranks

SHAPES = {
    "even": (1024, 512, 512),
    "ragged": (200, 136, 72),
    "fewer-rows-than-ranks": (2, 64, 64),
    "many-tiles": (4096, 2048, 1024),
}


def run(device, ranks, sizes, fields, launches, dtype=torch.bfloat16):
    case = Case("gemm_reduce_scatter", *sizes, dtype)
    slot = torch.float32 if fields.get("slot_dtype") == "f32" else dtype
    with configured(**fields), VirtualWorld(ranks, device=device) as world:
        verdicts = [judge(case, given, outs, slot) for given, outs in run_launches(case, world, launches)]
    assert len(verdicts) == launches
    assert all(verdict.holds for verdict in verdicts), verdicts


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", HOPPER_KERNELS)
def test_every_kernel_on_every_world(device, kernel, shape, ranks):
    run(device, ranks, SHAPES[shape], HOPPER_KERNELS[kernel], launches=4)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_fifty_launches_without_a_reset(device, ranks):
    run(device, ranks, (520, 264, 200), {}, launches=50)


def test_half_precision(device):
    run(device, 4, SHAPES["ragged"], {}, launches=4, dtype=torch.float16)


def test_two_shapes_take_turns_on_one_workspace(device):
    cases = [
        Case("gemm_reduce_scatter", *sizes, torch.bfloat16) for sizes in ((512, 256, 256), (200, 136, 72))
    ]
    with VirtualWorld(4, device=device) as world:
        for turn in range(6):
            case = cases[turn % 2]
            for given, outs in run_launches(case, world, 2):
                assert judge(case, given, outs, torch.bfloat16).holds
        assert overlap_gemm.workspace_bytes() > 0


def test_results_are_bitwise_repeatable(device):
    case = Case("gemm_reduce_scatter", *SHAPES["many-tiles"], torch.bfloat16)

    def once():
        with VirtualWorld(4, device=device) as world:
            ((_, outs),) = run_launches(case, world, 1)
        return torch.cat(outs)

    first = once()
    for _ in range(5):
        assert torch.equal(first, once())


@pytest.mark.parametrize("rows", [36, 520, 1001])
def test_a_transposed_x_with_shards_of_any_rows(device, rows):
    """Which TMA cannot load where a shard begins at no multiple of 16 bytes along M."""
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device=device).t()[:rows]
    weight = torch.randn(64, 128, dtype=torch.bfloat16, device=device) / 8
    with VirtualWorld(2, device=device) as world:
        outs = [
            overlap_gemm.gemm_reduce_scatter(
                x[:, 64 * r : 64 * r + 64], weight[:, 64 * r : 64 * r + 64], group=name, backend="fused"
            )
            for r, name in enumerate(world.names)
        ]
        world.synchronize()
    exact = x.double() @ weight.double().t()
    assert (torch.cat(outs).double() - exact).abs().max() < 2**-6 * exact.abs().max()


kept = []


def call_alone(rank, size, caller):
    """Rank `caller` of two virtual ranks calls, the other one never does; in a process to be thrown away."""
    device = torch.device("cuda", 0)
    x, weight = (torch.randn(rows, 64, device=device).bfloat16() for rows in (256, 64))
    world = VirtualWorld(2, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERLAP_GEMM_TIMEOUT", "0.2")
        out = overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[caller], backend="fused")
    kept.extend((x, weight, out))  # torch aborts where memory used on two streams is freed after a trap
    try:
        world.synchronize()
    except CommTimeoutError as error:
        return str(error), error.failure


@pytest.mark.parametrize("caller", [0, 1])
def test_a_rank_that_never_calls_is_named(caller):
    with Ranks(1, device="cuda") as process:
        ((text, failure),) = process.run(call_alone, caller)
    assert (failure.rank, failure.source, failure.op) == (caller, 1 - caller, GEMM_REDUCE_SCATTER.code)
    assert failure.role in (Role.RECEIVE_PARTIAL, Role.CALL_ENTERED)  # it waits for both
    assert failure.expected == 1
    assert failure.seen in (0, NOTHING)  # a flag, or words that are their own
    assert f"Rank {1 - caller} has exited, is stalled" in text
