"""Whole results of an op on P ranks, to be compared bit for bit with those of other calls and other P."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

import overlap_gemm
from overlap_gemm.epilogues import add_residual
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import LAYOUTS, Case, Operands, operands
from tests.support.gradients import forward_and_backward

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


Shared: TypeAlias = tuple[str, Tensor | None, int | None]
"""Name of a result, a rank's part of it, and the dimension along which it is sharded."""


def adversarial(case: Case) -> Operands:
    """Operands whose sums depend on their order: exponents far apart, and products that cancel in pairs."""
    given = operands(case)
    generator = torch.Generator().manual_seed(case.seed)

    def spread(matrix: Tensor) -> Tensor:
        return matrix * 4.0 ** torch.randint(-3, 4, matrix.shape, generator=generator)

    x, weight, grad = (spread(one.double()) for one in (given.x, given.weight, given.grad))
    for matrix, along in ((x, 1), (grad, 1), (grad, 0)):
        half = matrix.shape[along] // 2
        first, second = matrix.narrow(along, 0, half), matrix.narrow(along, half, half)
        far = torch.rand(first.shape, generator=generator) < 0.25
        second[far] = -first[far]
    for matrix, along in ((weight, 1), (weight, 0)):
        half = matrix.shape[along] // 2
        matrix.narrow(along, half, half).copy_(
            matrix.narrow(along, 0, half) * (1 + 2.0**-6 * torch.rand(1, generator=generator))
        )
    bias = None if given.bias is None else spread(given.bias.double()).to(case.dtype)
    return Operands(x.to(case.dtype), weight.to(case.dtype), bias, grad.to(case.dtype))


def rows_and_what_is_below(
    case: Case, world: Any, inputs: Operands | None = None, with_residual: bool = False, **options: Any
) -> list[Tensor]:
    """Returns all rows of the result of a fused op that sums, on virtual ranks, and that of a second call.

    That one's bias, one for all columns, takes away what the first row is: it shows the bits below those of
    the result. The first call's bias is zero, so that one kernel serves both. With a residual, this does so
    instead, and both calls have the case's bias.
    """
    inputs, layout = inputs or adversarial(case), LAYOUTS[case.op]
    results: list[Tensor] = []
    for _ in range(2):
        taken = -results[0][0] if results else torch.zeros(case.n, dtype=case.dtype)
        bias = inputs.bias if with_residual else taken
        outs = []
        for rank, group in enumerate(world.names):
            x, weight = (
                layout.part(one, dim, rank, len(world.names))
                for one, dim in ((inputs.x, layout.x), (inputs.weight, layout.weight))
            )
            if with_residual:
                rows = case.m if layout.out is None else Shards.even(case.m, len(world.names)).size(rank)
                options["epilogue"] = add_residual(residual=taken.expand(rows, -1).contiguous())
            outs.append(
                getattr(overlap_gemm, case.op)(x, weight, group=group, bias=bias, backend="fused", **options)
            )
        world.synchronize()
        results.append(outs[0] if layout.out is None else torch.cat(outs, layout.out))
        if layout.out is None:
            assert all(same_bits(outs[0], other) for other in outs)
    return results


def shares(rank: int, size: int, case: Case, backend: str, invariant: Any) -> list[Shared]:
    """A rank's results."""
    with overlap_gemm.promising(invariant=invariant):
        found = forward_and_backward(case.op, adversarial(case), rank, size, backend)
    return [(share.name, share.value, share.dim) for share in found]


def wholes(of_ranks: list[Any]) -> dict[str, Tensor]:
    """The whole results by name: shards joined, and what every rank has once it is the same on all."""
    joined = {}
    for parts in zip(*of_ranks, strict=True):
        (name, first, dim), tensors = parts[0], [tensor for _, tensor, _ in parts]
        if first is None:  # the gradient of no bias
            continue
        if dim is not None:
            joined[name] = torch.cat(tensors, dim)
        else:
            assert all(same_bits(first, other) for other in tensors), name
            joined[name] = first
    return joined


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits: 0 is not -0."""
    kind = BITS[one.dtype]
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(kind), other.contiguous().view(kind)
    )


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """By name, the share of elements that differ."""
    counts = {}
    for name, tensor in one.items():
        mine = tensor.contiguous().view(BITS[tensor.dtype])
        theirs = other[name].contiguous().view(BITS[tensor.dtype])
        counts[name] = (mine != theirs).float().mean().item()
    return {name: share for name, share in counts.items() if share}
