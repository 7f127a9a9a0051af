"""Tensor-parallel GEMMs whose communication happens inside the GEMM kernel."""
