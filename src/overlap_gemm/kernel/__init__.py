"""The fused GEMM kernel except its mainloop: roles, ring, epilogue, composition. Imports no torch."""
