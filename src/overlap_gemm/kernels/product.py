"""What the ops have in common whose product is the output: nothing of it is summed or sent to slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import Visits


@dataclass(frozen=True)
class OutputOp:
    """An op (`surface.KernelOp`) whose tiles are parts of the output, stored where they belong.

    Attributes:
        config: the kernel's configuration.
    """

    config: GemmConfig

    publish_role = own_sums = None

    @property
    @final
    def stage_dtype(self) -> str:
        """A subtile in the ring is a part of the output."""
        return self.config.out_dtype

    @property
    @final
    def visits(self) -> Visits:
        """An accumulator is a complete sum."""
        return Visits(self.config, ("partial", "complete"))
