"""Launches of fused ops on virtual ranks, and a check of their results against float64.

The check is stricter than a tolerance, because a fused kernel rounds in a defined order:

1. An op that sums over P > 1 ranks rounds each rank's partial product to the slot dtype.
2. It adds the partials in float32, in rank order, then the bias.
3. It rounds the result once to the output dtype. An op without a sum over ranks does this step alone.

Let u be the unit roundoff of a dtype. The error of every element must be at most

    u_slot * sum over ranks of |partial|  +  u_out * |result|  +  rounding error of the float32 sums

(Higham, Accuracy and Stability of Numerical Algorithms, sections 2 and 4). The first term is zero without a
sum over ranks. In addition, `BIT_EQUAL_SHARE` of the elements must equal `recipe`, which takes the same steps
in torch. The others may differ: the kernel sums products in another order, which can cross a rounding
boundary. A result that is replicated must be the same bit for bit on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import overlap_gemm

from ..runtime.virtual import VirtualWorld
from ..spec import OPS
from .cases import LAYOUTS, Case, Operands, operands

BIT_EQUAL_SHARE = 0.99
"""Minimum share of elements that equal `recipe` bit for bit; a wrong order or rounding gives fewer."""

FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Judgement:
    """Errors of one launch's results on all ranks, relative to float64.

    Attributes:
        largest_error: Largest absolute error of an element.
        share_of_bound: Largest ratio of an element's error to its bound; more than 1 is wrong. Infinite if an
            element is NaN, for example because no kernel wrote it.
        bit_equal: Share of elements (0 to 1) that equal `recipe` bit for bit.
    """

    largest_error: float
    share_of_bound: float
    bit_equal: float

    @property
    def holds(self) -> bool:
        """Returns whether all errors are within their bounds and enough elements equal `recipe`."""
        return self.share_of_bound <= 1 and self.bit_equal >= BIT_EQUAL_SHARE


def judge(
    case: Case,
    unsharded: Operands,
    outs: Sequence[Tensor],
    slot: torch.dtype,
) -> Judgement:
    """Compares the results of all ranks with the product in float64.

    Args:
        case: Op, sizes and dtype.
        unsharded: Unsharded operands of the call.
        outs: Result of each rank, in rank order.
        slot: Dtype in which partials were sent; read only for ops that sum over ranks.

    Raises:
        AssertionError: The unsharded result is not `[M, N]`, or ranks differ in a replicated result.
    """
    layout, ranks = LAYOUTS[case.op], len(outs)
    sums = ranks > 1 and OPS[case.op].sums
    partials = []
    magnitude = unsharded.x.new_zeros(case.m, case.n, dtype=torch.float64)
    for rank in range(ranks if sums else 1):
        x = layout.part(unsharded.x, layout.x, rank, ranks) if sums else unsharded.x
        weight = layout.part(unsharded.weight, layout.weight, rank, ranks) if sums else unsharded.weight
        assert x is not None and weight is not None
        partials.append(x.double() @ weight.double().t())
        magnitude += x.double().abs() @ weight.double().abs().t()
    exact = sum(partials, torch.zeros_like(magnitude))
    if unsharded.bias is not None:
        exact = exact + unsharded.bias.double()
    out = joined_results(outs, layout.out)
    assert out.shape == exact.shape, f"result must be {list(exact.shape)}, got {list(out.shape)}"
    rounded = sum((p.abs() for p in partials), torch.zeros_like(magnitude)) * sums
    bound = (
        _roundoff(slot) * rounded
        + _roundoff(case.dtype) * exact.abs() * (1 + 2.0**-6)
        + FLOAT32_ROUNDOFF * (case.k + 2 * ranks) * (magnitude + exact.abs())
    )
    error = (out.double() - exact).abs()
    # A comparison with NaN is false: an element that was never written must not pass.
    share = torch.where(error <= bound, error / bound.clamp_min(1e-300), torch.inf)
    if not out.numel():
        return Judgement(0.0, 0.0, 1.0)
    equal = out == recipe(case, partials, unsharded.bias, slot)
    return Judgement(error.max().item(), share.max().item(), equal.double().mean().item())


def joined_results(outs: Sequence[Tensor], dim: int | None) -> Tensor:
    """Returns the unsharded result of the ranks' results.

    Args:
        outs: Result of each rank, in rank order.
        dim: Dimension along which results are sharded; None: every rank has the unsharded result.

    Raises:
        AssertionError: `dim` is None and a rank's bytes differ from those of rank 0.
    """
    if dim is not None:
        return torch.cat(list(outs), dim)
    for rank, out in enumerate(outs):
        same = out.view(torch.uint8) == outs[0].view(torch.uint8)
        assert same.all(), f"rank {rank}: {int((~same).sum())} bytes differ from those of rank 0"
    return outs[0]


def recipe(
    case: Case,
    partials: Sequence[Tensor],
    bias: Tensor | None,
    slot: torch.dtype,
) -> Tensor:
    """Returns the unsharded result in the kernel's order of roundings, computed by torch.

    Args:
        case: Case whose dtype the result gets.
        partials: Float64 product `[M, N]` of each rank, in rank order.
        bias: `[N]`, or None.
        slot: Dtype to which each partial is rounded if there are several.
    """
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total += partial.float() if len(partials) == 1 else partial.to(slot).float()
    if bias is not None:
        total += bias.float()
    return total.to(case.dtype)


def run_launches(case: Case, world: VirtualWorld, launches: int) -> Iterator[tuple[Operands, list[Tensor]]]:
    """Runs the public function of the op on every virtual rank, several times with different operands.

    All launches are queued before the first one runs. A rank can therefore run ahead of others as far as the
    protocol permits.

    Args:
        case: Op, sizes, dtype and bias; launch i uses seed `case.seed + i`.
        world: Virtual ranks.
        launches: Number of launches.

    Yields:
        Unsharded operands and the results in rank order, for each launch, after all launches have ended.
    """
    queued = [queue_launch(case.with_seed(case.seed + launch), world) for launch in range(launches)]
    world.synchronize()
    yield from queued


def queue_launch(case: Case, world: VirtualWorld) -> tuple[Operands, list[Tensor]]:
    """Queues one launch of the op's fused backend on every virtual rank.

    New tensors are filled with NaN (`poisoned_allocations`). That sets torch's deterministic mode, which ops
    follow by default. They are called with `deterministic=False`, so that the check does not change kernels.

    Args:
        case: Op, sizes, dtype, bias and seed.
        world: Virtual ranks.

    Returns:
        Unsharded operands, and the results in rank order; results are valid after `world.synchronize()`.
    """
    layout, size = LAYOUTS[case.op], len(world.ranks)
    unsharded = operands(case).to(world.executor(0).device)
    # Virtual ranks cannot exchange extents, so each call gets them as arguments.
    extents = OPS[case.op].arguments(case.m, case.n, case.k, least=True)
    outs = []
    with poisoned_allocations():
        for rank, name in enumerate(world.names):
            x = layout.part(unsharded.x, layout.x, rank, size)
            weight = layout.part(unsharded.weight, layout.weight, rank, size)
            bias = layout.part(unsharded.bias, layout.bias, rank, size)
            call = getattr(overlap_gemm, case.op)
            # `poisoned_allocations` sets torch's deterministic mode; the op must not follow it.
            how = {"backend": "fused", "deterministic": False, **extents}
            outs.append(call(x, weight, group=name, bias=bias, **how))
    return unsharded, outs


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills new uninitialised tensors with NaN, so that elements which no kernel writes are noticed.

    It sets torch's deterministic mode, with warnings only, and `fill_uninitialized_memory` of
    `torch.utils.deterministic`. Floating-point tensors then get NaN. At the end both settings are restored,
    but `warn_only` of the mode becomes False.
    """
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
