"""Clusters: CTAs that can access each other's shared memory, with a common barrier."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.barrier import CountBarrier
from cute_emulator.machine.shared_races import Party, Unit
from cute_emulator.machine.warp import Cta
from cute_emulator.machine.window import CTA_WINDOW, WINDOW

if TYPE_CHECKING:
    from cute_emulator.execution.grid import Grid
    from cute_emulator.machine.warp import Group, Warp


class Cluster:
    """CTAs that can access each other's shared memory: one address window of 16 MiB per CTA."""

    grid: Grid
    size: int

    def __init__(self, grid: Grid, first: tuple[int, int, int]) -> None:
        self.grid = grid
        cx, cy, cz = grid.launch.cluster
        self.size = cx * cy * cz
        self.first = first
        self._map = mmap.mmap(-1, self.size * CTA_WINDOW)
        self.window = np.frombuffer(self._map, np.uint8)
        self.watch: dict[int, list[Group]] = {}
        self.live_threads: int = self.size * grid.threads
        self.barrier = CountBarrier(
            f"barrier of the cluster at {first} of rank {grid.launch.rank}",
            lambda: self.live_threads,
            "cluster",
        )
        self.barrier.clocks = grid.checks.clocks
        self.parties: list[Party] = []
        self.warp_parties: list[tuple[int, int]] = []  # number and agent
        self.ctas: list[Cta] = []
        offsets = [(x, y, z) for z in range(cz) for y in range(cy) for x in range(cx)]
        for rank, (x, y, z) in enumerate(offsets):
            self.ctas.append(Cta(self, rank, (first[0] + x, first[1] + y, first[2] + z)))

    def lanes_exited(self, warp: Warp, lanes: int) -> None:
        """Removes exited threads from the cluster's barrier, whether they had arrived or not."""
        self.live_threads -= lanes.bit_count()
        if warp.cluster_token == self.barrier.generation:
            self.barrier.arrived -= (lanes & warp.cluster_lanes).bit_count()
        self.barrier.check()

    def enrol(self, party: Party) -> int:
        """Adds a party that accesses the cluster's memories; returns its number."""
        self.parties.append(party)
        if party.agent is not None:
            self.warp_parties.append((len(self.parties) - 1, party.agent))
        return len(self.parties) - 1

    def unit(self, users: dict[str, Unit], name: str, what: str, of: object, kind: str) -> Unit:
        """Returns the asynchronous unit `name` of a warp or warpgroup.

        Args:
            users: Units of the warp or warpgroup by name.
            name: Name of the unit.
            what: Operation of the unit, in messages.
            of: Warp or warpgroup.
            kind: Kind of the unit.
        """
        unit = users.get(name)
        if unit is None:
            unit = users[name] = Unit(self.enrol(Party(f"{what} of {of}", None, kind)))
        return unit

    def owner(self, address: int) -> Cta:
        """Returns the CTA whose window contains a shared address."""
        rank = (address & WINDOW) // CTA_WINDOW
        if rank >= self.size:
            raise EmulatorError(f"shared address {address:#x} names CTA {rank} of a cluster of {self.size}")
        return self.ctas[rank]
