"""Small CuTe DSL kernels for tests of the host side."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

THREADS = 128


@cute.kernel
def scale_kernel(src: cute.Tensor, dst: cute.Tensor, factor: cutlass.Float32, n: cutlass.Int32):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * THREADS + tid
    if i < n:
        dst[i] = src[i] * factor


@cute.jit
def scale(
    src: cute.Tensor, dst: cute.Tensor, factor: cutlass.Float32, n: cutlass.Int32, stream: cuda.CUstream
):
    """dst = src * factor, one element per thread."""
    grid = ((n + THREADS - 1) // THREADS, 1, 1)
    scale_kernel(src, dst, factor, n).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def add_kernel(src: cute.Tensor, dst: cute.Tensor, factor: cutlass.Float32, n: cutlass.Int32):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * THREADS + tid
    if i < n:
        dst[i] = src[i] + factor


@cute.jit
def chain(src: cute.Tensor, mid: cute.Tensor, dst: cute.Tensor, n: cutlass.Int32, stream: cuda.CUstream):
    """dst = src * 3 + 1, as two launches of one host function."""
    grid = ((n + THREADS - 1) // THREADS, 1, 1)
    scale_kernel(src, mid, cutlass.Float32(3.0), n).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
    add_kernel(mid, dst, cutlass.Float32(1.0), n).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def cluster_kernel(dst: cute.Tensor, step: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    if tid == 0:
        dst[bid] = rank * step


@cute.jit
def cluster_ranks(dst: cute.Tensor, step: cutlass.Constexpr, ctas: cutlass.Int32, stream: cuda.CUstream):
    """dst[cta] = rank of the CTA in its cluster of 4, times step."""
    cluster_kernel(dst, step).launch(
        grid=(ctas, 1, 1), block=(32, 1, 1), cluster=(4, 1, 1), smem=1024, stream=stream
    )
