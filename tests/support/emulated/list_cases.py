"""Calls with lists of weights on virtual ranks, their gradients, and exact results."""

from dataclasses import replace

import torch

import overlap_gemm
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.nn import column_parallel_gemm
from overlap_gemm.spec import PATTERNS
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.emulated.op_runs import world_of
from tests.support.emulated.scaled_cases import ACCUMULATION


def counted_launches(monkeypatch):
    """Returns a list to which each call appends the number of its kernels."""
    seen, launch = [], Plan.launch

    def counting(plan, *arguments):
        seen.append(len(plan.products))
        return launch(plan, *arguments)

    monkeypatch.setattr(Plan, "launch", counting)
    return seen


def check_one_launch(operands, launches, arch, ranks, fields, transport):
    """Checks the results of a call with a list, and that each rank launches one kernel."""
    with world_of(arch, ranks, fields, transport=transport) as world:
        outs = operands.call(world)
        world.synchronize()
    operands.check(outs)
    assert launches == [1] * ranks


def several_launches(monkeypatch):
    """Makes a list of weights of gathered rows a launch for each weight, as with scales of blocks."""
    pattern = replace(PATTERNS["input_gather"], takes_lists=False)
    monkeypatch.setitem(PATTERNS, "input_gather", pattern)


class Operands:
    """Operands of all ranks, and results in float64; `scaled`: of 8 bits with scales of rows."""

    def __init__(self, rows, widths, depth=72, scaled=False, seed=0, device="cpu"):
        made = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, depth, generator=made).bfloat16()
        self.weights = [torch.randn(n, depth, generator=made).bfloat16() for n in widths]
        self.biases = [torch.randn(n, generator=made).bfloat16() for n in widths]
        self.scales = None
        values = self.x.double(), [weight.double() for weight in self.weights]
        if scaled:
            quantized = [overlap_gemm.quantize_rows(one) for one in (self.x, *self.weights)]
            self.x, *self.weights = (one.values for one in quantized)
            self.scales = quantized[0].scale, [one.scale for one in quantized[1:]]
            full, *of_weights = [one.values.double() * one.scale for one in quantized]
            values = full, of_weights
        self.sizes = [values[0].abs() @ weight.t().abs() for weight in values[1]]
        pairs = zip(values[1], self.biases, strict=True)
        self.exact = [values[0] @ weight.t() + bias.double() for weight, bias in pairs]
        self.x, self.weights = self.x.to(device), [one.to(device) for one in self.weights]
        self.biases = [one.to(device) for one in self.biases]
        if self.scales is not None:
            self.scales = self.scales[0].to(device), [one.to(device) for one in self.scales[1]]

    def call(self, world, **options):
        """Returns the lists of results of all ranks."""
        ranks = len(world.names)
        of_x = [None] * ranks if self.scales is None else self.scales[0].chunk(ranks)
        of_weights = None if self.scales is None else self.scales[1]
        with poisoned_allocations():
            return [
                overlap_gemm.gemm_all_to_all(
                    x, self.weights, bias=self.biases, group=group, rows=len(self.x), backend="fused",
                    scale_x=of_rows, scale_w=of_weights, **options,
                )
                for x, of_rows, group in zip(self.x.chunk(ranks), of_x, world.names, strict=True)
            ]  # fmt: skip

    def check(self, outs):
        """Compares the results of all ranks, joined."""
        for i, exact in enumerate(self.exact):
            made = torch.cat([of_rank[i].cpu() for of_rank in outs], -1)
            assert all(of_rank[i].is_contiguous() for of_rank in outs)
            lost = ACCUMULATION if self.scales is not None else 2**-16
            assert made.shape == exact.shape
            assert ((made.double() - exact).abs() <= 2**-8 * exact.abs() + lost * self.sizes[i]).all()


class GatheredOperands:
    """Operands of `all_gather_gemm` with a list of weights; ranks have different numbers of rows of each.

    Args:
        rows: Rows over all ranks.
        widths: Rows of each weight of each rank.
        depth: K.
        scaled: Whether the operands have 8 bits and scales of rows.
    """

    def __init__(self, rows, widths, depth=72, scaled=False):
        made = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=made).bfloat16()

        self.x, self.scale_x, self.rows = random(rows, depth), None, rows
        self.weights = [[random(n, depth) for n in of_rank] for of_rank in widths]
        self.biases = [[random(n) for n in of_rank] for of_rank in widths]
        self.scales = [None] * len(widths)
        x, weights = self.x.double(), [[one.double() for one in of_rank] for of_rank in self.weights]
        if scaled:
            of_x = overlap_gemm.quantize_rows(self.x)
            quantized = [[overlap_gemm.quantize_rows(one) for one in of_rank] for of_rank in self.weights]
            self.x, self.scale_x = of_x.values, of_x.scale
            self.weights = [[one.values for one in of_rank] for of_rank in quantized]
            self.scales = [[one.scale for one in of_rank] for of_rank in quantized]
            x = of_x.values.double() * of_x.scale
            weights = [[one.values.double() * one.scale for one in of_rank] for of_rank in quantized]
        self.gathered = self.x
        self.exact = [
            [x @ weight.t() + bias.double() for weight, bias in zip(*of_rank, strict=True)]
            for of_rank in zip(weights, self.biases, strict=True)
        ]
        self.sizes = [[x.abs() @ weight.t().abs() for weight in of_rank] for of_rank in weights]

    def call(self, world, **options):
        """Returns the results of all ranks, with the gathered x first if it is wanted."""
        ranks = len(world.names)
        of_x = [None] * ranks if self.scale_x is None else self.scale_x.chunk(ranks)
        shards = [*self.x.chunk(ranks), *[self.x[:0]] * ranks][:ranks]
        each = zip(shards, of_x, self.weights, self.scales, self.biases, world.names, strict=True)
        with poisoned_allocations():
            return [
                overlap_gemm.all_gather_gemm(
                    x, weights, bias=biases, scale_x=of_rows, scale_w=of_weights, rows=self.rows,
                    group=group, backend="fused", **options,
                )
                for x, of_rows, weights, of_weights, biases, group in each
            ]  # fmt: skip

    def check(self, outs):
        """Compares the results of all ranks."""
        lost = ACCUMULATION if self.scale_x is not None else 2**-16
        for of_rank, exact, sizes in zip(outs, self.exact, self.sizes, strict=True):
            for made, correct, size in zip(of_rank, exact, sizes, strict=True):
                assert made.shape == correct.shape
                assert ((made.double() - correct).abs() <= 2**-8 * correct.abs() + lost * size).all()


class Layer:
    """Projections of all ranks, gradients of their results, and the exact gradients in float64.

    Args:
        rows: Rows over all ranks.
        widths: Columns of each weight.
        heads: Heads of each weight; None: columns.
        seed: Seed of the operands.
        device: Device of the operands.
    """

    def __init__(self, rows, widths, heads=None, seed=0, device="cpu"):
        made = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, 72, generator=made).bfloat16()
        self.weights = [torch.randn(n, 72, generator=made).bfloat16() / 8 for n in widths]
        self.heads, self.made, self.device = heads, made, device

    rounding = 0.0
    """Relative error of a rank's part of a sum over the ranks."""

    def rows_of(self, rank, ranks):
        """Returns the rows of x that a rank passes."""
        return self.x.chunk(ranks)[rank]

    def columns(self, number, rank, ranks):
        """Returns a rank's columns of a weight."""
        width = len(self.weights[number])
        if self.heads is not None and self.heads[number] < ranks:
            size = width // self.heads[number]
            first = rank * self.heads[number] // ranks * size
            return slice(first, first + size)
        return slice(rank * width // ranks, (rank + 1) * width // ranks)

    def laid_out(self, grad, number):
        """Returns the gradient of a result in the memory layout of the case."""
        return grad

    def passed(self, rank, ranks):
        """Returns the weights that a rank passes: all of each."""
        return [weight.to(self.device, copy=True) for weight in self.weights]

    def called(self, x, weights, **how):
        """Returns the results of a call."""
        return overlap_gemm.gemm_all_to_all(x, weights, heads=self.heads, backend="fused", **how)

    def backward(self, names, with_weights):
        """Queues the gradients on all ranks; `check` compares them."""
        ranks, self.exact_x, self.partials, self.grads = len(names), 0, 0, []
        self.exact = [0 for _ in self.weights]
        operands, outs = [], []
        for rank in range(ranks):
            upstream, partial = [], 0
            for i, weight in enumerate(self.weights):
                of = self.columns(i, rank, ranks)
                grad = torch.randn(len(self.x), of.stop - of.start, generator=self.made).bfloat16()
                partial = partial + grad.double() @ weight[of].double()
                full = torch.zeros(weight.shape, dtype=torch.float64)
                full[of] = grad.double().t() @ self.x.double()
                self.exact[i] = self.exact[i] + full
                upstream.append(self.laid_out(grad, i).to(self.device))
            self.exact_x, self.partials = self.exact_x + partial, self.partials + partial.abs()
            local = self.rows_of(rank, ranks).to(self.device, copy=True).requires_grad_()
            weights = self.passed(rank, ranks)
            for weight in weights:
                weight.requires_grad_(with_weights)
            operands.append((local, weights, upstream))
        # A copy to a GPU would wait for kernels that wait for ranks that have not called yet.
        with poisoned_allocations():
            for group, (local, weights, _) in zip(names, operands, strict=True):
                outs.append(self.called(local, weights, rows=len(self.x), group=group))
            for of_rank, (local, weights, upstream) in zip(outs, operands, strict=True):
                needed = [local, *(weights if with_weights else ())]
                self.grads.append(torch.autograd.grad(of_rank, needed, upstream))

    def check(self):
        grad_x = torch.cat([of_rank[0].cpu() for of_rank in self.grads]).double()
        allowed = 2**-8 * self.exact_x.abs() + self.rounding * self.partials + 1e-3
        assert ((grad_x - self.exact_x).abs() <= allowed).all()
        for _, *of_weights in self.grads:
            for made, exact in zip(of_weights, self.exact, strict=False):
                torch.testing.assert_close(made.cpu().double(), exact, rtol=0.02, atol=0.2)


class GatheredLayer(Layer):
    """Projections of gathered rows: each rank has its columns of the weights.

    A gradient is laid out by `layouts`: "rows", "columns" (transposed), or "slice" of a wider tensor.
    """

    layouts = ("rows",)
    rounding = 2**-8  # partial sums are sent in bfloat16

    def laid_out(self, grad, number):
        layout = self.layouts[number % len(self.layouts)]
        if layout == "columns":
            return grad.t().contiguous().t()
        if layout == "slice":
            wide = torch.full((len(grad), grad.shape[1] + 16), torch.nan, dtype=grad.dtype)
            wide[:, 8:-8] = grad
            return wide[:, 8:-8]
        return grad

    def passed(self, rank, ranks):
        of_ranks = [weight[self.columns(i, rank, ranks)] for i, weight in enumerate(self.weights)]
        return [weight.to(self.device, copy=True) for weight in of_ranks]

    def called(self, x, weights, **how):
        return overlap_gemm.all_gather_gemm(x, weights, backend="fused", **how)


class ReplicatedLayer(GatheredLayer):
    """Projections of rows that every rank has; each rank has its columns of the weights."""

    def rows_of(self, rank, ranks):
        return self.x

    def called(self, x, weights, rows, group):
        return column_parallel_gemm(x, weights, None, group, "fused")

    def check(self):
        first, *others = [of_rank[0] for of_rank in self.grads]
        assert all(torch.equal(first, other) for other in others)
        for rank, of_rank in enumerate(self.grads):
            for i, made in enumerate(of_rank[1:]):
                of = self.columns(i, rank, len(self.grads))
                torch.testing.assert_close(made.cpu().double(), self.exact[i][of], rtol=0.02, atol=0.2)
        allowed = 2**-8 * self.exact_x.abs() + self.rounding * self.partials + 1e-3
        assert ((first.cpu().double() - self.exact_x).abs() <= allowed).all()
