"""wgmmas that warps have issued and not got back (PTX ISA 9.7.15).

Accumulators that are in flight hold poison in the registers and live here as one matrix of their
warpgroup until `wgmma.wait_group` gives them back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.machine.barrier import Parked

if TYPE_CHECKING:
    from cute_emulator.machine.shared_races import Unit
    from cute_emulator.units.wgmma import Operands, Wgmma


@dataclass(eq=False)
class Accumulator:
    """D of consecutive wgmmas of a warpgroup on the same registers.

    Attributes:
        shape: Static part of the first of them.
        parts: Each warp's registers before the first, or None where it does not read them.
        matrix: D as `float32` or `int32 [64, n]`, once the first has been carried out.
    """

    shape: Wgmma
    parts: list[np.ndarray | None] = field(default_factory=lambda: [None] * 4)
    matrix: np.ndarray | None = None


@dataclass(eq=False)
class Product:
    """One wgmma of a warpgroup.

    Attributes:
        accumulator: Its D.
        shape: Its static part.
        operands: Where its A and B lie in shared memory.
        reads_d: Whether it adds to D.
        warps: How many warps have issued it.
        number: Of its group among those of a warp, from 1; 0 unless races are looked for.
        a_parts: Each warp's registers of A, where it lies there.
        a_held: Each warp's registers of A by number, with what they held when it was issued.
        line: In the PTX.
        done: Whether it has been carried out.
        end: When, by the model of time.
    """

    accumulator: Accumulator
    shape: Wgmma
    operands: Operands
    reads_d: bool = False
    warps: int = 0
    number: int = 0
    a_parts: list[np.ndarray | None] = field(default_factory=lambda: [None] * 4)
    a_held: list[dict[int, Any]] = field(default_factory=lambda: [{}, {}, {}, {}])
    line: int = 0
    done: bool = False
    end: int = 0

    def continues(self, first: Product) -> bool:
        """Whether it adds a further K step to what an earlier one begins."""
        return (
            self.accumulator is first.accumulator
            and self.shape is first.shape
            and self.reads_d
            and self.operands.continues(first.operands)
        )


class WarpWgmmas(Parked):
    """A warp's wgmmas, and its groups that wait for them.

    Attributes:
        sequence: How many it has issued.
        fenced: Whether a wgmma.fence followed the last time that registers came back to the warp.
        commits: Groups committed.
        told: What the race detector knows of the open group's reads.
        returned: What came back in each register.
        flying: Accumulators in flight, by their registers.
        open: Uncommitted products.
        groups: Committed ones, oldest first.
        unit: Its warpgroup's wgmmas as readers of shared memory.
    """

    __slots__ = ("commits", "fenced", "flying", "groups", "open", "returned", "sequence", "told", "unit")

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 0
        self.fenced = False
        self.commits = 0
        self.told: set[tuple[Any, ...]] = set()
        self.unit: Unit | None = None
        self.returned: dict[int, Any] = {}
        self.flying: dict[tuple[int, ...], Accumulator] = {}
        self.open: list[Product] = []
        self.groups: deque[list[Product]] = deque()
