"""Kernels in TileLang, compiled without a GPU: an addition, and products with both ways to load tiles."""

import sys
from pathlib import Path

import tilelang
import tilelang.language as T
import torch
from nvcc import compiled
from tilelang import tvm

from cute_emulator import Emulator
from cute_emulator.units.tma_encode import encode_tiled


@T.prim_func
def add(  # noqa: D103
    A: T.Tensor((1024,), "float32"), B: T.Tensor((1024,), "float32"), C: T.Tensor((1024,), "float32")
):
    with T.Kernel(4, threads=128) as block:
        for i in T.Parallel(256):
            C[block * 256 + i] = A[block * 256 + i] + B[block * 256 + i]


@T.prim_func
def matmul(  # noqa: D103
    A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, 128), "float16"), C: T.Tensor((128, 128), "float32")
):  # fmt: skip
    with T.Kernel(2, 2, threads=128) as (column, row):
        a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
        sums = T.alloc_fragment((64, 64), "float32")
        T.clear(sums)
        for k in T.Pipelined(4, num_stages=2):
            T.copy(A[row * 64, k * 32], a)
            T.copy(B[k * 32, column * 64], b)
            T.gemm(a, b, sums)
        T.copy(sums, C[row * 64, column * 64])


def ptx_of(kernel: object, **options: bool) -> str:
    """Returns a kernel's PTX for the open emulator's device."""
    major, minor = torch.cuda.get_device_capability()
    target = tvm.target.Target({"kind": "cuda", "arch": f"sm_{major}{minor}a"})
    settings = {f"tl.{name}": value for name, value in options.items()}
    with target, tvm.transform.PassContext(config=settings):
        source = tilelang.lower(kernel, target=target).kernel_source
    package = Path(tilelang.__file__).parent
    return compiled(source, [package / "src", package / "3rdparty" / "cutlass" / "include"])


torch.manual_seed(0)
name, emulator = sys.argv[1], Emulator.current()
if name == "add":
    a, b, out = (torch.rand(1024, device="cuda") for _ in range(3))
    emulator.launch(ptx_of(add), "add_kernel", (4, 1, 1), (128, 1, 1), [a, b, out])
    want = a.cpu().double() + b.cpu().double()
else:
    a, b = (torch.randn(128, 128, device="cuda").half() for _ in range(2))
    out = torch.zeros(128, 128, device="cuda")
    if name == "matmul-tma":
        maps = [
            encode_tiled(6, t.data_ptr(), [128, 128], [256], box, [1, 1], 0, swizzle).encode()
            for t, box, swizzle in ((a, [32, 64], 2), (b, [64, 32], 3))
        ]
        args, threads = [*maps, out], 256
        ptx = ptx_of(matmul)
    else:
        args, threads = [a, b, out], 128
        ptx = ptx_of(matmul, disable_tma_lower=True, disable_warp_specialized=True)
    emulator.launch(ptx, "matmul_kernel", (2, 2, 1), (threads, 1, 1), args, shared=16384, reaches=[a, b])
    want = a.cpu().double() @ b.cpu().double()
torch.cuda.synchronize()
torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-4)
