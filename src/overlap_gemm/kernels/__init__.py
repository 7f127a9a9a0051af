"""The fused GEMM kernels. Never imports torch or nvshmem."""
