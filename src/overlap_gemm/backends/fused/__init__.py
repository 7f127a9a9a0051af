"""Backend `fused`: plans of calls, made once, and the compiled kernels that they launch."""
