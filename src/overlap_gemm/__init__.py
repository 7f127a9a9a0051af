"""Tensor-parallel GEMMs whose communication happens inside the GEMM kernel."""

from .functional import all_gather_gemm, explain, gemm_all_gather, gemm_all_reduce, gemm_reduce_scatter
from .runtime.bootstrap import World, finalize, init

__all__ = [
    "World",
    "all_gather_gemm",
    "explain",
    "finalize",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "init",
]
