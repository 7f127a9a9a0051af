"""Our ops as torch's symm_mem ops: values and strides of torch's own, and under its async-TP pass."""

import itertools
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from overlap_gemm.integrations import torch_symm_mem

OPS = torch.ops.symm_mem


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    sizes = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert all(a == b for size, a, b in sizes if size > 1), (found.stride(), expected.stride())


def equals_torchs_own(rank, size):
    """Against torch's fallback, which is also its fake kernel: every rank, dimension, layout and option."""
    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    torch_symm_mem.install(backend="decomposed")
    with mock.patch.object(torch_symm_mem, "_say") as said:
        for shape in ((4, 6), (2, 4, 6), (4, 3, 2, 6)):
            for dim, return_a, columns in itertools.product(
                range(len(shape) - 1), (True, False), ((5,), (5, 3))
            ):
                local = list(shape)
                x = torch.randn(local)
                if return_a:  # as Inductor lays A out: contiguous with dim in front
                    x = x.movedim(dim, 0).contiguous().movedim(0, dim)
                weights = [torch.randn(n, 6).t() if n == 5 else torch.randn(6, n) for n in columns]
                found = OPS.fused_all_gather_matmul(x, weights, dim, group, return_A=return_a)
                expected = symm_mem._fused_all_gather_matmul_fallback(
                    x, weights, dim, group, return_A=return_a
                )
                if return_a:
                    same(found[0], expected[0])
                else:
                    assert found[0] is None
                for ours, theirs in zip(found[1], expected[1], strict=True):
                    same(ours, theirs)
        for shape in ((4 * size, 6), (2 * size, 3, 6), (3, 2 * size, 6)):
            dim = next(axis for axis, extent in enumerate(shape) if extent % size == 0 and extent >= size)
            for op in ("sum", "avg"):
                x, weight = torch.randn(shape), torch.randn(5, 6).t()
                found = OPS.fused_matmul_reduce_scatter(x, weight, op, dim, group)
                expected = symm_mem._fused_matmul_reduce_scatter_fallback(x, weight, op, dim, group)
                same(found, expected)
        said.assert_not_called()
    torch_symm_mem.uninstall()


@pytest.mark.parametrize("world", [2, 3])
def test_equals_torchs_own(ranks, world):
    ranks(world).run(equals_torchs_own)


def falls_back_and_says_so(rank, size):
    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    x, weight = torch.randn(4, 6), torch.randn(6 * size, 5)
    with pytest.raises(NotImplementedError):  # torch has none on CPUs
        OPS.fused_all_gather_matmul(x, [weight], 1, group)
    torch_symm_mem.install()
    with pytest.raises(RuntimeError, match="installed already"):
        torch_symm_mem.install()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    torch_symm_mem.logger.addHandler(handler)
    torch_symm_mem._say.cache_clear()
    for _ in range(2):  # gathering the last dimension is torch's own business; said once
        found = OPS.fused_all_gather_matmul(x, [weight], 1, group)
        expected = symm_mem._fused_all_gather_matmul_fallback(x, [weight], 1, group)
        same(found[1][0], expected[1][0])
    y = torch.randn(4, 6)
    scattered = OPS.fused_matmul_reduce_scatter(y, torch.randn(6, 4 * size), "sum", 1, group)
    assert scattered.shape == (4, 4)
    torch_symm_mem.logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == [
        "torch's own fused_all_gather_matmul runs: dimension 1 of 2 is not a row dimension of A",
        "torch's own fused_matmul_reduce_scatter runs: dimension 1 of 2 is not a row dimension of A",
    ]
    assert torch_symm_mem.installed()
    torch_symm_mem.uninstall()
    assert not torch_symm_mem.installed()
    with pytest.raises(NotImplementedError):
        OPS.fused_all_gather_matmul(x, [weight], 1, group)
    torch_symm_mem.uninstall()


def test_falls_back_and_says_so(ranks):
    ranks(2).run(falls_back_and_says_so)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def async_tensor_parallelism(rank, size, sequence_dim):
    """torch.compile finds the pairs in a DTensor model, forward and backward, and ours carry them out."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    block = Block()
    plain = Block()
    plain.load_state_dict(block.state_dict())
    rows = Shard(sequence_dim)
    plan = {
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows, use_local_output=True),
    }
    parallelize_module(block, mesh, plan)
    x = torch.randn(8, 4 * size, 16) if sequence_dim else torch.randn(4 * size, 8, 16)
    own = x.chunk(size, sequence_dim)[rank].contiguous().requires_grad_()
    called = []
    torch_symm_mem.install(backend="decomposed")

    def counting(function):
        def call(*args, **kwargs):
            called.append(function.__name__)
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(torch_symm_mem, "all_gather_gemm", counting(torch_symm_mem.all_gather_gemm)),
        mock.patch.object(
            torch_symm_mem, "gemm_reduce_scatter", counting(torch_symm_mem.gemm_reduce_scatter)
        ),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),  # the pass asks; gloo serves
        symm_mem._test_mode(),
        torch._inductor.config.patch(_micro_pipeline_tp=True, fx_graph_cache=False),
    ):
        out = torch.compile(block, fullgraph=True)(own)
        out.backward(torch.ones_like(out))
    torch_symm_mem.uninstall()
    expected = plain(x)
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(out, expected.chunk(size, sequence_dim)[rank], rtol=1e-4, atol=1e-5)
    for parameter, whole in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-4)
    return called


@pytest.mark.parametrize("sequence_dim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_async_tensor_parallelism(ranks, sequence_dim):
    for called in ranks(2).run(async_tensor_parallelism, sequence_dim):
        assert sorted(called) == ["all_gather_gemm"] * 2 + ["gemm_reduce_scatter"] * 2
