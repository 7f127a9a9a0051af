"""The plain GEMM of every kernel on one GPU, against float64 and beside cuBLAS."""

import pytest
import torch

import overlap_gemm
from overlap_gemm.runtime.executor import cuda_executor
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured
from overlap_gemm.tuning.space import every_config
from tests.support.tolerances import assert_as_good_as

SHAPES = {
    "even": (512, 512, 512),
    "ragged": (200, 136, 72),
    "row": (1, 64, 64),
    "k-tail": (128, 64, 100),
    "many-tiles": (4096, 4096, 1024),
}


def configs():
    return every_config(cuda_executor(0).arch) if torch.cuda.is_available() else ()


def product(device, sizes, dtype, *, a_major="k", b_major="k", bias=True):
    """The op's result beside torch's and the exact one."""
    m, n, k = sizes
    generator = torch.Generator(device).manual_seed(m * 31 + n * 17 + k)

    def matrix(rows, major):
        plain = torch.randn(rows, k, generator=generator, device=device, dtype=torch.float64).to(dtype)
        return plain if major == "k" else plain.t().contiguous().t()

    x, weight = matrix(m, a_major), matrix(n, b_major)
    shift = torch.randn(n, generator=generator, device=device).to(dtype) if bias else None
    with poisoned_allocations():
        out = overlap_gemm.gemm_reduce_scatter(x, weight, bias=shift, backend="fused")
    exact = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
    return out, torch.nn.functional.linear(x, weight, shift), exact


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", configs(), ids=lambda config: config.name)
def test_every_kernel(device, config, shape):
    fields = {"mma": config.mma, "tile": config.tile, "cluster": config.cluster, "k_split": config.k_split}
    with configured(**fields):
        assert_as_good_as(*product(device, SHAPES[shape], torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_layouts_and_types(device, dtype, a_major, b_major, bias):
    sizes = (264, 200, 328)
    assert_as_good_as(*product(device, sizes, dtype, a_major=a_major, b_major=b_major, bias=bias))


def test_a_product_is_bitwise_repeatable(device):
    first, *_ = product(device, SHAPES["many-tiles"], torch.bfloat16)
    for _ in range(10):
        again, *_ = product(device, SHAPES["many-tiles"], torch.bfloat16)
        assert torch.equal(first, again)


def test_a_graph_replays_on_changing_data(device):
    x, weight = (torch.randn(rows, 328, device=device).bfloat16() for rows in (264, 200))
    overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
    for _ in range(5):
        x.normal_()
        weight.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert_as_good_as(out, x @ weight.t(), x.double() @ weight.double().t())
