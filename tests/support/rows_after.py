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


INFINITE = math.inf


@epilogue(
    inputs={"r": "rows", "c": "columns", "s": "scalar"},
    outputs={"sum": "row_sum", "most": "row_max", "mean": "row_mean", "wide": "element"},
)
def of_limits_and_inputs(x: Any, r: Any, c: Any, s: Any) -> Any:
    """Returns values limited by numbers that are not finite, and outputs of a row, a column or a scalar."""
    return epilogues.maximum(epilogues.minimum(x, INFINITE), -INFINITE), r, c * s, s, r * s


@epilogue(inputs={"e": "element"}, outputs={"gates": "element", "most": "row_max"}, pairs=True)
def of_pairs(gate: Any, up: Any, e: Any) -> Any:
    y = epilogues.gelu_tanh(gate) * up + e
    return y, gate, y


KINDS = [
    epilogues.add_residual_squared, epilogues.add_residual_rms_norm, epilogues.add_residual_rms_norm_e4m3,
    epilogues.to_e4m3, of_every_kind, of_limits_and_inputs, of_pairs, epilogues.swiglu,
    epilogues.to_e4m3_blocks, epilogues.swiglu_e4m3_blocks,
]  # fmt: skip

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3}
"""Relative distance of neighbours: values that differ in fp32 may be rounded to two."""


def operands(
    one: Epilogue, rows: int, width: int, dtype: torch.dtype, wide: int = 0, bands: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    """Returns sums and inputs; matrices are columns of matrices wider by `wide`. There are NaN and zero rows.

    The sums of a pair are two matrices, or with `bands` one.
    """
    made = torch.Generator().manual_seed(0)

    def matrix(scale: float, columns: int = width) -> torch.Tensor:
        full = torch.randn(rows, columns + wide, generator=made) * scale
        full[1:2] = 0.0
        full[2:3, -1 - wide] = math.nan
        return full.to(dtype)[:, :columns]

    shapes = {"rows": (rows,), "columns": (width,), "scalar": (1,)}
    inputs = [
        matrix(1.0) if kind == "element" else 0.5 + torch.rand(shapes[kind], generator=made)
        for _, kind in one.inputs
    ]
    if not one.pairs:
        return matrix(400.0), inputs
    return (matrix(40.0, 2 * width) if bands else (matrix(40.0), matrix(40.0))), inputs
