"""Backend `sequential`: product, then collective, or the reverse, without overlap; sums in rank order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..runtime.group import Group
from ..spec.sharding import Shards
from .base import VIRTUAL, Portable, Problem
from .collectives import all_gather_rows, scattered_rows
from .epilogues import Applying
from .op_call import CallOperands
from .portable_arithmetic import Arithmetic, arithmetic_of, wide_product
from .scales.scaling import why_no_scaled_mm, with_scales


@dataclass(frozen=True)
class WithEpilogue(Arithmetic):
    """Partial sums to which an epilogue is applied, in float32 or wider, before they are rounded.

    Attributes:
        applying: Epilogue of partial sums.
        inputs: Inputs of the epilogue, for the rows and columns of this rank's product.
        plain: Arithmetic of the call without the epilogue.
    """

    applying: Applying
    inputs: Sequence[Tensor]
    plain: Arithmetic

    def type_of(self, x: Any) -> torch.dtype:
        """Returns the dtype of partial sums; see `Arithmetic.type_of`."""
        return self.plain.type_of(x)

    def partial(self, x: Any, weight: Any, out: Tensor | None = None) -> Tensor:
        """Returns the epilogue of a rank's part of the sum over K; see `Arithmetic.partial`."""
        value, *_ = self.applying.epilogue.on_tensors(wide_product(x, weight), self.inputs)
        return value.to(self.type_of(x)) if out is None else out.copy_(value)


class Sequential(Portable):
    """Backend of torch.distributed's collectives and torch's products, for any device and process group."""

    name = "sequential"

    def why_not(self, problem: Problem) -> str | None:
        """Returns a reason for virtual ranks; None for every other problem."""
        return VIRTUAL if problem.virtual else None

    def why_slower(self, problem: Problem) -> str | None:
        """Returns a reason if `torch` can run the problem and sums need not be deterministic; else None."""
        if problem.has_partial_epilogue or (problem.is_scaled and why_no_scaled_mm(problem)):
            return None
        return None if problem.deterministic else "its sums in rank order are slower than the collective's"

    def why_after(self, problem: Problem, columns: int) -> str | None:
        """Returns None for epilogues of partial sums, which precede the collective."""
        return None if problem.has_partial_epilogue else super().why_after(problem, columns)

    def bind(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Returns the op's method; see `Backend.bind`. An epilogue of partial sums is part of it."""
        applying = problem.applying
        if applying is None:
            return super().bind(problem, operands, shards, group)
        plain = arithmetic_of(problem.promises, group.size)
        of_op = partial(getattr(self, problem.op), shards=shards, group=group)

        def run(operands: CallOperands) -> list[Tensor]:
            method: Callable[..., Any] = partial(of_op, how=WithEpilogue(applying, operands.inputs, plain))
            if problem.is_scaled:
                method = with_scales(method, problem.types, self.operand)
            return [method(operands._replace(x=operands.x.contiguous()))]

        return run

    def gemm_reduce_scatter(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies, exchanges and sums in rank order; see `Portable.gemm_reduce_scatter`."""
        x, weight, bias, *_ = operands
        return how.sum(scattered_rows(how.partial(x, weight), shards, group), bias, x.dtype)

    def gemm_all_reduce(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Runs the reduce-scatter and gathers its rows; see `Portable.gemm_all_reduce`."""
        return all_gather_rows(self.gemm_reduce_scatter(operands, shards, group, how), shards, group)

    def gemm_all_gather(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Gathers the transposed blocks, whose columns are rows; see `Portable.gemm_all_gather`."""
        local = how.product(*operands[:3])
        return all_gather_rows(local.t().contiguous(), shards, group).t().contiguous()
