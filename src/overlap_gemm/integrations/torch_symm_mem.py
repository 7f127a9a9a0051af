"""`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, carried out by our ops.

    from overlap_gemm.integrations import torch_symm_mem
    torch_symm_mem.install()            # uninstall() undoes it

torch.compile's async tensor parallelism (`torch._inductor.config._micro_pipeline_tp`), torchtitan and
whatever else calls these two ops then runs ours, on CUDA and on CPU, where torch has none. Where ours cannot
serve, or on a GPU has nothing faster than product and collective, torch's own implementation is called, and
the logger of this module says so, once for each reason.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from ..backends.base import BackendName
from ..backends.select import check_name
from ..functional import all_gather_gemm, explain, gemm_reduce_scatter
from ..lowering import DTYPES
from ..runtime.group import group_size
from ..spec import ALL_GATHER_GEMM, GEMM_REDUCE_SCATTER

logger = logging.getLogger(__name__)

KEYS = ("CPU", "CUDA")
"""torch's dispatch keys that are ours while installed."""

_installed: torch.library.Library | None = None


def install(*, backend: BackendName = "auto") -> None:
    """Makes our ops the implementations of torch's two, in this process. Every rank calls it.

    Args:
        backend: As for `overlap_gemm.all_gather_gemm`.

    Raises:
        RuntimeError: It is installed already.
        ValueError: No such backend.
    """
    global _installed
    check_name(backend)
    if _installed is not None:
        raise RuntimeError("torch_symm_mem is installed already; uninstall() it first")
    library = torch.library.Library("symm_mem", "IMPL")

    def gather(
        A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        return _all_gather_matmul(A, list(Bs), gather_dim, group_name, return_A, backend)

    def scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
        return _matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name, backend)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is overridden, which is the purpose
        for key in KEYS:
            library.impl("fused_all_gather_matmul", gather, key, allow_override=True)
            library.impl("fused_matmul_reduce_scatter", scatter, key, allow_override=True)
    _installed = library
    logger.info("torch.ops.symm_mem.fused_* are carried out by overlap_gemm, backend=%r", backend)


def uninstall() -> None:
    """Gives torch's implementations back. Nothing happens if ours are not installed."""
    global _installed
    if _installed is not None:
        _installed._destroy()
        _installed = None


def installed() -> bool:
    """Whether our ops are torch's now."""
    return _installed is not None


def _all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group: str, return_A: bool, backend: BackendName
) -> tuple[Tensor | None, list[Tensor]]:
    why = _why_not(A, Bs, gather_dim) or _why_slower(ALL_GATHER_GEMM.name, A, Bs, gather_dim, group, backend)
    if why is not None:
        own = _torchs("fused_all_gather_matmul", A, why)
        return own(A, Bs, gather_dim, group, return_A=return_A)
    out = all_gather_gemm(
        A, [B.t() for B in Bs], group=group, dim=gather_dim, rows="equal", columns="equal",
        return_gathered=return_A, backend=backend,
    )  # fmt: skip
    return (out[1], out[0]) if return_A else (None, out)


def _matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group: str, backend: BackendName
) -> Tensor:
    why = _why_not(A, [B], scatter_dim)
    ranks = group_size(group)
    if why is None and A.shape[scatter_dim] % ranks:
        why = f"{A.shape[scatter_dim]} rows are not divisible by P={ranks}"
    if why is None and reduce_op not in ("sum", "avg"):
        why = f"reduce_op={reduce_op!r}"
    why = why or _why_slower(GEMM_REDUCE_SCATTER.name, A, [B], scatter_dim, group, backend)
    if why is not None:
        own = _torchs("fused_matmul_reduce_scatter", A, why)
        return own(A, B, reduce_op, scatter_dim, group)
    out = gemm_reduce_scatter(A, B.t(), group=group, dim=scatter_dim, k="equal", backend=backend)
    # What torch's fake kernel promises to the compiler is contiguous, whatever the dimension.
    out = out.contiguous()
    return out / ranks if reduce_op == "avg" else out


def _why_not(A: Tensor, Bs: list[Tensor], dim: int) -> str | None:
    """Why our ops cannot carry out a call that torch's may."""
    if not 0 <= dim < A.ndim - 1:
        return f"dimension {dim} of {A.ndim} is not a row dimension of A"
    if A.dtype not in DTYPES or any(B.dtype != A.dtype for B in Bs):
        return f"dtypes {A.dtype} and {sorted({str(B.dtype) for B in Bs})}"
    if not Bs or any(B.ndim != 2 or B.shape[0] != A.shape[-1] for B in Bs):
        return f"shapes A {list(A.shape)} and B {[list(B.shape) for B in Bs]}"
    return None


def _why_slower(
    op: str, A: Tensor, Bs: list[Tensor], dim: int, group: str, backend: BackendName
) -> str | None:
    """Why torch's own pipelining may be the faster way on GPUs; CPUs have only ours."""
    if not A.is_cuda or backend != "auto":
        return None
    choice = explain(op, A, [B.t() for B in Bs], group=group, dim=dim, rows="equal")
    return "auto has nothing faster than product and collective" if choice.backend.name == "torch" else None


def _torchs(op: str, A: Tensor, why: str) -> Callable[..., Any]:
    """Torch's own implementation; for CPUs its fake kernel, collective and product."""
    _say(op, why)
    return getattr(symm_mem, f"_{op}" if A.is_cuda else f"_{op}_fallback")


@cache
def _say(op: str, why: str) -> None:
    """Once for each reason: the op is in the loop of a model."""
    logger.warning("torch's own %s runs: %s", op, why)
