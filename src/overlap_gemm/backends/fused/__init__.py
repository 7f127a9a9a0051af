"""Backend `fused`: persistent kernels that multiply and communicate, and cached plans that launch them."""
