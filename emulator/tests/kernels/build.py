"""Compiles the test kernels and makes their operands."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cuda.bindings import driver
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor

STREAM = driver.CUstream(0)
TORCH = {
    cutlass.BFloat16: torch.bfloat16,
    cutlass.Float16: torch.float16,
    cutlass.Float32: torch.float32,
    cutlass.TFloat32: torch.float32,
    cutlass.Float8E4M3FN: torch.float8_e4m3fn,
    cutlass.Float8E5M2: torch.float8_e5m2,
}


def compile_gemm(gemm: Any) -> Any:
    """Compiles a GEMM for its architecture, every extent dynamic."""

    def fake(dtype: Any, columns_contiguous: bool) -> Any:
        pitch = cute.sym_int64(divisibility=128 // dtype.width)
        stride = (pitch, 1) if columns_contiguous else (1, pitch)
        shape = (cute.sym_int32(), cute.sym_int32())
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=16)

    return cute.compile(
        gemm,
        fake(gemm.a_type, gemm.a_major == "k"),
        fake(gemm.b_type, gemm.b_major == "k"),
        fake(gemm.c_type, gemm.c_major == "n"),
        Int32(1),
        make_fake_stream(),
        options=f"--gpu-arch {gemm.arch}",
    )


def matrix(rows: int, columns: int, dtype: Any, columns_contiguous: bool, seed: int | None) -> torch.Tensor:
    """A matrix whose rows start at multiples of 16 bytes; normal values, or NaN everywhere (`seed` None)."""
    outer, inner = (rows, columns) if columns_contiguous else (columns, rows)
    align = 128 // dtype.width
    values = torch.full((outer, -(-inner // align) * align), float("nan"))
    if seed is not None:
        values[:, :inner] = torch.randn(outer, inner, generator=torch.Generator().manual_seed(seed))
    stored = values.to(TORCH[dtype])[:, :inner]
    return stored if columns_contiguous else stored.t()


def as_cute(tensor: torch.Tensor, dtype: Any) -> Any:
    """The DSL's view of a matrix, with dynamic extents; types that DLPack lacks travel as bytes."""
    leading = 1 if tensor.stride(1) == 1 else 0
    raw = tensor.view(torch.uint8) if dtype.width == 8 else tensor
    view = from_dlpack(raw, assumed_align=16)
    view.element_type = dtype
    return view.mark_layout_dynamic(leading_dim=leading)


def operands(gemm: Any, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and a poisoned C for a problem size."""
    return (
        matrix(m, k, gemm.a_type, gemm.a_major == "k", 1),
        matrix(n, k, gemm.b_type, gemm.b_major == "k", 2),
        matrix(m, n, gemm.c_type, gemm.c_major == "n", None),
    )


def call(compiled: Any, gemm: Any, tensors: tuple[torch.Tensor, ...], num_clusters: int) -> None:
    """Calls the compiled GEMM on (a, b, c)."""
    views = [
        as_cute(t, dtype) for t, dtype in zip(tensors, (gemm.a_type, gemm.b_type, gemm.c_type), strict=True)
    ]
    compiled(*views, num_clusters, STREAM)
