"""Problems, for tests of what is chosen: fields of the call next to facts of tensors and ranks."""

from dataclasses import fields, replace
from typing import Any

import torch

from overlap_gemm.backends.base import Problem
from overlap_gemm.backends.op_call import OpCall, extents_of


def problem(
    op: str,
    m: int,
    n: int | None,
    k: int | None,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str = "cpu",
    world_size: int = 2,
    **facts: Any,
) -> Problem:
    """A problem of these extents; `facts` are fields of `Problem` or of `OpCall`."""
    asked = Problem(op, OpCall(**extents_of((m, n, k))), dtype, device_type, world_size)
    return changed(asked, **facts)


def changed(asked: Problem, **facts: Any) -> Problem:
    """The problem with other fields, of `Problem` or of `OpCall`."""
    own = {field.name for field in fields(Problem)}
    said = {name: facts.pop(name) for name in [*facts] if name not in own}
    return replace(asked, call=asked.call._replace(**said), **facts)
