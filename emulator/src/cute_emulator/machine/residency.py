"""Occupancy of a rank's SMs by the CTAs of all its running kernels, and the next cluster to become resident.

An SM of sm_90 and sm_100 holds 32 CTAs, 2048 threads, 228 KiB of shared memory and 65,536 registers (CUDA
programming guide, compute capabilities). Every CTA occupies one KiB of shared memory more than it requests.
Waiting clusters of several kernels become resident in the order in which the kernels were submitted: a later
kernel uses what the earlier ones leave, as on a GPU. No GPU guarantees that order, so `Schedule.grids` may be
`random`. The binding of clusters to neighbouring SMs is not modelled.
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
    """Resources of an SM that one CTA occupies.

    Attributes:
        threads: Threads, rounded up to whole warps.
        smem: Bytes of shared memory, the reserved KiB included.
        registers: Registers; 0 if the PTX does not define them.
    """

    threads: int
    smem: int
    registers: int = 0

    @staticmethod
    def of(entry: Function, threads: int, smem: int) -> Footprint:
        """Returns the footprint of a CTA of `threads` threads and `smem` bytes.

        The assembler chooses the registers. They are known if `.maxnreg` bounds them, and for kernels with
        `setmaxnreg`, which are launched with all that fit.
        """
        threads = -(-threads // 32) * 32
        each = entry.directives.get("maxnreg", (0,))[0]
        if not each and entry.pools_registers:
            at_once = entry.directives.get("minnctapersm", (1,))[0]
            each = REGISTERS_PER_SM // (threads * at_once) // 8 * 8
        return Footprint(threads, smem + SMEM_BASE, each * threads)

    def per_sm(self) -> int:
        """Returns the number of CTAs that fit on one SM."""
        return self.bound()[0]

    def bound(self) -> tuple[int, str]:
        """Returns the number of CTAs that fit on one SM, and the resource that limits it."""
        bounds = [
            (CTAS_PER_SM, "the CTAs an SM holds"),
            (THREADS_PER_SM // self.threads, "threads"),
            (SMEM_PER_SM // self.smem, "shared memory"),
        ]
        if self.registers:
            bounds.append((REGISTERS_PER_SM // self.registers, "registers"))
        return min(bounds, key=lambda each: each[0])


class Residency:
    """SMs of one rank.

    Args:
        num_sms: Number of SMs.
        order: One of `GRID_ORDERS`: order of the kernels whose clusters wait.
        seed: Seed of the random order.
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
        """Returns the tensor memory of an SM."""
        return self._columns.setdefault(sm, Columns())

    def capacity(self, need: Footprint) -> int:
        """Returns the number of CTAs that fit on the empty device."""
        return self.num_sms * need.per_sm()

    def enter(self, grid: Grid) -> None:
        """Adds a kernel that has begun: its clusters wait for `fill`."""
        self._waiting.append(grid)
        self._waiting.sort(key=lambda g: g.launch_order)

    def leave(self, grid: Grid, sms: list[int]) -> None:
        """Releases the SMs of a cluster that has ended; `sms` contains the SM of each CTA."""
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
        """Returns SMs for the CTAs of a cluster, the emptiest first; None if the cluster does not fit."""
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
