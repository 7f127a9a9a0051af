"""Calls of `gemm_all_to_all` with lists of weights on virtual ranks, and what each rank should get."""

import torch

import overlap_gemm
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.testing.emulated import poisoned_allocations
from tests.support.emulated.scaled_cases import ACCUMULATION


def counted_launches(monkeypatch):
    """Returns a list to which each call appends the number of its kernels."""
    seen, launch = [], Plan.launch

    def counting(plan, *arguments):
        seen.append(len(plan.products))
        return launch(plan, *arguments)

    monkeypatch.setattr(Plan, "launch", counting)
    return seen


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
