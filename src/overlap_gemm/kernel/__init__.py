"""The fused GEMM kernel but for its mainloop: roles, ring, epilogue, composition. Imports no torch."""
