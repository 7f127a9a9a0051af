"""8-bit operands and their scales: their products in torch, and the layouts that kernels read."""
