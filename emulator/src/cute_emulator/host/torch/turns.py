"""One script per rank, in threads that take turns.

Only one rank's Python runs at a time. A turn ends only where the rank would block: at a collective, or at a
wait of the host for the device. So a run is deterministic, and the DSL's compiler (one object per process) is
never entered twice. The machine runs exactly when no rank can continue without it. State that each process
has separately changes with the turn (`process_state`).

A kernel that traps ends the device for all ranks, as on a GPU. A wait for the device then raises an
exception, which a script may catch to examine memory; no further launch runs. Other errors that end a run are
verdicts of the emulator, and a script cannot catch them: `Aborted` unwinds every rank.
A script of one rank takes no turns (`script.one_device`): an error is raised where its host waits.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

from cute_emulator.errors import EmulatorError, KernelTrap
from cute_emulator.host.torch import process_state

IDLE_SECONDS = 300.0
"""Longest time without progress; a child process, such as a compiler, may need it."""
BUSY = 0.002
"""Processor share below which a process is idle; the measurement itself uses a tenth of it."""
STACK_LINES = 8


def current_frames() -> dict[int, FrameType]:
    """Returns the topmost frame of each thread, by thread identifier.

    This function has the only call of `sys._current_frames`, which allocates while it holds the interpreter's
    list of threads. Before CPython 3.11.9 such an allocation may start the garbage collector. The destructor
    of a `threading.local` then waits for the same list, for ever (python/cpython#106883). So the collector is
    disabled during the call.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


class Aborted(BaseException):
    """Exception that unwinds a rank because another rank failed; handlers of `Exception` do not catch it."""


class Turns:
    """Passes one turn among ranks.

    Args:
        ranks: Number of threads.
        run_device: Runs everything that was launched; called with every rank blocked.
        idle_seconds: Longest time without progress. After it the rank with the turn waits for an event that
            only another rank could cause.
    """

    def __init__(
        self, ranks: int, run_device: Callable[[], object], idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._idle_seconds = idle_seconds
        self._ranks = ranks
        self._run_device = run_device
        self._changed = threading.Condition()
        self._turn: int | None = 0
        self._ready: list[Callable[[], bool] | None] = [None] * ranks  # None: can go on
        self._wants_device = [False] * ranks
        self._finished = [False] * ranks
        self._error: BaseException | None = None
        self._trap: KernelTrap | None = None
        self._local = threading.local()

    @property
    def rank(self) -> int:
        """Returns the calling thread's rank."""
        return int(self._local.rank)

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Runs one body per rank until all have ended.

        Raises:
            BaseException: The first exception of a body or of the device; a trap also if the bodies caught it
                and ended normally.
            EmulatorError: There was no progress for too long; the message lists each rank's position.
        """
        threads = [
            threading.Thread(target=self._body, args=(rank, body), name=f"rank {rank}", daemon=True)
            for rank, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        watch = _Watch(self._idle_seconds)
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # so that Ctrl-C is served
                if watch.idle():
                    raise EmulatorError(self._where(threads))
        if error := self._error or self._trap:
            raise error

    def block(self, ready: Callable[[], bool]) -> None:
        """Ends this rank's turn until `ready()`."""
        self._wait(ready, wants_device=False)

    def wait_for_device(self, done: Callable[[], bool]) -> None:
        """Ends this rank's turn until its launches are `done()`.

        Raises:
            KernelTrap: A kernel of any rank executed `trap`, now or before.
        """
        if not done():
            self._wait(lambda: self._trap is not None or done(), wants_device=True)
            if self._trap is not None:
                raise copy.copy(self._trap)  # each rank's exception has a separate traceback

    def _wait(self, ready: Callable[[], bool], wants_device: bool) -> None:
        rank, state = self.rank, process_state.take()
        with self._changed:
            self._ready[rank], self._wants_device[rank] = ready, wants_device
            self._pass_on()
            self._await_turn(rank)
            self._ready[rank], self._wants_device[rank] = None, False
        process_state.put(state)

    def _body(self, rank: int, body: Callable[[], None]) -> None:
        self._local.rank = rank
        state = process_state.new()
        try:
            with self._changed:
                self._await_turn(rank)
            process_state.put(state)
            body()
        except Aborted:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._finished[rank] = True
                if self._turn == rank:
                    self._pass_on()

    def _await_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
        if self._error is not None:
            raise Aborted

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _where(self, threads: Sequence[threading.Thread]) -> str:
        """Returns which rank has the turn, and the Python stack of each rank."""
        frames = current_frames()
        stacks = [
            f"\n{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-STACK_LINES:])
            for thread in threads
            if thread.ident in frames
        ]
        return (
            f"no progress for {self._idle_seconds:g} s: rank {self._turn} has the turn and waits for an "
            f"event other than a collective or the device; other ranks cannot cause it during the turn"
            f"{''.join(stacks)}"
        )

    def _pass_on(self) -> None:
        """Passes the turn to the next rank that can continue; runs the device if none can."""
        chosen = self._next()
        if chosen is None and any(self._wants_device):
            try:
                self._run_device()
            except KernelTrap as trap:
                self._trap = trap
            except BaseException as error:
                self._error = self._error or error
            chosen = self._next()
        if chosen is None and not all(self._finished) and self._error is None:
            waiting = [r for r in range(self._ranks) if not self._finished[r]]
            self._error = EmulatorError(f"ranks {waiting} wait at a collective that the others never reach")
        self._turn = chosen
        self._changed.notify_all()

    def _next(self) -> int | None:
        start = -1 if self._turn is None else self._turn
        for step in range(1, self._ranks + 1):
            rank = (start + step) % self._ranks
            ready = self._ready[rank]
            if not self._finished[rank] and (ready is None or ready()):
                return rank
        return None


class _Watch:
    """Detector of a process that was idle for a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin, self._spent = time.monotonic(), time.process_time()

    def idle(self) -> bool:
        """Returns whether the process was idle; call it periodically."""
        now, spent = time.monotonic(), time.process_time()
        if spent - self._spent > BUSY * self._seconds:
            self._begin, self._spent = now, spent
        return now - self._begin > self._seconds
