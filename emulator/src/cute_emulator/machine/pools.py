"""Resources that the warps of an SM or a CTA share: columns of tensor memory, and registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_emulator.machine.barrier import Parked

if TYPE_CHECKING:
    from cute_emulator.machine.warp import Cta, Warp

COLUMNS = 512
"""Columns of tensor memory of an SM, shared by its resident CTAs (PTX ISA 9.7.16.1)."""


class Columns(Parked):
    """Columns of one SM, and the groups that wait for free ones."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = np.zeros(COLUMNS, bool)

    def free(self, first: int, count: int) -> None:
        """Releases columns."""
        self.taken[first : first + count] = False
        self.wake()


def allocate(ctas: list[Cta], count: int) -> int | None:
    """Allocates columns that are free on the SMs of some CTAs; returns the first, or None if there are none.

    Both CTAs of a pair allocate the same columns, at the first of the two allocations; the second CTA reads
    them from `promised`.
    """
    mine = ctas[0]
    if len(ctas) > 1 and mine.promised:
        return mine.promised.popleft()
    pools = {id(cta.columns): cta.columns for cta in ctas}
    for first in range(0, COLUMNS - count + 1, 32):
        if not any(pool.taken[first : first + count].any() for pool in pools.values()):
            for pool in pools.values():
                pool.taken[first : first + count] = True
            for peer in ctas[1:]:
                peer.promised.append(first)
            return first
    return None


class Registers(Parked):
    """Registers of a CTA, which its warps exchange by `setmaxnreg` (PTX ISA 9.7.19.5).

    `.inc` waits until enough registers are free in the pool with which the CTA was launched. All warps of a
    warpgroup must execute the same `setmaxnreg`.

    Attributes:
        free: Registers that no warp has.
        each: Registers of a thread, by warp.
        done: Amounts of each warp's `setmaxnreg`, in order.
        lines: PTX line of each warp's last one.
    """

    def __init__(self, total: int, warps: int, each: int) -> None:
        super().__init__()
        self.free = total - 32 * warps * each
        self.each = dict.fromkeys(range(warps), each)
        self.done: dict[int, list[str]] = {n: [] for n in range(warps)}
        self.lines = dict.fromkeys(range(warps), 0)

    def change(self, warp: Warp, amount: int, line: int, name: str) -> bool:
        """Sets a warp's registers per thread; returns False if it must wait."""
        more = 32 * (amount - self.each[warp.index])
        if more > self.free:
            return False
        self.free -= more
        self.each[warp.index] = amount
        self.done[warp.index].append(name)
        self.lines[warp.index] = line
        if more < 0:
            self.wake()
        return True
