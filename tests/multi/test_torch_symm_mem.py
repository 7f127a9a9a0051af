"""Our ops as torch's symm_mem ops: values and strides of torch's own, and under its async-TP pass."""

import importlib
import itertools
import logging
import os
import re
from pathlib import Path
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

from overlap_gemm import configured
from overlap_gemm.integrations import torch_symm_mem

OPS = torch.ops.symm_mem
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    sizes = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert all(a == b for size, a, b in sizes if size > 1), (found.stride(), expected.stride())


def equals_torchs_own(rank, size):
    """Against torch's fallback, which is also its fake kernel: every rank, dimension, layout and option."""
    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    torch_symm_mem.install(backend="decomposed")
    with mock.patch.object(torch_symm_mem, "_log_fallback") as said:
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


@pytest.mark.parametrize("world", [1, 2, 3])
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
    torch_symm_mem._log_fallback.cache_clear()
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


def scaled_operands(m, n, k):
    """8-bit A [m, k] with a scale per row, B [k, n] by columns with one per column."""
    A, B = torch.randn(m, k).to(torch.float8_e4m3fn), torch.randn(n, k).to(torch.float8_e4m3fn).t()
    return A, B, torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5


def close(found, expected, unit):
    """Of equal shape, strides and type, within that many roundings of bfloat16 of the largest element."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max()
    assert error <= unit * 2**-8 * expected.double().abs().max(), float(error)


def gathered(tensor, dim):
    """Every rank's, which gloo carries as float32."""
    parts = [torch.empty_like(tensor, dtype=torch.float32) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.float().contiguous())
    return torch.cat(parts, dim)


def scaled_equals_torchs_own(rank, size):
    """The gather against its definition, since gloo carries no bytes of theirs; the sum against torch's."""
    group = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    torch_symm_mem.install(backend="torch")
    gather, half, single = OPS.fused_all_gather_scaled_matmul, torch.bfloat16, torch.float32
    with mock.patch.object(torch_symm_mem, "_log_fallback") as said:
        for kind, dim, fast in (("rows", 0, False), ("one", 0, True), ("rows", 1, False), ("all", 1, False)):
            A, B, scale_a, scale_b = scaled_operands(6, 16, 32)
            A, scale_a = A.view(2, 3, 32), scale_a.view(2, 3, 1)
            if kind == "one":
                scale_a, scale_b = torch.tensor(0.5), torch.tensor(2.0)
            whole, scales = gathered(A, dim), scale_a if kind == "one" else gathered(scale_a, dim)
            bias = torch.arange(16, dtype=half)
            rest = (dim, group, [None, bias], [None] * 2, [half] * 2, [fast] * 2)
            given = scales if kind == "all" else scale_a
            found, (plain, biased) = gather(A, [B, B], given, [scale_b] * 2, *rest)
            assert torch.equal(found.float(), whole)
            assert size > 1 or found.is_contiguous(), "as torch's fake kernel declares"
            expected = (whole * scales) @ (B.float() * scale_b)
            close(plain, expected.to(half), 2)
            close(biased, (expected + bias).to(half), 2)
        for op in ("sum", "avg"):
            A, B, scale_a, scale_b = scaled_operands(6 * size, 16, 32)
            given = (A, B, scale_a, scale_b, op, 1, 0, group, [2, 3 * size, 16], None, None, single)
            ours = OPS.fused_scaled_matmul_reduce_scatter(*given)
            same(ours, symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*given))
        said.assert_not_called()
    torch_symm_mem.uninstall()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_scaled_ones_equal_torchs_own(ranks, world):
    ranks(world).run(scaled_equals_torchs_own)


def differs_where_torchs_own_is_wrong(rank, size):
    """A bias is added once, and no 8-bit partials are summed; both are said."""
    group = dist.group.WORLD.group_name
    torch_symm_mem.install()
    torch_symm_mem._log_difference.cache_clear()
    ones, one = torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(())
    B, bias, scatter = ones.t(), torch.full((4,), 5.0), OPS.fused_scaled_matmul_reduce_scatter
    with mock.patch.object(torch_symm_mem.logger, "warning") as said:
        for op, wanted in (("sum", 32.0 * size + 5), ("avg", 32.0 + 5)):
            out = scatter(ones, B, one, one, op, 0, 0, group, [4, 4], bias, None, torch.float32)
            assert (out == wanted).all()
        out = scatter(ones, B, torch.tensor(33 / 1024), one, "sum", 0, 0, group, [4, 4])
        assert out.dtype == torch.float8_e4m3fn
        exact = torch.tensor(33 / 32 * size)
        assert (out.float() == exact.to(torch.float8_e4m3fn).float()).all()
    words = [call.args[1] for call in said.call_args_list]
    assert ["a bias is added once" in text for text in words] == [True, False]
    assert "rounded to torch.float8_e4m3fn once" in words[1]
    torch_symm_mem.uninstall()


def test_differs_where_torchs_own_is_wrong(ranks):
    ranks(2).run(differs_where_torchs_own_is_wrong)


def scaled_falls_back(rank, size):
    group = dist.group.WORLD.group_name
    torch_symm_mem.install()
    ones, one = torch.ones(2, 32).to(torch.float8_e4m3fn), torch.ones(())
    types = [torch.bfloat16, torch.float32]
    with mock.patch.object(torch_symm_mem, "_torch_op") as own:
        own.return_value = lambda *_: (ones, [])
        for scales, dtypes in (([one], types[:1]), ([None] * 2, types)):
            n = len(dtypes)
            rest = (0, group, [None] * n, scales, dtypes, [False] * n)
            OPS.fused_all_gather_scaled_matmul(ones, [ones.t()] * n, one, [one] * n, *rest)
    assert [call.args[2] for call in own.call_args_list] == [
        "results are scaled", "results of ['torch.bfloat16', 'torch.float32']",
    ]  # fmt: skip
    torch_symm_mem.uninstall()


def test_a_scaled_result_is_torchs_business(ranks):
    ranks(2).run(scaled_falls_back)


def test_sglang_loads_it_by_an_entry_point():
    """As SGLang does in every worker; without its switch nothing is installed."""
    group = r'\[project\.entry-points\."sglang\.srt\.plugins"\]'
    given = re.search(group + r'\n\w+ = "(.+):(.+)"', PROJECT.read_text())
    module = importlib.import_module(given[1])
    register = getattr(module, given[2])
    for switch, expected in (("0", False), ("1", True)):
        with (
            mock.patch.dict(os.environ, {"OVERLAP_GEMM_SGLANG": switch}),
            mock.patch.object(module, "_register"),  # of a hook, in test_sglang.py
        ):
            register()
            register()
        assert torch_symm_mem.installed() is expected
    torch_symm_mem.uninstall()


def test_a_choice_is_explained_once():
    # Explaining takes longer than an op; what the choice depends on is explained anew.
    device, group = torch.device("cpu"), "some"

    def slower(rows):
        A = mock.Mock(
            is_cuda=True, device=device, dtype=torch.bfloat16, shape=(rows, 8), stride=lambda: (8, 1)
        )
        return torch_symm_mem._why_slower("all_gather_gemm", A, [torch.empty(8, 4)], 0, group, "auto")

    choice = mock.Mock()
    with (
        mock.patch.object(torch_symm_mem, "explain", return_value=choice) as explain,
        mock.patch.object(torch_symm_mem, "group_size", lambda _: 2),
        mock.patch.dict(torch_symm_mem._choices, clear=True),
    ):
        for rows, name, calls in ((16, "torch", 1), (16, "fused", 1), (32, "fused", 2), (32, "torch", 2)):
            choice.backend.name = name
            assert (slower(rows) is None) == (rows == 32) and explain.call_count == calls
        with configured(reserve_sms=8):
            slower(16)
        assert explain.call_count == 3
