"""Triton kernels that make one pass over rows: quantization, and epilogues after an op."""
