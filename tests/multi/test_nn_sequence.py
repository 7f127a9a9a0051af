"""What every rank has beside layers with sequence parallelism: norms, biases, marks, and who forgot them."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_gemm import nn as ours
from overlap_gemm.nn import ColumnParallelLinear, RowParallelLinear, SequenceParallelWarning
from overlap_gemm.spec.sharding import Shards

DOUBLE = {"dtype": torch.float64}
ROWS, WIDTH = 7, 6


class Gate(nn.Module):
    """A user's own module: a norm without a name."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, **DOUBLE))
        self.inner = nn.LayerNorm(WIDTH, **DOUBLE)

    def forward(self, x):
        return self.inner(x) * self.scale


class Block(nn.Module):
    """norm, up, relu, down, added to what came in; then a norm again."""

    def __init__(self, norm, up, down, last):
        super().__init__()
        self.norm, self.up, self.down, self.last = norm, up, down, last

    def forward(self, x):
        return self.last(x + self.down(torch.relu(self.up(self.norm(x)))))


def norm_of(kind, **options):
    if kind == "gate":
        return Gate()
    name = {"layer": "LayerNorm", "rms": "RMSNorm", "plain": "LayerNorm"}[kind]
    return getattr(ours if options else nn, name)(WIDTH, **options, **DOUBLE)


def blocks(kind, sequence_dim=0, group=None, sequence_parallel=True):
    torch.manual_seed(3)
    linears = nn.Linear(WIDTH, 10, **DOUBLE), nn.Linear(10, WIDTH, **DOUBLE)
    whole = Block(norm_of(kind), *linears, norm_of(kind))
    for parameter in (*whole.norm.parameters(), *whole.last.parameters()):
        nn.init.normal_(parameter)
    options = {"sequence_parallel": sequence_parallel, "tp_group": group}
    known = options if kind in ("layer", "rms") else {}
    sharded = Block(
        norm_of(kind, **known),
        ColumnParallelLinear.from_linear(linears[0], sequence_dim=sequence_dim, rows=ROWS, **options),
        RowParallelLinear.from_linear(linears[1], sequence_dim=sequence_dim, **options),
        norm_of(kind, **known),
    )
    for own, other in ((sharded.norm, whole.norm), (sharded.last, whole.last)):
        own.load_state_dict(other.state_dict())
    return whole, sharded


def step(whole, sharded, rank, size, dim=0, factor=1.0):
    x = factor * torch.linspace(-1, 1, ROWS * 2 * WIDTH, **DOUBLE).cos().view(ROWS, 2, WIDTH)
    x = x if dim == 0 else x.transpose(0, 1).contiguous()
    start, stop = Shards.even(ROWS, size).range(rank)
    whole(x).pow(3).sum().backward()
    sharded(x.narrow(dim, start, stop - start)).pow(3).sum().backward()


def same_gradients(whole, sharded):
    expected = dict(whole.named_parameters())
    for name in ("norm", "last"):
        for key, parameter in getattr(sharded, name).named_parameters():
            torch.testing.assert_close(parameter.grad, expected[f"{name}.{key}"].grad, msg=f"{name}.{key}")


def knows(rank, size, kind, dim):
    """Gradients accumulate over two passes; a copy's are its own."""
    whole, sharded = blocks(kind, dim)
    sharded = copy.deepcopy(sharded)
    for factor in (1.0, 0.3):
        step(whole, sharded, rank, size, dim, factor)
    same_gradients(whole, sharded)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(ours.clip_grad_norm_(sharded, 0.1), expected)
    same_gradients(whole, sharded)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_that_know(ranks, kind, dim):
    ranks(3).run(knows, kind, dim)


def marked(rank, size):
    whole, sharded = blocks("gate")
    for module in (sharded.norm, sharded.last):
        found = ours.sequence_parallel_parameters(module)
        assert all(parameter.sequence_parallel for parameter in found) and len(found) == 3
    for factor in (1.0, 0.3):
        step(whole, sharded, rank, size, factor=factor)
    twin = copy.deepcopy(sharded)
    ours.sum_sequence_parallel_gradients(sharded)
    same_gradients(whole, sharded)
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in twin.parameters())
    twin.norm.scale.grad = None if rank == 0 else torch.ones(WIDTH, **DOUBLE)
    ours.sum_sequence_parallel_gradients(twin)  # by the modules' marks
    assert torch.equal(twin.norm.scale.grad, torch.full((WIDTH,), size - 1.0, **DOUBLE))
    other = nn.Linear(2, 2)
    other.weight.sequence_parallel = True  # as TransformerEngine has it
    other.weight.grad, other.bias.grad = torch.ones(2, 2), torch.ones(2)
    ours.sum_sequence_parallel_gradients(other)
    assert torch.equal(other.weight.grad, torch.full((2, 2), float(size)))
    assert torch.equal(other.bias.grad, torch.ones(2))


def test_marked_parameters(ranks):
    ranks(3).run(marked)


def shards_further(rank, size, kind):
    """FSDP beside tensor parallelism: both replicas see the same, so that the mean is one's gradient."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    whole, sharded = blocks(kind, group=mesh["tp"])
    if kind == "gate":
        for module in (sharded.norm, sharded.last):
            ours.sequence_parallel_parameters(module)
    fully_shard(sharded, mesh=mesh["dp"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SequenceParallelWarning)  # FSDP's copies bear no mark
        step(whole, sharded, mesh.get_local_rank("tp"), size // 2)
    if kind == "gate":
        ours.sum_sequence_parallel_gradients(sharded, mesh["tp"])
    for name, parameter in whole.named_parameters():
        if name.startswith(("norm", "last")):
            found = dict(sharded.named_parameters())[name].grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad, msg=name)


@pytest.mark.parametrize("kind", ["layer", "gate"])
def test_under_fsdp(ranks, kind):
    ranks(4).run(shards_further, kind)


def forgotten(rank, size):
    whole, sharded = blocks("plain")
    with pytest.warns(SequenceParallelWarning, match=r"\[6\], \[6\] are applied to this rank's rows") as seen:
        step(whole, sharded, rank, size)
        step(whole, sharded, rank, size)
    assert len(seen) == 1, "once per layer"
    with pytest.raises(ValueError, match=r"norm\.weight, norm\.bias, last\.weight, last\.bias must be equal"):
        ours.clip_grad_norm_(sharded, 1.0)
    mlp = ours.ParallelMLP(WIDTH, 10, sequence_parallel=True, rows=ROWS, **DOUBLE)
    start, stop = Shards.even(ROWS, size).range(rank)
    with pytest.warns(SequenceParallelWarning):
        mlp(sharded.norm(torch.ones(stop - start, 2, WIDTH, **DOUBLE)))
    replicated = blocks("plain", sequence_parallel=False)[1]  # nothing to be summed, nothing said
    x = torch.linspace(-1, 1, ROWS * WIDTH, **DOUBLE).view(ROWS, 1, WIDTH)
    replicated(x).pow(3).sum().backward()
    ours.clip_grad_norm_(replicated, 1.0)


def test_forgotten(ranks):
    ranks(3).run(forgotten)


def biases(rank, size):
    torch.manual_seed(rank)  # seeds that differ
    layer = RowParallelLinear(WIDTH, 5)
    drawn = [layer.bias.detach().clone()]
    layer.reset_parameters()
    drawn.append(layer.bias.detach().clone())
    empty = RowParallelLinear(WIDTH, 5, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    drawn.append(empty.bias.detach().clone())
    everyone = [None] * size
    dist.all_gather_object(everyone, drawn)
    for other in everyone:
        assert all(torch.equal(a, b) for a, b in zip(other, everyone[0], strict=True))
    assert not torch.equal(drawn[0], drawn[1])


def test_row_parallel_biases_are_rank_zeros(ranks):
    ranks(3).run(biases)
