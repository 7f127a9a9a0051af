"""Steps of `Epilogue.on_tensors`, by methods of the tensors. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_fp32(tensor: Any) -> Any:
    """Returns a tensor in float32, or one of float64 as it is."""
    return tensor if tensor.element_size() == 8 else tensor.float()


def along(tensor: Any, kind: str) -> Any:
    """Returns an input of a kind (`InputKind`) as a tensor that broadcasts to the result."""
    if kind == "scalar":
        return tensor.reshape(())
    return tensor.unsqueeze(-1) if kind in ("rows", "gathered_rows") else tensor


def own_copy(value: Any, taken: Sequence[Any], shape: Any) -> Any:
    """Returns a value as a contiguous tensor of a shape, a copy if it is one of those `taken`."""
    full = value.expand(shape).contiguous()
    return full.clone() if any(value is one for one in taken) else full


def reduced(value: Any, kind: str, shape: Any) -> Any:
    """Returns the reduction of a value (`OutputKind`) over the columns of the result's shape; 0 of none."""
    full = value.expand(shape)
    if not shape[-1]:  # of a rank without columns, which must not raise, and has the graph of its peers
        return full.sum(-1)
    return {"row_sum": full.sum, "row_mean": full.mean, "row_max": full.amax}[kind](-1)
