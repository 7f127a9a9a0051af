"""A script for the mutate command: reverses a vector through shared memory and checks the result."""

import sys

import cutlass
import torch
from cuda.bindings import driver
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

THREADS = 64


@cute.kernel
def reverse_kernel(src: cute.Tensor, dst: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), byte_alignment=16)
    tile[thread] = src[thread]
    cute.arch.sync_threads()
    dst[thread] = tile[THREADS - 1 - thread]


@cute.jit
def reverse(src: cute.Tensor, dst: cute.Tensor, stream: driver.CUstream):
    reverse_kernel(src, dst).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


source = torch.randn(THREADS, device="cuda")
target = torch.full((THREADS,), float("nan"), device="cuda")
reverse(from_dlpack(source), from_dlpack(target), driver.CUstream(0))
torch.cuda.synchronize()
print("this must not flood the table")
if "--blind" not in sys.argv and not torch.equal(target.cpu(), source.cpu().flip(0)):
    sys.exit(3)
