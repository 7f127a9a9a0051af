"""Fused ops on virtual ranks: launches with changing data, judged against float64.

What a fused kernel promises is narrower than a tolerance, and so is the judgement. Where an op sums over the
ranks, every rank's partial is rounded to the slot type once (in a group of one, none is), the sum is taken in
float32 in rank order, and the result is rounded once. Where it does not, the product is rounded once. What
every rank gets is the same bit for bit on all of them. With u the unit roundoff of the two types, and the
first term for sums alone, every element is within

    u_slot * sum over ranks of |partial|  +  u_out * |result|  +  float32's own error

of the exact result (Higham, Accuracy and Stability of Numerical Algorithms, sections 2 and 4), and nearly
every element is bit for bit what that recipe gives when it is carried out by torch (`recipe`): the two differ
only where float32 products summed in another order land on the other side of a rounding boundary.
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
"""Least share of elements that equal the recipe bit for bit; a wrong order or rounding loses more."""

FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Judgement:
    """One launch's results on all ranks against float64.

    Attributes:
        largest_error: largest absolute error of any element.
        share_of_bound: largest error as a share of that element's bound; above 1 is wrong.
        bit_equal: share of the elements equal to the recipe.
    """

    largest_error: float
    share_of_bound: float
    bit_equal: float

    @property
    def holds(self) -> bool:
        """Whether the results are what the kernel promises."""
        return self.share_of_bound <= 1 and self.bit_equal >= BIT_EQUAL_SHARE


def judge(
    case: Case,
    given: Operands,
    outs: Sequence[Tensor],
    slot: torch.dtype,
) -> Judgement:
    """Compares the ranks' results with what the whole must be.

    Args:
        case: what was computed.
        given: on these operands.
        outs: the ranks' results, in rank order.
        slot: dtype in which partials travelled.
    """
    layout, ranks = LAYOUTS[case.op], len(outs)
    sums = ranks > 1 and OPS[case.op].sums
    partials = []
    magnitude = given.x.new_zeros(case.m, case.n, dtype=torch.float64)
    for rank in range(ranks if sums else 1):
        x = layout.part(given.x, layout.x, rank, ranks) if sums else given.x
        weight = layout.part(given.weight, layout.weight, rank, ranks) if sums else given.weight
        assert x is not None and weight is not None
        partials.append(x.double() @ weight.double().t())
        magnitude += x.double().abs() @ weight.double().abs().t()
    exact = sum(partials, torch.zeros_like(magnitude))
    if given.bias is not None:
        exact = exact + given.bias.double()
    out = whole(outs, layout.out)
    assert out.shape == exact.shape, f"{list(out.shape)} rows and columns came back, not {list(exact.shape)}"
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
    equal = out == recipe(case, partials, given.bias, slot)
    return Judgement(error.max().item(), share.max().item(), equal.double().mean().item())


def whole(outs: Sequence[Tensor], dim: int | None) -> Tensor:
    """The ranks' results as one, sharded along ``dim``; None: all have all of it, the same bit for bit.

    Raises:
        AssertionError: ranks that should have the same have not.
    """
    if dim is not None:
        return torch.cat(list(outs), dim)
    for rank, out in enumerate(outs):
        same = out.view(torch.uint8) == outs[0].view(torch.uint8)
        assert same.all(), f"rank {rank}: {int((~same).sum())} bytes are not those of rank 0"
    return outs[0]


def recipe(
    case: Case,
    partials: Sequence[Tensor],
    bias: Tensor | None,
    slot: torch.dtype,
) -> Tensor:
    """The result as the kernel forms it: partials rounded once, added in float32 in rank order."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total += partial.float() if len(partials) == 1 else partial.to(slot).float()
    if bias is not None:
        total += bias.float()
    return total.to(case.dtype)


def run_launches(case: Case, world: VirtualWorld, launches: int) -> Iterator[tuple[Operands, list[Tensor]]]:
    """Runs the op through the public API on every virtual rank, each time on other data.

    All launches are queued before any of them runs, so ranks are free to run ahead of each other as far as
    the protocol lets them.

    Args:
        case: op, sizes, dtype, bias; `case.seed` counts up from launch to launch.
        world: the ranks.
        launches: how many.

    Yields:
        The operands and the ranks' results of each launch, after all have ended.
    """
    queued = [queue_launch(case.with_seed(case.seed + launch), world) for launch in range(launches)]
    world.synchronize()
    yield from queued


def queue_launch(case: Case, world: VirtualWorld) -> tuple[Operands, list[Tensor]]:
    """Calls the op on every virtual rank, which queues its kernel.

    Args:
        case: op, sizes, dtype, bias, seed.
        world: the ranks.

    Returns:
        The operands, and the ranks' results, which are there after `VirtualWorld.synchronize`.
    """
    layout, size = LAYOUTS[case.op], len(world.ranks)
    given = operands(case).to(world.executor(0).device)
    # Virtual ranks cannot ask each other for lengths.
    extents = OPS[case.op].arguments(case.m, case.n, case.k, least=True)
    outs = []
    with poisoned_allocations():
        for rank, name in enumerate(world.names):
            x = layout.part(given.x, layout.x, rank, size)
            weight = layout.part(given.weight, layout.weight, rank, size)
            bias = layout.part(given.bias, layout.bias, rank, size)
            call = getattr(overlap_gemm, case.op)
            # torch's switch is on for the poison alone.
            how = {"backend": "fused", "deterministic": False, **extents}
            outs.append(call(x, weight, group=name, bias=bias, **how))
    return given, outs


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills new uninitialised tensors with NaN, so that what a kernel did not write cannot pass."""
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
