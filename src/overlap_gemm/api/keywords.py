"""Keywords of the ops, for type checkers: what the overloads of an op in `functional` share."""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from ..backends.op_call import BackendName, Length
from ..backends.scales.scaling import Block
from ..runtime.group import GroupLike
from ..spec.promises import Invariant, Partials


class OpOptions(TypedDict, total=False):
    """Keywords of all ops."""

    group: GroupLike
    backend: BackendName
    deterministic: bool | None
    reserve_sms: int | None
    scale_x: Tensor | None
    out_dtype: torch.dtype | None
    block: Block
    partials: Partials | None
    invariant: Invariant | None


class GatherOptions(OpOptions, total=False):
    """Keywords of `all_gather_gemm`, but those on which the type of its result depends."""

    rows: Length
    dim: int
    save_gathered: bool
    columns: Length
    scale_w: Tensor | Sequence[Tensor] | None


class ReduceOptions(OpOptions, total=False):
    """Keywords of `gemm_all_reduce`, but `epilogue`."""

    bias: Tensor | None
    k: Length
    scale_w: Tensor | None


class ScatterOptions(ReduceOptions, total=False):
    """Keywords of `gemm_reduce_scatter`, but `epilogue`."""

    dim: int


class OutputOptions(OpOptions, total=False):
    """Keywords of `gemm_all_gather`, but `epilogue`."""

    bias: Tensor | None
    columns: Length
    scale_w: Tensor | None
