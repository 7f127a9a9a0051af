"""Linears of a parallelized model whose weights are kept in 8 bits, as their checkpoint stores them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from ..api.kept_weights import Stored
from .layouts import local, lying_as

SCALES = ("weight_scale", "input_scale")
"""Parameters of a `KeptLinear` besides weight and bias."""

_INTEGERS = {1: torch.uint8, 4: torch.int32}
"""By bytes an element."""


class KeptLinear(nn.Linear):
    """A linear with a frozen weight of 8 bits; `stored.keep` makes it of an `nn.Linear`, and its parameters.

    Attributes:
        weight_scale: Of the weight, float32: `[N, 1]`, `[1, 1]` or of blocks.
        input_scale: Of what it is multiplied with, `[1, 1]`; None: each row has its own, at each call.
        block: Rows and columns that share a scale; None: scales are of rows, or of the weight.
        compute_dtype: The model's dtype, in which adapters are made (peft asks) and weights dequantised.
        files: Name and tensor (without memory) of each scale in the checkpoint, by its name here.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None
    block: int | None
    compute_dtype: torch.dtype
    files: dict[str, tuple[str, Tensor]]

    def stored(self, layout: Placement) -> Stored:
        """Returns this rank's part of the weight."""
        scales = (getattr(self, name, None) for name in SCALES)
        scale, given = (part.to_local() if isinstance(part, DTensor) else part for part in scales)
        assert scale is not None
        return Stored(local(self.weight, layout), scale, given, self.block)

    def dequantized(self) -> Tensor:
        """Returns this rank's part of the weight in the model's dtype."""
        weight: Any = self.weight
        with torch.no_grad():
            return self.stored(weight.placements[-1]).dequantized(self.compute_dtype)

    def become_plain(self, own: Tensor) -> None:
        """Makes the linear one whose weight is of the model's dtype.

        Args:
            own: This rank's part of the weight.
        """
        weight: Any = self.weight
        for name in SCALES:
            self._parameters.pop(name, None)
        for name in ("block", "compute_dtype", "files"):
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.weight = nn.Parameter(lying_as(weight, own), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Called by torch for `.to`, `.float()` and others: bits are moved, and cast to no other dtype."""
        kept = {name: self._parameters.pop(name) for name in ("weight", *SCALES) if name in self._parameters}
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        for name, parameter in kept.items():
            self._parameters[name] = None if parameter is None else _moved(parameter, fn)
        return self


def _moved(parameter: Any, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    moved = fn(own.view(_INTEGERS[own.element_size()])).view(own.dtype)
    if isinstance(parameter, DTensor):
        moved = lying_as(parameter, moved)
    return nn.Parameter(moved, requires_grad=False)


def weight_of(module: Any, layout: Placement) -> Any:
    """Returns this rank's part of a linear's weight, `Stored` where it is kept in 8 bits."""
    return module.stored(layout) if isinstance(module, KeptLinear) else local(module.weight, layout)
