"""Shards by copy engines, a gate and cuBLAS (`backends.by_shards`), a GPU per rank."""

import random

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.collectives import gemm
from overlap_gemm.backends.op_call import with_fallback
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.launches import SLEEP_CYCLES
from tests.support.shares import own_device

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]


class Problem:
    """A gather and the products of several weights, whole, on a device."""

    def __init__(self, seed, rows, depth, widths, dtype, device):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
        self.x, self.weights = draw(rows, depth), [draw(n, depth) / depth**0.5 for n in widths]
        self.biases = [draw(n) for n in widths] if seed % 2 else None

    def call(self, rank, size, backend, keep, **group):
        """This rank's gathered x (if kept) and products."""
        own = self.x[slice(*Shards.even(len(self.x), size).range(rank))].contiguous()
        result = overlap_gemm.all_gather_gemm(
            own,
            self.weights,
            bias=self.biases,
            rows=len(self.x),
            return_gathered=keep,
            backend=backend,
            **group,
        )
        return result[::-1] if keep else (None, result)

    def judge(self, gathered, outs):
        """Twice what torch's own product of this dtype errs."""
        assert gathered is None or torch.equal(gathered, self.x)
        for i, (weight, out) in enumerate(zip(self.weights, outs, strict=True)):
            bias = None if self.biases is None else self.biases[i]
            exact = self.x.double() @ weight.double().t() + (0 if bias is None else bias.double())
            alike = gemm(self.x, weight, bias).double()
            allowed = 2 * (alike - exact).abs().max() + 1e-6
            error = (out.double() - exact).abs().max()
            assert error <= allowed, f"{error} > {allowed}: {list(out.shape)} {out.dtype}"


def random_problems(seed, size, count, device):
    draw = random.Random(seed)
    for i in range(count):
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16])
        rows = draw.choice([1, size - 1, size, 67, 256 * size, 2000])
        widths = [draw.choice([1, 64, 72, 1000]) for _ in range(draw.choice([1, 1, 2]))]
        # The same workspace: fused calls among them.
        backend = "fused" if dtype.itemsize == 2 and draw.random() < 0.4 else "decomposed"
        yield Problem(i, rows, draw.choice([8, 61, 512]), widths, dtype, device), backend, draw.random() < 0.4


def mixed(rank, size, seed, late):
    device, queued = own_device(rank), []
    with poisoned_allocations():
        for i, (problem, backend, keep) in enumerate(random_problems(seed, size, 30, device)):
            if rank == late and i % 4 == 0:
                torch.cuda._sleep(SLEEP_CYCLES)
            queued.append((problem, *problem.call(rank, size, backend, keep)))
        torch.cuda.synchronize()
    for problem, gathered, outs in queued:
        problem.judge(gathered, outs)
    overlap_gemm.close_workspaces()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_with_the_fused_op(ranks, seed, late, world):
    ranks(world).run(mixed, seed, late)


def replayed(rank, size):
    problem, device = Problem(1, 512, 256, [200], torch.float32, own_device(rank)), own_device(rank)
    problem.call(rank, size, "decomposed", True)  # compiles and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    own = slice(*Shards.even(512, size).range(rank))
    x = problem.x[own].clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [
            overlap_gemm.all_gather_gemm(
                x,
                problem.weights,
                bias=problem.biases,
                rows=512,
                return_gathered=True,
                # as in a backward pass, or where `auto` has chosen it for captures: another plan, made here
                backend=with_fallback("decomposed"),
            )
            for _ in range(3)
        ]
    for launch in range(10):
        problem.x.copy_(Problem(launch, 512, 256, [200], torch.float32, device).x)
        x.copy_(problem.x[own])
        for outs, gathered in results:
            gathered.fill_(torch.nan)
            outs[0].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for outs, gathered in results:
            problem.judge(gathered, outs)
    overlap_gemm.close_workspaces()


@pytest.mark.parametrize("world", WORLDS)
def test_replays(ranks, world):
    ranks(world).run(replayed)
