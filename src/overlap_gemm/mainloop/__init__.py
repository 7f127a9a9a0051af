"""Mainloops of the fused GEMM kernel, one an architecture. Imports no torch."""
