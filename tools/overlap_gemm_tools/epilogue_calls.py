"""Calls that `bench --epilogue` times: an op with an epilogue, and with torch's operations after the op.

| name               | call                                                             |
|--------------------|------------------------------------------------------------------|
| `fused`            | backend `fused` with `epilogue=`                                 |
| `fused, alone`     | backend `fused` without an epilogue                              |
| `fused, eager`     | the call alone, then the epilogue by torch's operations          |
| `fused, compiled`  | the call alone, then these operations compiled by `torch.compile` |

The same for other backends, and with an RMS norm (`norm_calls`). A baseline of torch is followed by the
compiled operations, too. Where Liger is installed, its kernels follow the op, too (`liger_calls`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overlap_gemm.backends.epilogues import Applying, usual_dtypes, with_empty_inputs
from overlap_gemm.epilogues import Applied, Epilogue
from overlap_gemm.runtime.group import Group
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.workload import Call, OpTensors, Workload

from .liger_calls import LIGER, gating
from .norm_calls import AFTER, COMPILED, norm_calls

ALONE = ", alone"


def backend_of(name: str) -> str:
    """Returns the backend of a call's name."""
    return name.partition(",")[0]


def why_no_calls(epilogue: Epilogue, workload: Workload) -> str | None:
    """Returns why an epilogue of a workload has no equal operations after the op; None if it has."""
    op = workload.op
    if epilogue.pairs and workload.scales is not None:
        return f"{epilogue.name} takes pairs: they are timed of operands without scales"
    if epilogue.is_partial(OPS[op].sums):
        return f"{epilogue.name} takes partial sums: no operations after {op} are equal to it"
    if epilogue.has_gathered_rows and not OPS[op].gathers_operand:
        return f"{epilogue.name} has an input of gathered rows, and {op} gathers none"
    return None


class EpilogueCalls:
    """Makes the calls of a workload with an epilogue.

    In ops that take lists of weights, the halves of the weight are the two weights of a pair. Operations
    after the op get inputs of kind "gathered_rows" of all ranks; the time of that gather is not in theirs.

    Args:
        epilogue: Epilogue of the calls.
        workload: Op, shape and types; pairs are of operands without scales.
    """

    def __init__(self, epilogue: Epilogue, workload: Workload):
        self.epilogue, self.workload = epilogue, workload
        self.has_two_weights = epilogue.pairs and workload.spec.takes_lists
        self.after_op = epilogue.with_rows if epilogue.has_gathered_rows else epilogue
        dtypes = tuple(usual_dtypes(self.after_op, workload.dtype))
        self.applying = Applying(self.after_op, dtypes, workload.out_dtype)
        self.compiled = torch.compile(self._apply, dynamic=False)

    def inputs(self, epilogue: Epilogue, operands: OpTensors, group: Group) -> Applied:
        """Returns the epilogue with random inputs; those of the full result are equal on all ranks."""
        local = Shards.owned_by(group.size, group.rank)
        extents = self.workload.m, self.workload.n
        applied = with_empty_inputs(epilogue, self.workload.spec, operands.x, extents, local)
        generator = torch.Generator(operands.x.device).manual_seed(0)
        for tensor in applied.inputs:
            tensor.uniform_(generator=generator)
        return applied

    def by(self, operands: OpTensors, group: Group, backends: Sequence[str]) -> dict[str, Call]:
        """Returns the calls of backends by name."""
        calls: dict[str, Call] = {}
        applied = self.inputs(self.epilogue, operands, group)
        weight: Any = operands.weight
        if self.has_two_weights:
            weight = list(weight.chunk(2))
        with_epilogue = operands._replace(weight=weight)
        for backend in backends:
            alone = self.workload.by(backend, operands, group)
            calls[backend] = self.workload.by(backend, with_epilogue, group, epilogue=applied)
            calls[backend + ALONE] = alone
            calls[backend + AFTER] = self.followed(alone, operands, group, self._apply)
            calls[backend + COMPILED] = self.followed(alone, operands, group, self.compiled)
            gated = gating(self.epilogue, operands.x.device) if self.has_two_weights else None
            if gated is not None:
                sums = self.workload.by(backend, with_epilogue, group)
                calls[backend + LIGER] = self.followed(sums, operands, group, gated)

            def of(x: Tensor, backend: str = backend) -> Any:
                return self.workload.by(backend, operands._replace(x=x), group)()

            norms = norm_calls(self.epilogue, operands.x, applied.inputs, calls[backend], of)
            calls |= {backend + end: call for end, call in norms.items()}
        return calls

    def followed(self, call: Call, operands: OpTensors, group: Group, apply: Any = None) -> Call:
        """Returns a call of an op without an epilogue, then of the operations (default: compiled)."""
        inputs, apply = self.inputs(self.after_op, operands, group).inputs, apply or self.compiled
        return lambda: apply(call(), inputs)

    def _apply(self, result: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        sums = result.chunk(2, -1) if self.has_two_weights else result
        return self.applying.on_sums(sums, inputs)
