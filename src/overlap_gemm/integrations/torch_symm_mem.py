"""torch's fused symmetric-memory ops, `torch.ops.symm_mem.fused_*`, implemented by our ops.

They are `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, and for 8-bit operands with scales
`fused_all_gather_scaled_matmul` and `fused_scaled_matmul_reduce_scatter`.

    from overlap_gemm.integrations import torch_symm_mem
    torch_symm_mem.install()            # uninstall() undoes it

torch.compile's async tensor parallelism (`torch._inductor.config._micro_pipeline_tp`), torchtitan and all
other callers of these ops then use ours, on CUDA and on CPU. torch's own implementation (on CPU: a collective
and a product) runs in these cases; the logger of this module reports each reason once:

- Our op does not support the call. The dimension must be a row dimension of A, not negative. A is bfloat16,
  float16, float32 or float64, or with scales 8 bits. Rows that are scattered must be divisible by P.
- An op without scales runs on GPUs with ``backend="auto"``, and `auto` would choose "torch". A named backend
  is not compared.

In the all-gather ops every rank must have as many rows; this is not compared.

`fused_scaled_matmul_reduce_scatter` differs from torch's in two cases, and the logger reports it:

- A bias is added once, after the sum. torch's adds it to each rank's partial sum, so P times. With
  ``reduce_op="avg"`` both are the same: the bias is added after the division by P.
- Without ``out_dtype`` the result has A's 8-bit type. Partial sums are bfloat16 and only the result is
  rounded to 8 bits; torch's adds 8-bit partials.
"""

import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from ..api.explanation import explain
from ..api.functional import all_gather_gemm, gemm_reduce_scatter
from ..backends.op_call import BackendName, promises_of
from ..backends.scales.scaling import FLOAT8, OUT_DTYPES
from ..backends.select import check_name
from ..dispatch.operands import DTYPES
from ..runtime.group import group_rank, group_size
from ..runtime.order import is_capturing
from ..spec import ALL_GATHER_GEMM, GEMM_REDUCE_SCATTER
from ..tuning.settings import configured, settings

logger = logging.getLogger(__name__)

KEYS = ("CPU", "CUDA")
"""torch's dispatch keys for which our implementations are installed."""

_installed: torch.library.Library | None = None


def install(*, backend: BackendName = "auto") -> None:
    """Makes our ops the implementations of torch's four ops in this process, for CPU and CUDA.

    Every rank calls it.

    Args:
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.

    Raises:
        RuntimeError: The ops are already installed.
        ValueError: There is no such backend.
    """
    global _installed
    check_name(backend)
    if _installed is not None:
        raise RuntimeError("torch_symm_mem is installed already; call uninstall() first")
    library = torch.library.Library("symm_mem", "IMPL")

    ours = {
        "fused_all_gather_matmul": partial(_all_gather_matmul, backend),
        "fused_matmul_reduce_scatter": partial(_matmul_reduce_scatter, backend),
        "fused_all_gather_scaled_matmul": partial(_all_gather_scaled_matmul, backend),
        "fused_scaled_matmul_reduce_scatter": partial(_scaled_matmul_reduce_scatter, backend),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "kernel is overridden", which is intended
        for op, key in itertools.product(ours, KEYS):
            if hasattr(torch.ops.symm_mem, op):
                library.impl(op, ours[op], key, allow_override=True)
    _installed = library
    logger.info("torch.ops.symm_mem.fused_* use overlap_gemm, backend=%r", backend)


def install_once() -> None:
    """Calls `install()` unless our implementations are installed, for plug-ins that are loaded repeatedly."""
    if not installed():
        install()


def uninstall() -> None:
    """Restores torch's implementations; does nothing if ours are not installed."""
    global _installed
    if _installed is not None:
        _installed._destroy()
        _installed = None


def installed() -> bool:
    """Returns whether our implementations are installed."""
    return _installed is not None


def _all_gather_matmul(
    backend: BackendName,
    A: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    why = _why_not(A, Bs, gather_dim)
    why = why or _why_slower(ALL_GATHER_GEMM.name, A, Bs, gather_dim, group_name, backend)
    if why is not None:
        torch_op = _torch_op("fused_all_gather_matmul", A, why)
        return torch_op(A, list(Bs), gather_dim, group_name, return_A=return_A)
    out = all_gather_gemm(
        A, [B.t() for B in Bs], group=group_name, dim=gather_dim, rows="equal", columns="equal",
        return_gathered=return_A, backend=backend,
    )  # fmt: skip
    if not return_A:
        return None, out
    products, gathered = out
    return _with_declared_strides(gathered, group_name), products


def _matmul_reduce_scatter(
    backend: BackendName, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    why = _why_not(A, [B], scatter_dim) or _why_no_sum(A.shape[scatter_dim], reduce_op, group_name)
    why = why or _why_slower(GEMM_REDUCE_SCATTER.name, A, [B], scatter_dim, group_name, backend)
    if why is not None:
        torch_op = _torch_op("fused_matmul_reduce_scatter", A, why)
        return torch_op(A, B, reduce_op, scatter_dim, group_name)
    out = gemm_reduce_scatter(A, B.t(), group=group_name, dim=scatter_dim, k="equal", backend=backend)
    # torch's fake kernel declares a contiguous result for every dimension.
    out = out.contiguous()
    return out / group_size(group_name) if reduce_op == "avg" else out


def _all_gather_scaled_matmul(
    backend: BackendName,
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    # torch's dispatcher converts a list of types to numbers.
    out_dtypes = symm_mem._maybe_convert_scalar_types_to_dtypes(list(out_dtypes))
    result_types = {dtype or A.dtype for dtype in out_dtypes}
    why = _why_not_scaled(A, Bs, gather_dim, result_scales, result_types)
    if why is None and len(set(use_fast_accum)) > 1:
        why = f"use_fast_accum={list(use_fast_accum)} differ"
    if why is not None:
        torch_op = _torch_op("fused_all_gather_scaled_matmul", A, why)
        arguments = (gather_dim, group_name, list(biases), list(result_scales), list(out_dtypes))
        return torch_op(A, list(Bs), A_scale, list(B_scales), *arguments, list(use_fast_accum))
    rows = A.shape[gather_dim]
    if A_scale.numel() > 1 and A_scale.shape[gather_dim] != rows:  # every rank has the scales of all rows
        A_scale = A_scale.narrow(gather_dim, rows * group_rank(group_name), rows)
    (dtype,) = result_types
    wide = _computed_dtype(dtype)
    added: list[Tensor] | None = None
    if any(bias is not None for bias in biases):
        added = [
            B.new_zeros(B.shape[1], dtype=wide) if bias is None else bias.to(wide)
            for B, bias in zip(Bs, biases, strict=True)
        ]
    weights = [B.t() for B in Bs]
    with configured(fast_accum=True) if any(use_fast_accum) else nullcontext():
        outs, gathered = all_gather_gemm(
            A, weights, group=group_name, dim=gather_dim, rows="equal", columns="equal", bias=added,
            return_gathered=True, backend=backend, scale_x=A_scale, scale_w=list(B_scales), out_dtype=wide,
        )  # fmt: skip
    return _with_declared_strides(gathered, group_name), [out.to(dtype) for out in outs]


def _with_declared_strides(gathered: Tensor, group: str) -> Tensor:
    """Returns the gathered A in the strides of torch's fake kernels: for one rank it is contiguous."""
    return gathered.contiguous() if group_size(group) == 1 else gathered


def _scaled_matmul_reduce_scatter(
    backend: BackendName,
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    batch, ranks, dtype = list((output_shape or A.shape)[:-1]), group_size(group_name), out_dtype or A.dtype
    x = A.reshape(*batch, A.shape[-1])
    why = _why_not_scaled(x, [B], orig_scatter_dim, [result_scale], {dtype})
    why = why or _why_no_sum(batch[orig_scatter_dim], reduce_op, group_name)
    if why is not None:
        torch_op = _torch_op("fused_scaled_matmul_reduce_scatter", A, why)
        dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name, [*batch, B.shape[1]])
        return torch_op(
            A, B, A_scale, B_scale, reduce_op, *dims, bias, result_scale, out_dtype, use_fast_accum
        )
    wide = _computed_dtype(dtype)
    bias = None if bias is None else bias.to(wide)
    average = reduce_op == "avg"
    if bias is not None and ranks > 1 and not average:
        _log_difference("a bias is added once, after the sum; torch's own adds it on each of the ranks")
    if dtype in FLOAT8:
        _log_difference(
            f"the sum of {wide} partials is rounded to {dtype} once; torch's own adds partials of that"
        )
    with configured(fast_accum=True) if use_fast_accum else nullcontext():
        out = gemm_reduce_scatter(
            x, B.t(), group=group_name, dim=orig_scatter_dim, k="equal", backend=backend,
            bias=None if average else bias, out_dtype=wide, scale_w=B_scale,
            scale_x=A_scale if A_scale.numel() == 1 else A_scale.reshape(*batch, 1),
        )  # fmt: skip
    if average:
        out = out / ranks if bias is None else out / ranks + bias
    return out.to(dtype).contiguous()


def _computed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that our op computes for a result of type `dtype`."""
    return OUT_DTYPES[0] if dtype in FLOAT8 else dtype


def _why_not_scaled(
    A: Tensor,
    Bs: Sequence[Tensor],
    dim: int,
    result_scales: Sequence[Tensor | None],
    result_types: set[torch.dtype],
) -> str | None:
    """Returns why our ops do not support a scaled call, or None."""
    if any(scale is not None for scale in result_scales):
        return "results are scaled"
    if len(result_types) != 1 or not result_types <= {*OUT_DTYPES, *FLOAT8}:
        return f"results of {sorted(map(str, result_types))}"
    if A.dtype not in FLOAT8 or any(B.dtype not in FLOAT8 for B in Bs):
        return f"dtypes {A.dtype} and {sorted({str(B.dtype) for B in Bs})}"
    return _why_not(A, Bs, dim, tuple(FLOAT8))


def _why_not(A: Tensor, Bs: Sequence[Tensor], dim: int, mixed: Sequence[torch.dtype] = ()) -> str | None:
    """Returns why our ops do not support a call, or None; `mixed`: types that may be combined."""
    if not 0 <= dim < A.ndim - 1:
        return f"dimension {dim} of {A.ndim} is not a row dimension of A"
    if not mixed and (A.dtype not in DTYPES or any(B.dtype != A.dtype for B in Bs)):
        return f"dtypes {A.dtype} and {sorted({str(B.dtype) for B in Bs})}"
    if not Bs or any(B.ndim != 2 or B.shape[0] != A.shape[-1] for B in Bs):
        return f"shapes A {list(A.shape)} and B {[list(B.shape) for B in Bs]}"
    return None


def _why_no_sum(rows: int, reduce_op: str, group: str) -> str | None:
    """Returns why our ops cannot scatter a reduction of `rows` rows, or None."""
    if rows % (ranks := group_size(group)):
        return f"{rows} rows are not divisible by P={ranks}"
    return None if reduce_op in ("sum", "avg") else f"reduce_op={reduce_op!r}"


_choices: dict[tuple[Any, ...], bool] = {}
"""Choices by call signature, True: "torch". They are kept because `explain` takes longer than an op."""


def _why_slower(
    op: str, A: Tensor, Bs: Sequence[Tensor], dim: int, group: str, backend: BackendName
) -> str | None:
    """Returns why torch's own pipelining may be faster, or None: on CPUs, or for a named backend."""
    if not A.is_cuda or backend != "auto":
        return None
    operands = tuple((one.shape, one.stride(), one.dtype) for one in (A, *Bs))
    state = settings(), promises_of(), torch.are_deterministic_algorithms_enabled(), is_capturing(A.device)
    key = (op, operands, dim, A.device, group, group_size(group), *state)
    if key not in _choices:
        if len(_choices) >= 4096:  # lengths of a server
            _choices.clear()
        choice = explain(op, A, [B.t() for B in Bs], group=group, dim=dim, rows="equal")
        _choices[key] = choice.backend.name == "torch"
    return "auto has nothing faster than product and collective" if _choices[key] else None


def _torch_op(op: str, A: Tensor, why: str) -> Callable[..., Any]:
    """Returns torch's own implementation; on CPUs that is a collective and a product."""
    _log_fallback(op, why)
    return getattr(symm_mem, f"_{op}" if A.is_cuda else f"_{op}_fallback")


@cache
def _log_difference(how: str) -> None:
    """Logs each difference once."""
    logger.warning("fused_scaled_matmul_reduce_scatter: %s", how)


@cache
def _log_fallback(op: str, why: str) -> None:
    """Logs each reason once; the op runs in the loop of a model."""
    logger.warning("torch's own %s runs: %s", op, why)
