"""One script per rank, in threads that take turns.

Only one rank's Python runs at a time, and a turn ends only where the rank would block: at a collective, or
where the host waits for the device. So a run is deterministic, the DSL's compiler (which is one object) is
never entered twice, and the machine runs exactly when no rank can go on without it. What a process has to
itself changes with the turn (`process_state`).

A kernel that traps ends the device for all ranks. As on a GPU, who waits for it is told by an exception,
which a script may catch to look for what the kernel left behind; no launch runs any more. What else breaks a
run off is the emulator's own verdict, and no script's to catch.
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
"""A child process, a compiler say, may take so long."""
BUSY = 0.002
"""Share of a processor below which a process does nothing; looking whether it does takes a tenth of that."""
STACK_LINES = 8


def current_frames() -> dict[int, FrameType]:
    """Returns the topmost frame of each thread, by thread identifier.

    The only call of `sys._current_frames`, which allocates while it holds the interpreter's list of threads.
    Before CPython 3.11.9 an allocation there may start the collector, and the destructor of a
    `threading.local` waits for the same list, for ever (python/cpython#106883).
    So the collector is off meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


class Aborted(BaseException):
    """Another rank failed; unwinds this one without being caught by its handlers."""


class Turns:
    """Hands one turn around.

    Args:
        ranks: How many threads.
        run_device: Runs everything that was launched; called with every rank blocked.
        idle_seconds: How long the process may do nothing: then the rank whose turn it is waits for something
            that another rank would have to do.
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
        """The calling thread's rank."""
        return int(self._local.rank)

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Runs one body per rank, to the end of all.

        Raises:
            BaseException: The first that a body raised, or that the device did; a trap also where the bodies
                that it was told to went on to their ends.
            EmulatorError: Nothing was done for too long; it says where each rank stands.
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
            KernelTrap: A kernel, of whichever rank, executed `trap`, now or before.
        """
        if not done():
            self._wait(lambda: self._trap is not None or done(), wants_device=True)
            if self._trap is not None:
                raise copy.copy(self._trap)  # each rank's has a traceback of its own

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
        """Whose turn it is, and where the Python of each rank stands."""
        frames = current_frames()
        stands = [
            f"\n{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-STACK_LINES:])
            for thread in threads
            if thread.ident in frames
        ]
        return (
            f"nothing was done for {self._idle_seconds:g} s: rank {self._turn} has the turn, and waits for "
            f"something other than a collective or the device, which other ranks cannot bring about "
            f"meanwhile{''.join(stands)}"
        )

    def _pass_on(self) -> None:
        """Gives the turn to the next rank that can go on; runs the device if none can."""
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
    """Tells when this process has done nothing for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin, self._spent = time.monotonic(), time.process_time()

    def idle(self) -> bool:
        """To be asked now and then."""
        now, spent = time.monotonic(), time.process_time()
        if spent - self._spent > BUSY * self._seconds:
            self._begin, self._spent = now, spent
        return now - self._begin > self._seconds
