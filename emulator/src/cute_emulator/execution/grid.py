"""A launch in flight: its clusters and the state that they share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.errors import CooperativeLaunchTooLargeError, EmulatorError, Usage
from cute_emulator.machine.barrier import Parked
from cute_emulator.machine.cluster import Cluster
from cute_emulator.machine.order import History
from cute_emulator.machine.residency import Footprint
from cute_emulator.machine.warp import Cta, _joined
from cute_emulator.machine.window import SMEM_BASE

if TYPE_CHECKING:
    from cute_emulator.execution.launch import Launch, Machine
    from cute_emulator.execution.scheduler import Scheduler
    from cute_emulator.machine.residency import Residency
    from cute_emulator.translate.program import Program


def max_smem(arch: str) -> int:
    """Bytes of shared memory that a CTA may use (CUDA programming guide, compute capabilities)."""
    return 101_376 if arch == "sm_120a" else 232_448


class Grid:
    """One launch in flight.

    Attributes:
        program: Translated entry.
        symbols: Addresses of the module's variables on this rank.
        params: Parameter space.
        const: Constant bank of this rank.
        smem_bytes: End of a CTA's shared memory, the system's first KiB included.
        number: Position of the launch in the order of beginning.
        launch_order: Position of the launch in the order of submission.
        footprint: Resources of an SM that one CTA occupies.
        triggers: Number of CTAs that have executed `griddepcontrol.launch_dependents`.
        prerequisite: Grid that this grid may overlap as its programmatic dependent.
        over: Groups that wait for the grid's end.
        pairs: Whether the grid's tcgen05 instructions name CTA pairs; None before the first.
        is_over: Whether the grid has ended, its bulk stores included.
        final: Happens-before state at the end of the grid.
    """

    machine: Machine
    launch: Launch
    program: Program
    scheduler: Scheduler
    residency: Residency
    smem_bytes: int
    number: int
    launch_order: int
    footprint: Footprint

    def __init__(
        self,
        machine: Machine,
        launch: Launch,
        program: Program,
        symbols: dict[str, int],
        const: bytes,
        number: int,
        launch_order: int = 0,
    ) -> None:
        self.machine, self.launch, self.program, self.symbols = machine, launch, program, symbols
        self.scheduler, self.checks, self.engine = machine.scheduler, machine.checks, machine.engine
        self.pairs: bool | None = None
        self.const, self.number, self.launch_order = const, number, launch_order
        self.params = self._layout(launch.params)
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.smem_bytes = SMEM_BASE + program.static_smem + launch.dynamic_smem
        self.residency = (machine.engines if launch.engine else machine.residency)[launch.rank]
        cx, cy, cz = launch.cluster
        self.cluster_size = cx * cy * cz
        self._validate()
        self._waiting = deque(self._origins())
        self._running: list[Cluster] = []
        self.total = launch.grid[0] * launch.grid[1] * launch.grid[2]
        self.ended = 0
        self.history = self.checks.history(launch.rank, launch.stream)
        self.learnt: dict[int, int] = {}
        self.known_grids = self.history.grids
        self.finished: Callable[[Grid], None] = lambda grid: None
        self.triggered: Callable[[Grid], None] = lambda grid: None
        self.triggers = 0
        self.prerequisite: Grid | None = None
        self.over, self.is_over = Parked(), False
        self.final = History()

    def _layout(self, blobs: tuple[bytes, ...]) -> bytes:
        params = self.program.entry.params
        if len(blobs) != len(params):
            raise ValueError(f"{self.launch.entry} takes {len(params)} parameters, got {len(blobs)}")
        out = bytearray(self.program.param_bytes)
        for p, blob in zip(params, blobs, strict=True):
            if len(blob) != p.nbytes:
                raise ValueError(f"parameter {p.name} has {p.nbytes} bytes, got {len(blob)}")
            at = self.program.param_symbols[p.name]
            out[at : at + p.nbytes] = blob
        return bytes(out)

    def _validate(self) -> None:
        launch, cluster = self.launch, self.launch.cluster
        if any(g % c for g, c in zip(launch.grid, cluster, strict=True)) or min(*launch.grid, *cluster) < 1:
            raise ValueError(f"grid {launch.grid} is not a positive multiple of the cluster {cluster}")
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"block {launch.block} has {self.threads} threads; 1 to 1024 are valid")
        need = self.program.entry.directives.get("reqntid")
        if need is not None and (*need, 1, 1)[:3] != launch.block:
            raise ValueError(f"the kernel requires a block of {need}, got {launch.block}")
        most = max_smem(self.machine.arch)
        if self.smem_bytes - SMEM_BASE > most:
            raise ValueError(
                f"{self.smem_bytes - SMEM_BASE} bytes of shared memory per CTA requested; at most {most} are "
                "valid"
            )
        self.footprint = Footprint.of(self.program.entry, self.threads, self.smem_bytes - SMEM_BASE)
        fit = self.residency.capacity(self.footprint)
        if self.cluster_size > min(16, fit):
            raise ValueError(
                f"clusters of {self.cluster_size} CTAs do not fit: a cluster has at most 16, and {fit} CTAs "
                f"can be resident on {self.residency.num_sms} SMs"
            )
        total = launch.grid[0] * launch.grid[1] * launch.grid[2]
        if launch.cooperative and total > fit // self.cluster_size * self.cluster_size:
            raise CooperativeLaunchTooLargeError(
                f"cooperative launch of {total} CTAs in clusters of {self.cluster_size}, but {fit} CTAs can "
                f"be resident at once on {self.residency.num_sms} SMs"
            )

    def usage(self) -> Usage:
        """Returns the resources of the device that the grid uses."""
        launch, need = self.launch, self.footprint
        smem, registers = self.smem_bytes - SMEM_BASE, need.registers // need.threads
        return Usage(launch.entry, launch.grid, launch.block, launch.cluster, smem, registers, *need.bound())

    def _origins(self) -> Iterator[tuple[int, int, int]]:
        (gx, gy, gz), (cx, cy, cz) = self.launch.grid, self.launch.cluster
        for z in range(0, gz, cz):
            for y in range(0, gy, cy):
                for x in range(0, gx, cx):
                    yield x, y, z

    @property
    def exhausted(self) -> bool:
        """Returns whether every cluster has become resident or was cancelled."""
        return not self._waiting

    def start_cluster(self, sms: list[int]) -> None:
        """Makes the next cluster resident, one CTA on each of some SMs."""
        cluster = Cluster(self, self._waiting.popleft())
        self._running.append(cluster)
        for cta, sm in zip(cluster.ctas, sms, strict=True):
            cta.sm, cta.columns = sm, self.residency.columns(sm)
            for warp in cta.warps:
                if self.checks.clocks is not None:
                    self.checks.clocks.started(warp)
                self.scheduler.live[id(warp)] = warp
                self.scheduler.ready(warp)

    def cancel(self) -> tuple[int, int, int] | None:
        """Takes the next cluster that has not started, for `clusterlaunchcontrol.try_cancel`.

        Returns the position of the cluster's first CTA; its CTAs count as ended. Returns None if all clusters
        have started or were cancelled.
        """
        if not self._waiting:
            return None
        self.ended += self.cluster_size
        return self._waiting.popleft()

    def depend(self, before: Grid) -> None:
        """Lets the grid overlap an earlier one; only `griddepcontrol.wait` orders it after that grid's work.

        PTX ISA 9.7.13.13: "If the prerequisite grid is using griddepcontrol.launch_dependents, then the
        dependent grid must use griddepcontrol.wait to ensure correct functional execution."
        """
        self.prerequisite, self.history = before, before.history
        self.known_grids = self.history.grids

    @property
    def lets_dependents_begin(self) -> bool:
        """Returns whether each CTA of the grid has triggered its dependents or has ended."""
        running = sum(cta.triggers and bool(cta.live_warps) for c in self._running for cta in c.ctas)
        return running + self.ended >= self.total

    def trigger(self, cta: Cta) -> None:
        """Records that a CTA lets dependents begin (`griddepcontrol.launch_dependents`)."""
        if not cta.triggers:
            cta.triggers = True
            self.triggers += 1
            if self.lets_dependents_begin:
                self.triggered(self)

    def cta_exited(self, cta: Cta) -> None:
        """Records the end of a CTA; the cluster's memory is released when all its CTAs have ended."""
        self.checks.cta_exit(cta)
        for first in {*cta.tmem_owner.tolist()} - {0}:
            cta.columns.free(first - 1, int((cta.tmem_owner == first).sum()))
        self.checks.cta_ended(cta)
        for warp in cta.warps:
            self.scheduler.live.pop(id(warp), None)
        self.ended += 1
        cluster = cta.cluster
        if all(c.live_warps == 0 for c in cluster.ctas):
            self._running.remove(cluster)
            self.residency.leave(self, [c.sm for c in cluster.ctas])
        if self.ended == self.total:
            self.checks.grid_ended(self)
            self.finished(self)
        elif self.triggers and self.lets_dependents_begin:
            self.triggered(self)

    def joined(self, slot: int, mask: int, new: Any, old: Any) -> Any:
        """Returns `new` in the lanes of `mask`, `old` elsewhere, for register `slot`."""
        return new if new is old else _joined(self.program.widths[slot], mask, new, old)

    def __str__(self) -> str:
        return f"launch {self.number} ({self.launch.entry[:60]}) of rank {self.launch.rank}"


def bank(nbytes: int, pieces: dict[int, bytes]) -> bytes:
    """Returns a constant bank with initial contents."""
    out = np.zeros(nbytes, np.uint8)
    for at, data in pieces.items():
        if at + len(data) > nbytes:
            raise EmulatorError(f"constant data of {len(data)} bytes at {at} in a bank of {nbytes}")
        out[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return out.tobytes()
