"""Calls with an RMS norm of which an epilogue is a part, which `bench --epilogue` times, too.

| name                    | with `add_residual_squared`         | with `scale_gathered_rows` |
|-------------------------|-------------------------------------|----------------------------|
| `fused, norm`           | `fused`, then its rows are scaled   | -: `fused` itself          |
| `fused, norm, eager`    | `fused, alone`, residual, norm      | norm of x, `fused, alone`  |
| `fused, norm, compiled` | the same, compiled after the op     | the same                   |
| `fused, norm, liger`    | the same by Liger (`liger_calls`)   | the same                   |

With `add_residual_rms_norm` there are the last three; `fused` itself is the norm.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_gemm.epilogues import Epilogue, add_residual_rms_norm, add_residual_squared, scale_gathered_rows
from overlap_gemm.testing.workload import Call

from .liger_calls import LIGER, kernels

AFTER, COMPILED, NORM = ", eager", ", compiled", ", norm"

EPS = 1e-6
"""Added to the mean square in a norm."""


def norm_calls(
    epilogue: Epilogue, x: Tensor, inputs: Sequence[Tensor], fused: Call, alone: Callable[[Tensor], Tensor]
) -> dict[str, Call]:
    """Returns the calls by the end of their name; none for an epilogue that is no part of a norm.

    Args:
        epilogue: Epilogue of `fused`.
        x: Operand x.
        inputs: Inputs of the epilogue.
        fused: Call of the op with the epilogue.
        alone: Function of x that calls the op without an epilogue.
    """
    if epilogue == scale_gathered_rows:
        gamma = x.new_ones(x.shape[-1])

        def before(norm: Callable[..., Tensor]) -> Call:
            return lambda: alone(norm(x, gamma))

        norms = _variants(normalized, normalized_by_liger, x.device)
        return {NORM + end: before(norm) for end, norm in norms.items()}
    if epilogue in (add_residual_squared, add_residual_rms_norm):
        residual, *_ = inputs
        weight = residual.new_ones(residual.shape[-1])

        def after(norm: Callable[..., Any]) -> Call:
            return lambda: norm(alone(x), residual, weight)

        norms = _variants(residual_and_norm, residual_and_norm_by_liger, x.device)
        calls = {NORM + end: after(norm) for end, norm in norms.items()}
        if epilogue == add_residual_rms_norm:
            return calls
        scale = torch.compile(scaled, dynamic=False)
        return {NORM: lambda: scale(*fused(), weight), **calls}  # type: ignore[misc]
    return {}


def normalized(x: Tensor, gamma: Tensor) -> Tensor:
    """Returns the normalized rows of x."""
    return F.rms_norm(x, gamma.shape, gamma, EPS)


def residual_and_norm(sums: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sums plus residual, and the normalized rows of that."""
    stream = sums + residual
    return stream, normalized(stream, gamma)


def normalized_by_liger(liger: Any, x: Tensor, gamma: Tensor) -> Any:
    """Calls Liger's equal of `normalized`."""
    return liger.liger_rms_norm(x, gamma, EPS, in_place=False)


def residual_and_norm_by_liger(liger: Any, sums: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Any, Any]:
    """Calls Liger's equal of `residual_and_norm`."""
    normal, stream = liger.liger_fused_add_rms_norm(sums, residual, gamma, EPS, in_place=False)
    return stream, normal


def scaled(stream: Tensor, squares: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a stream, and its normalized rows by their sums of squares."""
    rstd = torch.rsqrt(squares / stream.shape[-1] + EPS)
    return stream, (stream * rstd[:, None]).to(stream.dtype) * gamma


def _variants(
    function: Callable[..., Any], by_liger: Callable[..., Any], device: torch.device
) -> dict[str, Callable[..., Any]]:
    variants = {AFTER: function, COMPILED: torch.compile(function, dynamic=False)}
    liger = kernels(device)
    return variants if liger is None else {**variants, LIGER: partial(by_liger, liger)}
