"""Epilogues after an op that have a kernel for rows, and their operands."""

import math
from typing import Any

import torch

from overlap_gemm import epilogue, epilogues
from overlap_gemm.epilogues import Epilogue


@epilogue(
    inputs={"r": "rows", "e": "element", "s": "scalar", "c": "columns"},
    outputs={"aux": "element", "most": "row_max", "mean": "row_mean", "sum": "row_sum"},
)
def of_every_kind(x: Any, r: Any, e: Any, s: Any, c: Any) -> Any:
    y = epilogues.silu(x) * r + epilogues.gelu(e) / s
    logits = epilogues.minimum(epilogues.maximum(y, 0.25), c)
    squared = epilogues.sqrt(abs(x)) + epilogues.reciprocal(c)
    return logits, epilogues.tanh(x) - 1.5, abs(x), epilogues.rsqrt(epilogues.exp(-x) + 1), squared


KINDS = [
    epilogues.add_residual_squared, epilogues.add_residual_rms_norm, epilogues.to_e4m3, of_every_kind,
]  # fmt: skip


def operands(
    one: Epilogue, rows: int, width: int, dtype: torch.dtype, wide: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns sums and inputs; matrices are `wide` columns of wider ones. There are NaN and zero rows."""
    made = torch.Generator().manual_seed(0)

    def matrix(scale: float) -> torch.Tensor:
        full = torch.randn(rows, width + wide, generator=made) * scale
        full[1:2] = 0.0
        full[2:3, -1 - wide] = math.nan
        return full.to(dtype)[:, :width]

    shapes = {"rows": (rows,), "columns": (width,), "scalar": (1,)}
    inputs = [
        matrix(1.0) if kind == "element" else 0.5 + torch.rand(shapes[kind], generator=made)
        for _, kind in one.inputs
    ]
    return matrix(400.0), inputs
