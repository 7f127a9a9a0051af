"""Operands of 8 bits and their scales: who multiplies them, and how kernels read them."""
