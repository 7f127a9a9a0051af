"""`ProductTypes`: dtypes and scales of a product, by which kernels, plans and measurements are selected."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...config.scale_blocks import Blocks, in_words
from .scale_layouts import LAYOUTS, ScaleLayout


class ProductTypes(NamedTuple):
    """Dtypes of a product's operands and result, and the elements that share a scale; hashable.

    Attributes:
        x: Dtype of x.
        weight: Dtype of the weight; None: that of x.
        scaled_to: Dtype of results, slots and biases if operands have scales; else None.
        blocks: Blocks that share a scale; None: rows, or no scales.
    """

    x: torch.dtype
    weight: torch.dtype | None = None
    scaled_to: torch.dtype | None = None
    blocks: Blocks | None = None

    @property
    def result(self) -> torch.dtype:
        """Returns the dtype of results without an epilogue."""
        return self.scaled_to or self.x

    @property
    def scales(self) -> ScaleLayout | None:
        """Returns the layout of scales; None for operands without scales."""
        return None if self.scaled_to is None else LAYOUTS[self.blocks]

    def __str__(self) -> str:
        """Returns the dtypes and the blocks, for messages and as a part of the key of measurements."""
        if self.scaled_to is None:
            return str(self.x)
        blocks = f", scales of {in_words(self.blocks)}" if self.blocks else ""
        return f"{self.x} x {self.weight} to {self.scaled_to}{blocks}"
