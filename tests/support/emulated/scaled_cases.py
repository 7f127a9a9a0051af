"""Cases of ops on operands of 8 bits, their references, and the bound of their error."""

from dataclasses import dataclass

import torch

import overlap_gemm
from cute_emulator import EmulatorError
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.emulated import joined_results, poisoned_allocations
from tests.support.emulated.op_runs import lagging, world_of

ACCUMULATION = 2.0**-10
"""Of sum |x w|: what 14-bit sums lose of normal values, with room (docs/fp8.md)."""


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


RS, AR, AG = "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_gather"


GATHER, A2A, DUAL = "all_gather_gemm", "gemm_all_to_all", "all_to_all_gemm"


@dataclass(frozen=True)
class Scaled:
    """A call of all ranks: sizes over all of them, types, how scales come."""

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = E4M3
    out: torch.dtype = torch.bfloat16
    bias: bool = True
    tensorwise: bool = False
    seed: int = 0
    blocks: int = 0
    weight: torch.dtype | None = None

    def operands(self, rank, ranks):
        """(x, weight, bias, scale_x, scale_w) of a rank."""
        spec = OPS[self.op]
        own = lambda extent: Shards.even(extent, ranks).size(rank)  # noqa: E731
        (m, k), (n, depth) = spec.shapes(self.m, self.n, self.k, own)
        rank = 0 if spec.x is None else rank
        given = torch.Generator().manual_seed(1000 * self.seed + rank)
        x = torch.randn(m, k, generator=given).to(self.dtype)
        scale_x = 2 ** (4 * torch.rand(1 if self.tensorwise else m, 1, generator=given) - 2)
        bias = torch.randn(self.n, generator=torch.Generator().manual_seed(self.seed)).to(self.out)
        rows = torch.Generator().manual_seed(5000 * (self.seed + 1) + (rank if spec.weight == "k" else 0))
        every = self.n if spec.weight == "n" else n
        weight = (torch.randn(every, depth, generator=rows) / 8).to(self.weight or self.dtype)
        scale_w = 2 ** (4 * torch.rand(1 if self.tensorwise else every, 1, generator=rows) - 2)
        if self.blocks:
            size = self.blocks
            of_x, of_weight = (max(-(-along // size), 1) for along in (k, depth))
            scale_x = 2 ** (4 * torch.rand(m, of_x, generator=given) - 2)
            scale_w = 2 ** (4 * torch.rand(-(-every // size), of_weight, generator=rows) - 2)
        return x, weight, bias if self.bias else None, scale_x, scale_w


def of_rank(case, rank, ranks):
    """Those of `Scaled.operands`, with the rank's rows of the weight where these are sharded."""
    x, weight, bias, scale_x, scale_w = case.operands(rank, ranks)
    if OPS[case.op].weight == "n":
        rows = slice(*Shards.even(case.n, ranks).range(rank))
        weight, bias = weight[rows], None if bias is None else bias[rows].clone()
        if case.blocks:
            scale_w = scale_w[rows.start // case.blocks : -(-rows.stop // case.blocks)]
        elif not case.tensorwise:
            scale_w = scale_w[rows]
    return x, weight, bias, scale_x, scale_w


def queue(case, world, change=lambda rank, given: given):
    """Calls the op on every rank; `change` may spoil what one of them is given."""
    outs, ranks = [], len(world.names)
    with poisoned_allocations():
        for rank, name in enumerate(world.names):
            x, weight, bias, scale_x, scale_w = change(rank, of_rank(case, rank, ranks))
            extents = OPS[case.op].arguments(case.m, case.n, case.k, least=True)
            outs.append(
                getattr(overlap_gemm, case.op)(
                    x, weight, group=name, bias=bias, scale_x=scale_x, scale_w=scale_w,
                    out_dtype=case.out, block=case.blocks or None, backend="fused", deterministic=False,
                    **extents,
                )
            )  # fmt: skip
    return outs


def dequantised(matrix, scale, size=0):
    """In float64, by scales of rows, of all, or of blocks."""
    rows, depth = matrix.shape
    if size:
        scale = scale if len(scale) == rows else scale.repeat_interleave(size, 0)[:rows]
        scale = scale.repeat_interleave(size, 1)[:, :depth]
    return matrix.double() * scale


def share_of_bound(case, outs):
    """The largest error as a share of what may be lost (docs/fp8.md)."""
    spec, ranks = OPS[case.op], len(outs)
    exact = magnitude = rounded = torch.zeros((), dtype=torch.float64)
    every = [case.operands(rank, ranks) for rank in range(1 if spec.x is None else ranks)]
    bias = every[0][2]
    is_joined = spec.x == "m" or spec.reshards_k
    if is_joined:
        parts = [dequantised(x, scale, case.blocks) for x, _, _, scale, _ in every]
        gathered = torch.cat(parts, 1 if spec.reshards_k else 0)
        every = [(gathered, every[0][1], bias, torch.ones(()), every[0][4])]
    for x, weight, _, scale_x, scale_w in every:
        a = dequantised(x, scale_x, 0 if is_joined else case.blocks)
        b = dequantised(weight, scale_w, case.blocks)
        exact, magnitude = exact + a @ b.t(), magnitude + a.abs() @ b.abs().t()
        rounded = rounded + (a @ b.t()).abs() * (ranks > 1 and spec.sums)
    exact = exact if bias is None else exact + bias.double()
    unit = torch.finfo(case.out).eps / 2
    bound = unit * (rounded + exact.abs()) * (1 + 2**-6) + ACCUMULATION * magnitude
    out = joined_results(outs, {"m": 0, "n": 1}.get(spec.out))
    assert out.dtype == case.out
    error = (out.double() - exact).abs()
    return float(torch.where(error <= bound, error / bound, torch.inf).max())


def check(case, world):
    """One call."""
    outs = queue(case, world)
    world.synchronize()
    assert share_of_bound(case, outs) <= 1


def gathers_hold(columns=(72, 24, 72), k=48, **kind):
    """Calls with other scales queued together, one rank after the others, in several orders of events."""
    for seed, starved in enumerate((1, 0, 2)):
        cases = [Scaled(GATHER, 192, n, k, seed=10 * seed + i, **kind) for i, n in enumerate(columns)]
        how = {"transport": "copy_engine", "mode": "lazy", "seed": seed, "schedule": lagging(starved)}
        try:
            with world_of("sm_90a", 3, num_sms=2, **how) as world:
                queued = [queue(case, world) for case in cases]
                world.synchronize()
        except EmulatorError:
            return False
        if any(share_of_bound(case, outs) > 1 for case, outs in zip(cases, queued, strict=True)):
            return False
    return True
