"""A kernel launch, and the machine that runs launches of several ranks concurrently."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.errors import Report
from cute_emulator.execution.grid import Grid, bank
from cute_emulator.execution.scheduler import Schedule, Scheduler
from cute_emulator.machine.asyncq import AsyncEngine
from cute_emulator.machine.checks import Checks
from cute_emulator.machine.memory import CONST, GlobalMemory
from cute_emulator.machine.residency import Residency
from cute_emulator.machine.roles import Roles, role_of
from cute_emulator.machine.stale import OldValues
from cute_emulator.machine.streams import StreamEvent, Streams
from cute_emulator.machine.visibility import HeldStores
from cute_emulator.rules import CHECKS, KINDS, OPTIONAL_CHECKS, RULES, STRICT_CHECKS, listeners
from cute_emulator.translate.coverage import coverage
from cute_emulator.translate.program import Program, program

if TYPE_CHECKING:
    from cute_emulator.trace import Trace

Dim3 = tuple[int, int, int]
SM_COUNT = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 188}
SUMS = ("device", "exact", "bitwise")
TRIGGER = "griddepcontrol.launch_dependents"
COPY_ENGINES = 16  # of each rank: copies of that many streams run concurrently


@contextmanager
def _collecting_only_its_own() -> Iterator[None]:
    """Limits Python's garbage collector to objects created inside, and collects those at the end.

    A process that has compiled a kernel holds half a million objects. Scanning them takes as long as a small
    GEMM, and a run creates enough objects to trigger scans.
    """
    if gc.get_freeze_count():  # the caller has already frozen objects
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        ptx: PTX text of the module.
        entry: Name of the `.entry` to run.
        grid: Number of CTAs along x, y, z (of CTAs, not of clusters).
        block: Threads of a CTA along x, y, z.
        cluster: CTAs of a cluster along x, y, z.
        dynamic_smem: Bytes of dynamic shared memory of a CTA.
        params: One blob per kernel parameter, with the sizes of `entry_params`.
        rank: The rank that launches.
        stream: Launches of one (rank, stream) run one after the other, in order of submission.
        cooperative: Every CTA of the grid must be resident at once.
        programmatic: Programmatic dependent launch: may start before its predecessor in the stream ended.
        const_image: Initial bytes of `.const` symbols of this rank (NVSHMEM's device state).
        engine: Whether a copy engine executes the launch, which then occupies no SM.
        ignore: Kinds of findings that are discarded for this module.
        work: The host's record of the launch, described by `work.what`; None without a host timeline.
    """

    ptx: str
    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    params: tuple[bytes, ...] = ()
    rank: int = 0
    stream: int = 0
    cooperative: bool = False
    programmatic: bool = False
    const_image: Mapping[str, bytes] = field(default_factory=dict)
    engine: bool = False
    ignore: frozenset[str] = frozenset()
    work: Any = None


class Machine:
    """GPUs of one or more ranks that share one address space.

    Args:
        arch: One of `SM_COUNT`; sm_120a has the residency limits of the others, except for shared memory.
        ranks: Number of ranks.
        mode: When async operations take effect: `immediate`, `random` or `lazy` (`machine.asyncq`).
        seed: Seed of every random choice; a run is a function of its inputs and the seed.
        schedule: Order in which warps run.
        checks: Names of the enabled checks, from `CHECKS` (all of these by default), `STRICT_CHECKS` and
            `OPTIONAL_CHECKS`.
        num_sms: SMs of each rank, or one number for all ranks; the default is the architecture's number.
            `machine.residency` defines how many CTAs are resident on them at once.
        progress: Called now and then during `run` with the number of warp instructions so far.
        limit: Largest number of warp instructions over all runs; None for no limit. A run that exceeds it
            ends by an `EmulatorError`.
        trace: Recorder of the times of each warp and each async operation.
        roles: Names of a CTA's warps by their number, or a function of it; the default is the trace's.
        ignore: Kinds of findings that are discarded, such as `exit-pending`.
        sums: One of `SUMS`. "device": products of fp8 accumulate with the device's number of bits; "exact":
            exactly enough for float32; "bitwise": as "device", and products of 16-bit types are also added
            instruction by instruction, by a rule that is independent of an element's position
            (`numbers.tensor_cores`).

    Attributes:
        memory: Registry of global memory.
        report: Findings, instruction count, time, printed lines.
        faults: Injected faults (`machine.inject`).
        intercepts: Handlers of device functions by name (see `intercept`).
        residency: SMs of each rank.
        engines: Copy engines of each rank.
        old: Overwritten values that loads may still return (`machine.stale`).
        ended: Callback at the end of a run, before the state of the run is dropped.

    Raises:
        ValueError: `arch`, `ranks`, `mode`, `checks`, `num_sms`, `ignore` or `sums` is invalid.
    """

    def __init__(
        self,
        arch: str,
        ranks: int = 1,
        mode: str = "immediate",
        seed: int = 0,
        schedule: Schedule | None = None,
        checks: tuple[str, ...] = CHECKS,
        num_sms: int | Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
        trace: Trace | None = None,
        limit: int | None = None,
        roles: Roles | None = None,
        ignore: Collection[str] = (),
        sums: str = "device",
    ) -> None:
        if sums not in SUMS:
            raise ValueError(f"{sums=} must be one of {', '.join(SUMS)}")
        if arch not in SM_COUNT:
            meant = "".join(f" ({known}?)" for known in SM_COUNT if known.rstrip("a") == arch.rstrip("af"))
            raise ValueError(f"{arch=}{meant} must be one of {', '.join(SM_COUNT)}")
        unknown = set(checks) - set(CHECKS) - set(STRICT_CHECKS) - set(OPTIONAL_CHECKS)
        if unknown or ranks < 1:
            known = ", ".join(CHECKS + STRICT_CHECKS + OPTIONAL_CHECKS)
            raise ValueError(f"{ranks=} must be positive and checks among {known}, got {sorted(unknown)}")
        if none := [kind for kind in ignore if kind not in KINDS]:
            unknown_kinds = ", ".join(map(repr, none))
            raise ValueError(f"no findings are of kind {unknown_kinds}; kinds: {', '.join(KINDS)}")
        sms = SM_COUNT[arch] if num_sms is None else num_sms
        each = [sms] * ranks if isinstance(sms, int) else list(sms)
        if len(each) != ranks or min(each) < 1:
            raise ValueError(f"{num_sms=} must be positive, and one number or one for each of {ranks} ranks")
        self.arch, self.ranks, self.sums = arch, ranks, sums
        self.memory = GlobalMemory()
        self.report = Report(ignore=frozenset(ignore))
        self.watch: dict[int, list[Any]] = {}
        self.checks = Checks(self.report, frozenset(checks), self.memory)
        self.checks.listeners = listeners(RULES, checks)
        self.races = self.checks.races
        self.report.measure = lambda: [coverage(p, items) for p, items in self.scheduler.ran.items()]
        self.engine = AsyncEngine(mode, seed)
        schedule = schedule or Schedule()
        self.scheduler = Scheduler(self.engine, schedule, seed)
        if limit is not None:
            self.scheduler.limit = limit
        self.residency = [Residency(n, schedule.grids, seed + rank) for rank, n in enumerate(each)]
        self.engines = [Residency(COPY_ENGINES) for _ in each]
        self.engine.moved = self.scheduler.moved
        self.clocks = None if trace is None else trace.clocks.of(arch)
        self.scheduler.clocks = self.engine.clocks = self.checks.clocks = self.clocks
        self._roles: Roles = roles if roles is not None else trace.roles if trace is not None else {}
        self.faults = self.scheduler.faults
        self.held = self.scheduler.held = HeldStores(mode, seed)
        self.checks.held = self.held
        self.old = OldValues(mode, seed)
        self.intercepts: dict[str, Callable[..., Any]] = {}
        self._streams = Streams(self.checks, self._begin)
        self._modules: dict[tuple[int, int], tuple[dict[str, int], list[Any]]] = {}
        self._before: dict[tuple[int, int], str] = {}  # PTX of the last launch of a stream
        self._launched = 0
        self._progress = progress
        self.ended: Callable[[], object] = lambda: None

    def role(self, warp: int) -> str:
        """Returns the role of a CTA's warp by its number, as far as roles were provided."""
        return role_of(self._roles, warp)

    def intercept(self, name: str, handler: Callable[..., Any]) -> None:
        """Replaces calls of the device function `name`.

        `handler(group, *arguments)` returns the value (or None), or `emit.BLOCK_RESULT` to be called again
        later.
        """
        self.intercepts[name] = handler

    def submit(self, launch: Launch) -> None:
        """Queues a launch after the earlier ones of its (rank, stream).

        Raises:
            ValueError: The launch cannot run (rank, block or grid shape, shared memory, parameters; a
                `CooperativeLaunchTooLargeError` for too many CTAs of a cooperative launch).
            KeyError: The module has no such entry (`Emulator.launch` raises a `ValueError` for it before).
        """
        if not 0 <= launch.rank < self.ranks:
            raise ValueError(f"rank {launch.rank} must be in 0..{self.ranks - 1}")
        self._grid(launch, 0, 0)
        key = launch.rank, launch.stream
        if launch.programmatic and TRIGGER in self._before.get(key, "") and self.races is not None:
            self.races.keeps_reads = True  # which the dependent launch may overwrite too early
        self._before[key] = launch.ptx
        self._streams.launch(launch)

    def record(self, rank: int, stream: int) -> StreamEvent:
        """Returns an event that completes when all work submitted to the stream so far has ended."""
        return self._streams.record((rank, stream))

    def wait(self, rank: int, stream: int, event: StreamEvent) -> None:
        """Delays later launches of a stream until an event, of any stream, completes."""
        self._streams.wait((rank, stream), event)

    @_collecting_only_its_own()
    def run(self) -> None:
        """Runs all submitted launches, ranks concurrently, until none is left.

        Raises:
            EmulatorError: A kernel failed; the machine has dropped all launches. The report, memory and the
                modules' `.global` variables remain.
        """
        begin = time.perf_counter()
        if self._progress is not None:
            self.scheduler.tick = lambda: self._progress(self.scheduler.executed) if self._progress else None
        try:
            with np.errstate(all="ignore"):
                if self.clocks is not None:
                    self.clocks.begin()
                self._streams.start()
                self._fill()
                self.scheduler.run()
            self.ended()
        finally:
            self._streams.clear()
            self._before.clear()
            for sms in (*self.residency, *self.engines):
                sms.clear()
            self.scheduler.reset()
            self.engine.reset()
            if self.clocks is not None:
                self.clocks.finish()
            self.watch.clear()
            self.checks.clear()
            self.held.clear()
            self.old.clear()
            self.report.instructions = self.scheduler.executed
            self.report.seconds += time.perf_counter() - begin

    def printed(self, text: str) -> None:
        """Records the output of a kernel's printf and prints it."""
        self.report.output.append(text)
        print(text, end="" if text.endswith("\n") else "\n")

    def _begin(self, launch: Launch, order: int, concurrent: Grid | None) -> Grid:
        self._launched += 1
        grid = self._grid(launch, self._launched, order)
        self.report.ignored_in[grid.program.module.text] = launch.ignore
        if concurrent is not None:
            grid.depend(concurrent)
        grid.finished, grid.triggered = self._finished, self._triggered
        if self.clocks is not None:
            self.clocks.launched(grid, concurrent)
        if not launch.engine:
            self.report.usage[grid.usage()] += 1
        grid.residency.enter(grid)
        return grid

    def _triggered(self, grid: Grid) -> None:
        self._streams.triggered(grid)
        self._fill()

    def _finished(self, grid: Grid) -> None:
        # A kernel has ended only when its bulk stores have: the next in the stream sees them.
        self.engine.drain(grid)
        if self.clocks is not None:
            self.clocks.ended(grid)
        grid.is_over = True
        grid.over.wake()
        self._streams.ended(grid)
        self._fill()

    def _fill(self) -> None:
        for sms in (*self.residency, *self.engines):
            sms.fill()

    def _grid(self, launch: Launch, number: int, order: int) -> Grid:
        code = program(launch.ptx, launch.entry)
        symbols, _ = self._module(code, launch.rank)
        offsets = code.symbol_addresses()
        pieces = {}
        nbytes = 0
        for v in code.module.variables.values():
            if v.space == "const":
                at = offsets[v.name] - CONST
                pieces[at] = bytes(launch.const_image.get(v.name, v.init))[: v.nbytes]
                nbytes = max(nbytes, at + v.nbytes)
        return Grid(self, launch, code, symbols, bank(nbytes, pieces), number, order)

    def _module(self, code: Program, rank: int) -> tuple[dict[str, int], list[Any]]:
        """Returns module-scope `.global` variables, allocated once per rank for the machine's lifetime."""
        key = (id(code), rank)
        if key not in self._modules:
            keep: list[Any] = [code]
            symbols: dict[str, int] = {}
            variables = [v for v in code.module.variables.values() if v.space == "global"]
            for v in variables:
                storage = np.zeros(max(v.nbytes, len(v.init)) + v.align, np.uint8)
                address = -(-storage.ctypes.data // v.align) * v.align
                self.memory.register(address, v.nbytes, rank, v.name, "module")
                symbols[v.name] = address
                keep.append(storage)
            for v in variables:
                data = bytearray(v.init)
                for at, name in v.refs:
                    data[at : at + 8] = {**code.symbol_addresses(), **symbols}[name].to_bytes(8, "little")
                self.memory.bytes_at(symbols[v.name], len(data))[:] = (
                    np.frombuffer(data, np.uint8) if data else 0
                )
            self._modules[key] = (symbols, keep)
        return self._modules[key]
