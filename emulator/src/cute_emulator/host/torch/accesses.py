"""Bytes that torch's operations read and write, by the schemas of the dispatched operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cute_emulator.host.timeline import Bytes, united

WAITS = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "_local_scalar_dense",
    "equal", "is_nonzero", "repeat_interleave", "bincount", "nonzero_static",
}  # fmt: skip
"""Operations for whose result the host waits, or for its size."""
MOST_RANGES = 1 << 18
"""Largest number of ranges of a view; a view with more is not judged."""


def spans(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a view."""
    size, none = tensor.element_size(), (np.zeros(0, np.int64), np.zeros(0, np.int64))
    if not tensor.numel():
        return none
    dims = sorted((step, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and step)
    run = 1
    while dims and dims[0][0] <= run:
        run += dims[0][0] * (dims[0][1] - 1)
        dims.pop(0)
    begins = np.zeros(1, np.int64)
    for step, n in dims:
        if len(begins) * n > MOST_RANGES:
            return none
        begins = (begins[:, None] + step * np.arange(n)).reshape(-1)
    begins = tensor.data_ptr() + size * begins
    return united(begins, begins + size * run)


class Accesses(TorchDispatchMode):
    """Dispatch mode that records which relevant tensors operations read and write.

    Args:
        matters: Function that returns whether a tensor is relevant.

    Attributes:
        accessed: Views, and whether they are written.
        host_waits: Whether the host waits for a value.
    """

    def __init__(self, matters: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._matters = matters
        self.accessed: list[tuple[torch.Tensor, bool]] = []
        self.host_waits = False
        self.muted = 0  # depth of inner operations that are recorded separately

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if self.muted or name.startswith("new_") or name.endswith("_like"):
            return func(*args, **kwargs)
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for n, argument in enumerate(schema.arguments):
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            if value is None or isinstance(value, (int, float, str)):
                continue
            info = argument.alias_info
            if is_view and info is not None and not info.is_write:
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and self._matters(leaf):
                    self.accessed.append((leaf, info is not None and info.is_write))
                    self.host_waits |= name in WAITS or (
                        leaf.dtype is torch.bool and argument.name == "indices"
                    )
        return func(*args, **kwargs)
