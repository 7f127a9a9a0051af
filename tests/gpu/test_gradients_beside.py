"""Weight gradients whose gather goes by copy engines beside the fused kernel of x's gradient."""

import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends import by_shards
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.launches import SLEEP_CYCLES
from tests.support.shares import own_device

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]


class Layer:
    """A column-parallel product of `widths[i] * size` features, whole, on a device, and its gradients."""

    def __init__(self, seed, rows, depth, widths, rank, size):
        generator = torch.Generator().manual_seed(seed)
        device, self.rows = own_device(rank), rows
        draw = lambda *shape: torch.randn(shape, generator=generator).to(device, torch.bfloat16)  # noqa: E731
        self.x = draw(rows, depth)
        every = [[(draw(n, depth) / depth**0.5, draw(rows, n)) for n in widths] for _ in range(size)]
        self.weights, self.grads = zip(*every[rank], strict=True)
        self.own = slice(*Shards.even(rows, size).range(rank))
        self.every = every

    def leaves(self):
        """The rank's x and weights, to be differentiated."""
        return [t.clone().requires_grad_() for t in (self.x[self.own], *self.weights)]

    def backward(self, x, *weights):
        """Gradients of x and the weights."""
        outs = overlap_gemm.all_gather_gemm(x, list(weights), rows=self.rows, backend="fused")
        return torch.autograd.grad(outs, [x, *weights], self.grads)

    def judge(self, grad_x, *grad_weights):
        """Twice what products of this dtype err; x's gradient is a sum of rounded partials."""
        for found, grad in zip(grad_weights, self.grads, strict=True):
            exact, alike = grad.double().t() @ self.x.double(), (grad.t() @ self.x).double()
            assert (found.double() - exact).abs().max() <= 2 * (alike - exact).abs().max() + 1e-6
        partials = [sum(g.double() @ w.double() for w, g in pairs) for pairs in self.every]
        exact, alike = sum(partials), sum(p.bfloat16().double() for p in partials).bfloat16().double()
        allowed = 2 * (alike - exact).abs().max() + 1e-6
        assert (grad_x.double() - exact[self.own]).abs().max() <= allowed


def random_layers(seed, rank, size):
    draw = random.Random(seed)
    for i in range(12):
        rows, widths = (
            draw.choice([size, 67, 256 * size, 2000]),
            [draw.choice([64, 72])] * draw.choice([1, 2]),
        )
        yield Layer(100 * seed + i, rows, draw.choice([64, 512]), widths, rank, size), draw.random() < 0.6


def copies_from(nbytes):
    """Shards of at least so many bytes go by copy engines."""
    return mock.patch.object(by_shards, "constants", lambda arch: SimpleNamespace(copy_bytes=nbytes))


def mixed(rank, size, seed, late):
    """Some by copies, some not, with the forward's gathers in the same workspaces between."""
    found, calls = [], mock.Mock(wraps=by_shards.ByShards.alongside)
    counted = lambda plan, *a: calls(plan, *a)  # noqa: E731
    with poisoned_allocations(), mock.patch.object(by_shards.ByShards, "alongside", counted):
        for i, (layer, small) in enumerate(random_layers(seed, rank, size)):
            if rank == late and i % 3 == 0:
                torch.cuda._sleep(SLEEP_CYCLES)
            overlap_gemm.close_workspaces() if i == 6 else None
            with copies_from(0 if small else 1 << 40):
                found.append((layer, layer.backward(*layer.leaves())))
        torch.cuda.synchronize()
    assert calls.call_count >= 3
    for layer, gradients in found:
        layer.judge(*gradients)
    overlap_gemm.close_workspaces()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_random_sequences(ranks, seed, late, world):
    ranks(world).run(mixed, seed, late)


def replayed(rank, size):
    layer = Layer(1, 512, 256, [64, 72], rank, size)
    with copies_from(0):
        leaves = layer.leaves()
        layer.backward(*leaves)  # compiles and allocates
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = [layer.backward(*leaves) for _ in range(3)]
    for launch in range(10):
        other = Layer(launch, 512, 256, [64, 72], rank, size)
        with torch.no_grad():
            for leaf, given in zip(leaves, (other.x[other.own], *other.weights), strict=True):
                leaf.copy_(given)
            for grad, given in zip(layer.grads, other.grads, strict=True):
                grad.copy_(given)
            for gradients in results:
                for gradient in gradients:
                    gradient.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for gradients in results:
            other.judge(*gradients)
    overlap_gemm.close_workspaces()


@pytest.mark.parametrize("world", WORLDS)
def test_replays(ranks, world):
    ranks(world).run(replayed)
