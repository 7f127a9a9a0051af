"""Keyword arguments of the ops for type checkers, shared by the overloads in `functional`."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..backends.op_call import BackendName, Length
from ..backends.scales.scaling import Block
from ..runtime.group import GroupLike
from ..spec.promises import Invariant, Partials


class ProductOptions(TypedDict, total=False):
    """Keyword arguments of all products, without the scales of weights."""

    scale_x: Tensor | None
    out_dtype: torch.dtype | None
    block: Block
    partials: Partials | None
    invariant: Invariant | None


class OpOptions(ProductOptions, total=False):
    """Keyword arguments of all ops."""

    group: GroupLike
    backend: BackendName
    deterministic: bool | None
    reserve_sms: int | None


class GatherOptions(OpOptions, total=False):
    """Keyword arguments of `all_gather_gemm`, without those that determine the type of its result."""

    rows: Length
    dim: int
    save_gathered: bool
    columns: Length
    scale_w: Tensor | Sequence[Tensor] | None


class ReduceOptions(OpOptions, total=False):
    """Keyword arguments of `gemm_all_reduce` without `epilogue`."""

    bias: Tensor | None
    k: Length
    scale_w: Tensor | None


class ScatterOptions(ReduceOptions, total=False):
    """Keyword arguments of `gemm_reduce_scatter` without `epilogue`."""

    dim: int


class AllToAllOptions(OpOptions, total=False):
    """Keywords of `all_to_all_gemm`."""

    bias: Tensor | Sequence[Tensor] | None
    dim: int
    scale_w: Tensor | Sequence[Tensor] | None
    epilogue: Any


class GemmAllToAllOptions(AllToAllOptions, total=False):
    """Keywords of `gemm_all_to_all`."""

    rows: Length


class OutputOptions(OpOptions, total=False):
    """Keyword arguments of `gemm_all_gather` without `epilogue`."""

    bias: Tensor | None
    columns: Length
    scale_w: Tensor | None
