"""Tensor-parallel GEMMs whose communication happens inside the GEMM kernel."""

from .functional import all_gather_gemm, explain, gemm_all_gather, gemm_all_reduce, gemm_reduce_scatter
from .runtime.bootstrap import World, finalize, init
from .runtime.symmetric import SymmetricMemoryError
from .runtime.workspace import CommTimeoutError, close_workspaces, workspace_bytes

__all__ = [
    "CommTimeoutError",
    "SymmetricMemoryError",
    "World",
    "all_gather_gemm",
    "close_workspaces",
    "explain",
    "finalize",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "init",
    "workspace_bytes",
]
