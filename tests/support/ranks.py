"""Ranks for tests: a set of processes that stays up and runs one function after another on all of them.

    with Ranks(4) as ranks:
        ranks.run(body, case)     # body(rank, size, case) on every rank; raises if it raised on any

Starting a process that imports torch costs seconds, a call on a set that is up costs a millisecond, so that
every case of a test can be a test of its own.

A failure puts the rank that failed first in front: the others' are mostly its consequences. A rank that hangs
is asked for the stacks of its threads, one that crashes leaves them. What ranks write on stderr is kept in a
file each, and shown if the rank crashes or hangs: of a native thread that aborts, the words of its exception.
"""

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

STDERR_SHOWN = 4000
"""Characters, from the end."""


class RankError(AssertionError):
    """A function failed on some rank; the message holds each failing rank's traceback."""


class Ranks:
    """A world of `size` processes: on CPUs joined by gloo, or on one GPU each joined by NCCL, too.

    Args:
        size: Processes.
        device: "cpu" or "cuda".
        timeout: Seconds that a rank waits for a peer in torch.distributed.
        limit: Seconds that a function may take before the processes are ended.
        threads: Intra-op threads of torch in each process.
        preload: Modules that the functions import, to be imported once for all processes. The first set of a
            process decides.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str = "cpu",
        timeout: float = 60,
        limit: float = 240,
        threads: int = 1,
        preload: Sequence[str] = (),
    ):
        # A function takes seconds on a machine of its own. On two cores that others use as well, 15 processes
        # that wanted to run at once made it ten times that; these bounds are a few times more.
        self.size = size
        self.timeout = timeout
        self._settings = (device, timeout, threads)
        self._limit = limit
        self._grace = 10.0
        self._preload = preload
        self._folder = tempfile.TemporaryDirectory(prefix="overlap-gemm-ranks-")
        # A server process imports torch once, then forks a clean process for every rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *self._preload])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            _stacks_file(self._folder.name, rank).touch()
            _stderr_file(self._folder.name, rank).touch()
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.size, self._folder.name, *self._settings),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(rank, size, *args)` on every rank.

        Args:
            function: A function at the top level of its file.
            *args: Anything that can be pickled.

        Returns:
            The results, in rank order.

        Raises:
            RankError: The function raised on a rank, or did not end within the limit. The processes are ended
                then: their peers may be stuck in the middle of anything.
            RuntimeError: The processes are ended.
        """
        if not self._pipes:
            raise RuntimeError("these ranks have been closed, or ended by a failure")
        message = (inspect.getfile(function), function.__qualname__, args)
        for pipe in self._pipes:
            pipe.send(message)
        answers = self._collect()
        failures = [
            f"rank {rank} of {self.size}, after {seconds:.1f} s:\n{value}"
            for rank, (good, value, seconds) in answers.items()
            if not good
        ]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        """Whether all processes are up."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Ends the processes, and those that they started."""
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it ended before it was the first of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self) -> dict[int, tuple[bool, Any, float]]:
        """(good, result or failure, seconds) by rank, in the order in which they came."""
        answers: dict[int, tuple[bool, Any, float]] = {}
        start = time.monotonic()
        deadline = start + self._limit
        while len(answers) < self.size:
            open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            seconds = time.monotonic() - start
            if not ready:
                for rank in open_pipes.values():
                    answers[rank] = (
                        False,
                        f"did not end in time\n{self._stacks(rank)}{self._words(rank)}",
                        seconds,
                    )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    answers[rank] = (*pipe.recv(), seconds)
                except (EOFError, OSError):
                    answers[rank] = (False, f"the process is gone, {self._remains(rank)}", seconds)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + self._grace)
        return answers

    def _remains(self, rank: int) -> str:
        """How a process ended, and the stacks and words it left."""
        process = self._processes[rank]
        process.join()
        return (
            f"exit code {process.exitcode}\n{_stacks_file(self._folder.name, rank).read_text()}"
            f"{self._words(rank)}"
        )

    def _words(self, rank: int) -> str:
        """The end of what a rank wrote on stderr."""
        words = _stderr_file(self._folder.name, rank).read_text(errors="replace")[-STDERR_SHOWN:].strip()
        return f"stderr of rank {rank}:\n{words}\n" if words else ""

    def _stacks(self, rank: int) -> str:
        """The stacks of a rank's threads, which it writes at a signal, whatever it is stuck in."""
        process, file = self._processes[rank], _stacks_file(self._folder.name, rank)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        patience = time.monotonic() + 5
        size = -1
        while time.monotonic() < patience and not 0 < size == file.stat().st_size:
            size = file.stat().st_size
            time.sleep(0.2)
        return file.read_text()


@contextmanager
def rank_pools(**options: Any) -> Iterator[Callable[[int], Ranks]]:
    """`pool(P)`: a set of P ranks, started at its first use and anew after a failure; all end with the block.

    Args:
        **options: As for `Ranks`.
    """
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size, **options)
        return pools[size]

    try:
        yield pool
    finally:
        for ranks in pools.values():
            ranks.close()


def _stacks_file(folder: str, rank: int) -> Path:
    """Where a rank writes its threads' stacks when it crashes or is told to."""
    return Path(folder) / f"stacks-{rank}"


def _stderr_file(folder: str, rank: int) -> Path:
    """Where a rank's stderr goes, its native threads' included."""
    return Path(folder) / f"stderr-{rank}"


def _serve(
    pipe: Connection, rank: int, size: int, folder: str, device: str, timeout: float, threads: int
) -> None:
    """A rank's loop: receives functions, answers with results."""
    os.setpgid(0, 0)  # what it starts is found by its group (Megatron has a server for checkpoints)
    with _stderr_file(folder, rank).open("w") as words:
        os.dup2(words.fileno(), 2)
    stacks = _stacks_file(folder, rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    _bound_groups_of_gloo(timedelta(seconds=timeout))
    own = torch.device(device, rank) if device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "cpu:gloo,cuda:nccl",
        device_id=own,
        store=dist.FileStore(str(Path(folder) / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    modules: dict[str, ModuleType] = {}
    while True:
        path, name, args = pipe.recv()
        try:
            function: Any = modules.setdefault(path, _load(path)) if path not in modules else modules[path]
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(rank, size, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _bound_groups_of_gloo(limit: timedelta) -> None:
    """Gives every group of gloo in this process one worker thread, and no peer more time than `limit`.

    By default a group has two workers. When a collective has ended, its worker stores the name of its kind in
    a string of the group, without a lock (torch 2.13). The name of DTensor's all-gather is too long to lie in
    the string itself: two workers that do so at once free the same memory, and the process dies of SIGABRT or
    SIGSEGV, now or later (tests/multi/test_ranks.py). And a group within the world, a mesh's, would wait half
    an hour for a peer, whatever the world's time-out.
    """
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def bounded(
        self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_newer: Any
    ) -> None:
        options = gloo._Options()
        interfaces = os.environ["GLOO_SOCKET_IFNAME"].split(",")
        options._devices = [gloo.create_device(interface=interface) for interface in interfaces]
        options._threads = 1
        options._timeout = min(timeout, limit)
        make(self, store, rank, size, options)

    gloo.__init__ = bounded


def _load(path: str) -> ModuleType:
    """The module in a file, which need not be importable by name: pytest's test files are not."""
    name = f"_ranks_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
