"""The ops with one GPU per rank: NCCL, torch's symmetric memory, stores over NVLink."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured
from tests.support.gradients import forward_and_backward
from tests.support.hopper import HOPPER_KERNELS
from tests.support.ops import SHARDED
from tests.support.references import reference
from tests.support.shares import assert_right
from tests.support.tolerances import tolerance

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
pytestmark = pytest.mark.parametrize("world", WORLDS)


def matches_the_whole(rank, size, case, backend):
    given, layout = operands(case).to(torch.device("cuda", rank)), LAYOUTS[case.op]
    exact, baseline = reference(given), reference(given, case.dtype)
    for name, result, dim, roundings in forward_and_backward(case.op, given, rank, size, backend):
        whole, truth = getattr(baseline, name), getattr(exact, name)
        own = layout.part(truth, dim, rank, size)
        # A GPU multiplies matrices of another shape by another kernel, with other errors: the weight's
        # gradient is judged by the product that has its shape.
        if name == "weight":
            allowed = tolerance(weight_gradient(given, layout, rank, size), own)
        else:
            allowed = tolerance(whole, truth, roundings)
        assert (result.shape, result.dtype) == (own.shape, whole.dtype)
        error = (result.double() - own).abs().max().item() if own.numel() else 0.0
        assert error <= allowed, f"{name}: largest error {error:.3g}, allowed {allowed:.3g}"


def weight_gradient(given, layout, rank, size):
    """The gradient of the rank's part of the weight by torch alone."""
    if layout.weight == 0:
        return layout.part(given.grad, 1, rank, size).t() @ given.x
    return given.grad.t() @ layout.part(given.x, 1, rank, size)


def launches(rank, size, case, fields, count, late=None):
    """Queues `count` calls on changing data, with rank `late` after the others, and judges them all."""
    device, layout = torch.device("cuda", rank), LAYOUTS[case.op]
    slot = torch.float32 if fields.get("slot_dtype") == "f32" else case.dtype
    queued = []
    with configured(**fields), poisoned_allocations():
        for launch in range(count):
            given = operands(case.with_seed(launch)).to(device)
            x, weight = (
                layout.part(getattr(given, n), getattr(layout, n), rank, size) for n in ("x", "weight")
            )
            if rank == late:
                torch.cuda._sleep(10_000_000)
            out = overlap_gemm.gemm_reduce_scatter(x, weight, bias=given.bias, backend="fused")
            queued.append((given, out))
    torch.cuda.synchronize()
    for given, out in queued:
        assert_right(case, given, out, slot)
    overlap_gemm.close_workspaces()


def launches_by_nvshmem(rank, size, case, count, puts):
    """As `launches`, in NVSHMEM's memory; with `puts`, as if no peer were within reach of stores."""
    from nvshmem import bindings

    def reach(address, pe):
        return 0 if puts and pe != rank else reachable(address, pe)

    reachable = bindings.ptr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERLAP_GEMM_SYMMETRIC", "nvshmem")
        patch.setattr(bindings, "ptr", reach)
        launches(rank, size, case, {}, count)


def replays(rank, size, case, count):
    """One captured call, replayed on changing data, judged each time."""
    device, layout = torch.device("cuda", rank), LAYOUTS[case.op]
    first = operands(case).to(device)
    x, weight = (layout.part(getattr(first, n), getattr(layout, n), rank, size) for n in ("x", "weight"))
    overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")  # compiles and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
    for launch in range(count):
        given = operands(case.with_seed(launch)).to(device)
        x.copy_(layout.part(given.x, layout.x, rank, size))
        weight.copy_(layout.part(given.weight, layout.weight, rank, size))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(case, given, out, case.dtype)
    overlap_gemm.close_workspaces()


PORTABLE = {"even": (256, 128, 192), "uneven": (123, 72, 200), "fewer-rows-than-ranks": (1, 64, 64)}
SHAPES = {
    "even": (1024, 512, 512),
    "ragged": (200, 136, 72),
    "fewer-rows-than-ranks": (1, 64, 64),
    "many-tiles": (4096, 4096, 2048),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["sequential", "decomposed"])
@pytest.mark.parametrize("shape", PORTABLE)
@pytest.mark.parametrize("op", SHARDED)
def test_portable_backends(ranks, op, shape, backend, dtype, world):
    ranks(world).run(matches_the_whole, Case(op, *PORTABLE[shape], dtype), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", PORTABLE)
def test_fused_with_gradients(ranks, shape, dtype, world):
    ranks(world).run(matches_the_whole, Case("gemm_reduce_scatter", *PORTABLE[shape], dtype), "fused")


@pytest.mark.parametrize("kernel", HOPPER_KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel(ranks, shape, kernel, world):
    case = Case("gemm_reduce_scatter", *SHAPES[shape], torch.bfloat16)
    ranks(world).run(launches, case, HOPPER_KERNELS[kernel], 4)


@pytest.mark.parametrize("late", [0, 1])
def test_fifty_launches_with_a_lagging_rank(ranks, late, world):
    ranks(world).run(launches, Case("gemm_reduce_scatter", 520, 264, 200, torch.bfloat16), {}, 50, late)


def test_graph_replays(ranks, world):
    ranks(world).run(replays, Case("gemm_reduce_scatter", 520, 264, 200, torch.bfloat16, bias=False), 20)


@pytest.mark.parametrize("puts", [False, True], ids=["stores", "puts"])
@pytest.mark.parametrize("shape", ["ragged", "fewer-rows-than-ranks", "many-tiles"])
def test_nvshmem(ranks, shape, puts, world):
    case = Case("gemm_reduce_scatter", *SHAPES[shape], torch.bfloat16)
    ranks(world).run(launches_by_nvshmem, case, 6, puts)
