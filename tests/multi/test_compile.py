"""torch.compile(fullgraph=True) over layers, and the fake kernels' shapes."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import overlap_gemm
from overlap_gemm.backends.op_call import OpCall
from overlap_gemm.nn import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    UlyssesAttention,
    gather_heads,
    scatter_heads,
)
from overlap_gemm.parallel import OverlapColwiseParallel, OverlapRowwiseParallel, OverlapSharedGather
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards


def compare_compiled(module, x):
    """Output and gradients of the compiled module against the eager one's."""
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        own = x.clone().requires_grad_()
        out = call(own)
        out.backward(torch.cos(out.detach()))
        results.append([out.detach(), own.grad, *(p.grad.clone() for p in module.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def compiled_layers(rank, size, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "backend": backend}
    x = torch.randn(6, 2, 8, dtype=torch.float64)
    for module in (
        ParallelMLP(8, 10, sequence_parallel=True, bias=True, **options),
        ParallelMLP(8, 10, **options),
        ColumnParallelLinear(8, 10, gather_output=True, **options),
        RowParallelLinear(8, 10, input_is_parallel=False, **options),
        nn.Sequential(
            ColumnParallelLinear(8, 10, sequence_parallel=True, rows=6 * size, **options),
            nn.GELU(),
            RowParallelLinear(10, 8, sequence_parallel=True, **options),
        ),
    ):
        compare_compiled(module, x)


FIRST_CALLS = """
import torch, overlap_gemm
from overlap_gemm.spec import OPS
overlap_gemm.init()
for name, op in OPS.items():
    operands = [torch.randn(shape) for shape in op.shapes(8, 8, 8, int)]
    call, said = getattr(overlap_gemm, name, None), op.arguments(8, 8, 8)
    if call is not None:
        torch.compile(lambda: call(*operands, **said), fullgraph=True, backend="eager")()
        print(name)
overlap_gemm.finalize()
"""


def test_the_first_call_of_a_process_may_be_a_compiled_one():
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [name for name in OPS if hasattr(overlap_gemm, name)], done.stderr


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled_layers(ranks, world):
    ranks(world).run(compiled_layers, "auto")


class ExchangedHeads(nn.Module):
    """Attention of projected q, k and v between `scatter_heads` and `gather_heads`."""

    def __init__(self, heads, kv_heads, numbers, rows):
        super().__init__()
        self.heads, self.numbers, self.rows = heads, numbers, rows
        self.q, self.k = (nn.Linear(8, 2 * n, dtype=torch.float64) for n in (heads, kv_heads))

    def forward(self, x):
        q, k = (one.unflatten(-1, (-1, 2)) for one in (self.q(x), self.k(x)))
        exchanged = scatter_heads([q, k, torch.sin(k)], heads=self.numbers, rows=self.rows)
        q, k, v = (one.transpose(1, 2) for one in exchanged)
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
        return gather_heads(out, num_heads=self.heads, heads=self.numbers[0])


def compiled_attention(rank, size, heads, kv_heads, rows, exchanged):
    torch._dynamo.reset()
    torch.manual_seed(0)
    local = Shards.even(rows, size).size(rank)
    options = {"num_kv_heads": kv_heads, "head_dim": 2, "bias": True, "rows": rows, "dtype": torch.float64}
    x = torch.randn(3, local, 8, dtype=torch.float64)
    if exchanged:
        numbers = [heads, kv_heads, kv_heads] if kv_heads < size else [kv_heads] * 3
        compare_compiled(ExchangedHeads(heads, kv_heads, numbers, rows), x)
        compare_compiled(UlyssesAttention(8, heads, sequence_dim=1, **options), x)
    else:
        compare_compiled(UlyssesAttention(8, heads, **options), x.transpose(0, 1).contiguous())


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "rows", "exchanged"),
    [
        (2, 4, 2, 8, False),
        (2, 4, 1, 11, True),
        *(
            pytest.param(*sizes, exchanged, marks=pytest.mark.slow)
            for sizes in ((2, 4, 2, 8), (2, 4, 1, 11), (4, 8, 2, 11))
            for exchanged in (False, True)
            if (sizes, exchanged) not in (((2, 4, 2, 8), False), ((2, 4, 1, 11), True))
        ),
    ],
)
def test_compiled_attention(ranks, world, heads, kv_heads, rows, exchanged):
    """Heads are even, and replicated with uneven rows; sequences lie along either dimension."""
    ranks(world).run(compiled_attention, heads, kv_heads, rows, exchanged)


def attention_of_any_length(rank, size, tp, backend, kv_heads):
    """Compares lengths that torch has not seen, after one compilation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("sp", "tp"))
    layer = UlyssesAttention(
        8, 4, num_kv_heads=kv_heads, head_dim=2, bias=True, out_bias=True, sequence_dim=1, group=mesh["sp"],
        tp_group=mesh["tp"] if tp > 1 else None, dtype=torch.float64,
    )  # fmt: skip
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in (6, 3, 10):
        x, results = torch.randn(3, length, 8, dtype=torch.float64), []
        for call in (layer, compiled):
            layer.zero_grad()
            own = x.clone().requires_grad_()
            torch._dynamo.mark_dynamic(own, 1)
            out = call(own, is_causal=True)
            out.backward(torch.cos(out.detach()))
            results.append([out.detach(), own.grad, *(p.grad.clone() for p in layer.parameters())])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("world", "tp", "backend", "kv_heads"), [(2, 1, "inductor", 1), (4, 2, "aot_eager", 4)], ids=str
)
def test_attention_is_compiled_once_for_all_lengths(ranks, world, tp, backend, kv_heads):
    ranks(world).run(attention_of_any_length, tp, backend, kv_heads)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def compiled_styles(rank, size):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    for plan in (
        {
            "": OverlapSharedGather("gate", "up", argument="x"),
            "gate": OverlapColwiseParallel(),
            "up": OverlapColwiseParallel(),
            "down": OverlapRowwiseParallel(output_layouts=Shard(1)),
        },
        {
            "gate": OverlapColwiseParallel(input_layouts=Shard(1)),
            "up": OverlapColwiseParallel(input_layouts=Shard(1)),
            "down": OverlapRowwiseParallel(output_layouts=Replicate()),
        },
    ):
        module = Mlp()
        for name, style in plan.items():
            parallelize_module(module.get_submodule(name), mesh, style)
        outs = []
        for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
            own = torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8).requires_grad_()
            out = call(own)
            out.sum().backward()
            outs.append((out.detach(), own.grad))
        for eager, compiled in zip(*outs, strict=True):
            torch.testing.assert_close(compiled, eager)


def test_compiled_styles(ranks):
    ranks(2).run(compiled_styles)


def compiled_by_inductor(rank, size):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = ParallelMLP(8, 10, sequence_parallel=True)
    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x))


def test_inductor(ranks):
    ranks(2).run(compiled_by_inductor)


def dynamic_rows(rank, size):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = ParallelMLP(8, 10, sequence_parallel=True, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 6, 9):
        x = torch.randn(length, 8, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), module(x))


def test_dynamic_number_of_rows(ranks):
    ranks(2).run(dynamic_rows)


def fake_shapes(rank, size, m, n):
    world = dist.group.WORLD
    rows, columns = (Shards.even(total, size).size(rank) for total in (m, n))
    with FakeTensorMode():
        x = torch.empty(rows, 8)
        out, gathered = overlap_gemm.all_gather_gemm(
            x, torch.empty(6, 8), group=world, rows=m, return_gathered=True
        )
        assert out.shape == (m, 6)
        assert gathered.shape == (m, 8)
        whole = torch.empty(m, 8)
        assert overlap_gemm.gemm_reduce_scatter(whole, torch.empty(6, 8)).shape == (rows, 6)
        assert overlap_gemm.gemm_all_reduce(whole, torch.empty(6, 8)).shape == (m, 6)
        out = overlap_gemm.gemm_all_gather(whole, torch.empty(columns, 8), columns=n)
        assert out.shape == (m, n)
        assert type(out).__name__ == "FakeTensor"


@pytest.mark.parametrize("world", [1, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def test_fake_shapes(ranks, world):
    for m, n in ((8, 8), (7, 5), (2, 1)):
        ranks(world).run(fake_shapes, m, n)


def opchecks(rank, size):
    """torch.library's own checks: schema, fake kernel against the real one, autograd registration."""
    torch.manual_seed(0)
    ops, group = torch.ops.overlap_gemm, dist.group.WORLD.group_name
    x = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(5, 6, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    rows, none = 4 * size, (None, None)
    gathering = OpCall(group, rows, 10 * size, 6, 4, keep=True, backend="torch", reserve_sms=8)
    alone = OpCall(
        group, rows, None, 6, 4, backend="sequential", deterministic=True, reserve_sms=0, copied_weight=True
    )
    scattering = OpCall(
        group, 4, 5, None, -(-4 // size), 1, backend="torch", deterministic=False, reserve_sms=0
    )
    reducing = OpCall(group, 4, 5, 6 * size, -(-4 // size), backend="decomposed", deterministic=True)
    columns = OpCall(group, 4, 5 * size, 6, 5, backend="sequential")
    for op, args in (
        (ops.all_gather_gemm, (x, [weight, weight], [bias, bias], *none, *gathering)),
        (ops.all_gather_gemm, (x, [weight], [], *none, *alone)),
        (ops.gemm_reduce_scatter, (x, weight, bias, *none, *scattering)),
        (ops.gemm_all_reduce, (x, weight, None, *none, *reducing)),
        (ops.gemm_all_gather, (x, weight, bias, *none, *columns)),
        (ops.column_parallel_gemm, (x, [weight, weight], [bias, bias], *none, *OpCall(group, 4, None, 6))),
        (ops.keep_shard, (x, 1, group)),
        (ops.join_shards, (x, 1, 6 * size, group)),
        (ops.sum_over_ranks, (x, group)),
        (ops.copy_to_ranks, (x, group)),
        (ops.all_gather_rows, (x, rows, 4, group)),
        (ops.reduce_scatter_rows, (x, -(-4 // size), group, "auto", None)),
        (ops.reduce_scatter_rows, (x, -(-4 // size), group, "torch", False)),
    ):
        torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_opcheck(ranks, world):
    ranks(world).run(opchecks)
