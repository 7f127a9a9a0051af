"""wgmmas that warps have issued and not waited for (PTX ISA 9.7.15).

The registers of accumulators in flight hold poison. Their values are stored here as one matrix of the
warpgroup, until `wgmma.wait_group` returns them.
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
        shape: Static part of the first wgmma.
        parts: Registers of each warp before the first wgmma, or None if it does not read them.
        matrix: D as `float32` or `int32 [64, n]`, once the first wgmma has been executed.
    """

    shape: Wgmma
    parts: list[np.ndarray | None] = field(default_factory=lambda: [None] * 4)
    matrix: np.ndarray | None = None


@dataclass(eq=False)
class Product:
    """One wgmma of a warpgroup.

    Attributes:
        accumulator: D of the wgmma.
        shape: Static part of the wgmma.
        operands: Location of A and B in shared memory.
        reads_d: Whether it adds to D.
        warps: Number of warps that have issued it.
        number: Number of its group among those of a warp, from 1; 0 unless races are checked.
        a_parts: Registers of A of each warp, if A is in registers.
        a_held: Registers of A of each warp by number, with their values at the issue.
        line: PTX line.
        done: Whether it has been executed.
        end: Time at which it is done, by the model of time.
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
        """Returns whether it adds a further K step to an earlier product."""
        return (
            self.accumulator is first.accumulator
            and self.shape is first.shape
            and self.reads_d
            and self.operands.continues(first.operands)
        )


class WarpWgmmas(Parked):
    """wgmmas of a warp, and its groups that wait for them.

    Attributes:
        sequence: Number of wgmmas issued.
        fenced: Whether a wgmma.fence followed the last return of registers to the warp.
        commits: Number of groups committed.
        recorded: Reads of the open group that the race detector has recorded.
        returned: Values returned in each register.
        flying: Accumulators in flight, by their registers.
        open: Uncommitted products.
        groups: Committed groups, oldest first.
        unit: wgmmas of its warpgroup as readers of shared memory.
    """

    __slots__ = ("commits", "fenced", "flying", "groups", "open", "returned", "sequence", "recorded", "unit")

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 0
        self.fenced = False
        self.commits = 0
        self.recorded: set[tuple[Any, ...]] = set()
        self.unit: Unit | None = None
        self.returned: dict[int, Any] = {}
        self.flying: dict[tuple[int, ...], Accumulator] = {}
        self.open: list[Product] = []
        self.groups: deque[list[Product]] = deque()
