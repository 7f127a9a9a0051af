"""Kernels of Liger that `bench --epilogue` times after an op, on GPUs where `liger-kernel` is installed.

| epilogue                                        | call                 | kernel                          |
|-------------------------------------------------|----------------------|---------------------------------|
| `swiglu` and `geglu_tanh` of two weights        | `fused, liger`       | `liger_swiglu`, `liger_geglu`   |
| `add_residual_squared`, `add_residual_rms_norm` | `fused, norm, liger` | `liger_fused_add_rms_norm`      |
| `scale_gathered_rows`                           | `fused, norm, liger` | `liger_rms_norm`, before the op |
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from overlap_gemm.epilogues import Epilogue, geglu_tanh, swiglu

LIGER = ", liger"
"""End of the names of these calls."""

GATINGS = {swiglu.key: "liger_swiglu", geglu_tanh.key: "liger_geglu"}
"""Liger's function of gate and up, by the equal epilogue."""


def kernels(device: torch.device) -> Any:
    """Returns Liger's module of functions; None on CPUs, and if it is not installed."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    return importlib.import_module("liger_kernel.transformers.functional")


def gating(epilogue: Epilogue, device: torch.device) -> Callable[..., Any] | None:
    """Returns Liger's equal of an epilogue, a function of (gate, up) and inputs; None if there is none."""
    functions, name = kernels(device), GATINGS.get(epilogue.key)
    if functions is None or name is None:
        return None
    function = getattr(functions, name)
    return lambda sums, _: function(*sums)
