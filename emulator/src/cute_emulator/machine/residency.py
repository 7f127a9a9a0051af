"""Which SMs of a rank the CTAs of all its running kernels occupy, and which cluster becomes resident next.

An SM of sm_90 and sm_100 holds 32 CTAs, 2048 threads, 228 KiB of shared memory, of which every CTA takes one
KiB more than it asked for, and 65,536 registers (CUDA programming guide, compute capabilities). The clusters
that wait of several kernels become resident in the order in which these were submitted: a later kernel gets
what the earlier ones leave, as on a GPU. No GPU promises that order, so `Schedule.grids` may be `random`.
Where an SM lies does not matter: the clusters' bound to neighbouring SMs is not modelled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_emulator.machine.pools import Columns
from cute_emulator.machine.window import SMEM_BASE

if TYPE_CHECKING:
    from cute_emulator.execution.grid import Grid
    from cute_emulator.ptx.ir import Function

CTAS_PER_SM = 32
THREADS_PER_SM = 2048
SMEM_PER_SM = 233_472  # bytes
REGISTERS_PER_SM = 65_536
GRID_ORDERS = ("submission", "random")


@dataclass(frozen=True)
class Footprint:
    """What one CTA takes of an SM.

    Attributes:
        threads: Threads, whole warps.
        smem: Bytes of shared memory, the reserved KiB included.
        registers: Registers; 0 where the PTX does not tell.
    """

    threads: int
    smem: int
    registers: int = 0

    @staticmethod
    def of(entry: Function, threads: int, smem: int) -> Footprint:
        """Of a CTA of `threads` threads and `smem` bytes.

        Registers are the assembler's choice. They are known where `.maxnreg` bounds them, and of kernels that
        pass them around with `setmaxnreg`, which are launched with all that fit.
        """
        threads = -(-threads // 32) * 32
        each = entry.directives.get("maxnreg", (0,))[0]
        if not each and any(ins.parts[0] == "setmaxnreg" for ins in entry.instructions):
            at_once = entry.directives.get("minnctapersm", (1,))[0]
            each = REGISTERS_PER_SM // (threads * at_once) // 8 * 8
        return Footprint(threads, smem + SMEM_BASE, each * threads)

    def per_sm(self) -> int:
        """CTAs that fit on one SM."""
        return self.bound()[0]

    def bound(self) -> tuple[int, str]:
        """CTAs that fit on one SM, and what lets no more of them fit."""
        bounds = [
            (CTAS_PER_SM, "the CTAs an SM holds"),
            (THREADS_PER_SM // self.threads, "threads"),
            (SMEM_PER_SM // self.smem, "shared memory"),
        ]
        if self.registers:
            bounds.append((REGISTERS_PER_SM // self.registers, "registers"))
        return min(bounds, key=lambda each: each[0])


class Residency:
    """The SMs of one rank.

    Args:
        num_sms: How many it has.
        order: One of `GRID_ORDERS`: whose cluster is next.
        seed: Of the random order.
    """

    def __init__(self, num_sms: int, order: str = "submission", seed: int = 0) -> None:
        if order not in GRID_ORDERS:
            raise ValueError(f"{order=} must be one of {GRID_ORDERS}")
        self.num_sms: int = num_sms
        self._rng = random.Random(seed ^ 0x5E51DE) if order == "random" else None
        self._waiting: list[Grid] = []
        self._free = np.empty((num_sms, 4), np.int64)
        self._columns: dict[int, Columns] = {}
        self.clear()

    def clear(self) -> None:
        """Frees everything."""
        self._waiting.clear()
        self._columns.clear()
        self._free[:] = CTAS_PER_SM, THREADS_PER_SM, SMEM_PER_SM, REGISTERS_PER_SM

    def columns(self, sm: int) -> Columns:
        """The tensor memory of an SM."""
        return self._columns.setdefault(sm, Columns())

    def capacity(self, need: Footprint) -> int:
        """CTAs that fit on the empty device."""
        return self.num_sms * need.per_sm()

    def enter(self, grid: Grid) -> None:
        """A kernel has begun: its clusters wait for room, and for `fill`."""
        self._waiting.append(grid)
        self._waiting.sort(key=lambda g: g.launch_order)

    def leave(self, grid: Grid, sms: list[int]) -> None:
        """A cluster of a kernel has ended, with one CTA on each SM of `sms` (repeated where it had more)."""
        np.add.at(self._free, sms, _row(grid.footprint))
        self.fill()

    def fill(self) -> None:
        """Makes as many clusters resident as fit."""
        waiting = self._waiting
        while waiting:
            grid = waiting[0] if self._rng is None else self._rng.choice(waiting)
            if grid.exhausted:
                waiting.remove(grid)
                continue
            sms = self._place(grid)
            if sms is None and self._rng is not None:  # another may fit
                fitting = [(g, self._place(g)) for g in waiting if g is not grid and not g.exhausted]
                grid, sms = next(((g, s) for g, s in fitting if s is not None), (grid, None))
            if sms is None:
                return
            np.subtract.at(self._free, sms, _row(grid.footprint))
            grid.start_cluster(sms)

    def _place(self, grid: Grid) -> list[int] | None:
        """SMs for the CTAs of a cluster, the emptiest first; None where it does not fit."""
        need, sms = _row(grid.footprint), []
        free = self._free
        for _ in range(grid.cluster_size):
            room = np.where((free >= need).all(1), free[:, 0], 0)
            best = int(room.argmax())
            if not room[best]:
                return None
            sms.append(best)
            if grid.cluster_size > 1:
                free = free.copy() if free is self._free else free
                free[best] -= need
        return sms


def _row(need: Footprint) -> np.ndarray:
    return np.array((1, need.threads, need.smem, need.registers), np.int64)
