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


@cute.kernel
def store_at_kernel(table: cute.Tensor, value: cutlass.Int32):
    pointer = cute.make_ptr(cutlass.Int32, table[0], cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value


@cute.jit
def store_at(table: cute.Tensor, value: cutlass.Int32, stream: cuda.CUstream):
    """Stores a value at the address that the table holds."""
    store_at_kernel(table, value).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@cute.kernel
def send_left_kernel(
    table: cute.Tensor, inbox: cute.Tensor, flag: cute.Tensor, out: cute.Tensor, value: cutlass.Int32
):
    tid, _, _ = cute.arch.thread_idx()
    there = cute.make_ptr(cutlass.Int32, table[0], cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(there, cute.make_layout(4))[tid] = value
    cute.arch.sync_warp(0xF)
    if tid == 0:
        flag_there = cute.make_ptr(cutlass.Int32, table[1], cute.AddressSpace.gmem, assumed_align=4)
        cute.arch.store(flag_there, cutlass.Int32(1), sem="release", scope="sys")
        seen = cutlass.Int32(0)
        while seen != 1:
            seen = cute.arch.load(flag.iterator, cutlass.Int32, sem="acquire", scope="sys")
    cute.arch.sync_warp(0xF)
    out[tid] = inbox[tid]


@cute.jit
def send_left(
    table: cute.Tensor, inbox: cute.Tensor, flag: cute.Tensor, out: cute.Tensor, value: cutlass.Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Sends a value to the addresses in the table, waits for the own flag, copies the own inbox to out."""
    send_left_kernel(table, inbox, flag, out, value).launch(grid=(1, 1, 1), block=(4, 1, 1), stream=stream)
