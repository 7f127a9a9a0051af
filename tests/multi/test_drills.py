"""Drills: failures of one rank on every portable backend; each rank's result is right, or its error names it.

docs/drills.md lists all drills, with those of other files.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.runtime import compile_cache
from overlap_gemm.runtime.agree import DisagreementError
from tests.support.chosen import in_turn
from tests.support.ops import SHARDED
from tests.support.ranks import RankError
from tests.support.ranks import Ranks as AnyRanks

BACKENDS = ("torch", "sequential", "decomposed")
ROWS, WIDTH = 12, 6
TIMEOUT = 2.0
"""Seconds that a rank waits for a peer."""

START = 60.0
"""Seconds that ranks of a job wait for each other; on a loaded machine one may start 10 s after another."""

Ranks = partial(AnyRanks, preload=("overlap_gemm.nn",))

every_backend = pytest.mark.parametrize("backend", BACKENDS)
one_backend = pytest.mark.parametrize(
    "backend",
    ["decomposed", *(pytest.param(one, marks=pytest.mark.slow) for one in BACKENDS if one != "decomposed")],
)
"""For drills that take ranks of their own, and the whole of their time-out."""


def call(backend, group=None, op="gemm_all_reduce"):
    """Makes one call and checks its result."""
    size = dist.get_world_size(group)
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    out = getattr(overlap_gemm, op)(x, weight, backend=backend, group=group)
    factor = size if op in ("gemm_all_reduce", "gemm_reduce_scatter") else 1
    assert (out == WIDTH * factor).all(), out
    return out


@pytest.fixture(scope="module")
def short():
    """Ranks with a short time-out, for drills after which they are in step."""
    with Ranks(2, timeout=TIMEOUT, limit=120) as group:
        yield group


# --- memory ---

ALLOCATIONS = (
    (torch.Tensor, "new_empty"), (torch.Tensor, "new_zeros"), (torch, "empty"), (torch, "empty_like"),
    (torch, "mm"), (torch, "addmm"), (torch, "cat"), (torch.Tensor, "contiguous"), (torch.Tensor, "clone"),
)  # fmt: skip
"""Functions that allocate in a call."""


@contextlib.contextmanager
def failing_at(number):
    """Makes allocation `number`, from 0, raise MemoryError; yields a list that then has one element."""
    count, failed = [0], []

    def counted(real):
        def allocate(*operands, **options):
            count[0] += 1
            if count[0] == number + 1:
                failed.append(real)
                raise MemoryError("planted")
            return real(*operands, **options)

        return allocate

    with contextlib.ExitStack() as stack:
        for owner, name in ALLOCATIONS:
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield failed


def memory_at_each_allocation(rank, size, op, backend):
    """Fails on rank 1, whose next call is one more than its peers'; returns the number of failures."""
    for number in range(20):
        group = dist.new_group()
        call(backend, group, op)
        failed, named = [], None
        try:
            if rank == 1:
                with contextlib.suppress(MemoryError), failing_at(number) as failed:
                    call(backend, group, op)
            for _ in range(3 - (rank == 1)):
                call(backend, group, op)
        except RuntimeError as error:
            named = str(error)
        results = [None] * size
        dist.all_gather_object(results, (len(failed), named))
        has_failed = results[1][0]
        if not has_failed:
            assert not named, named
            return number
        names = [error for _, error in results]
        # Nothing is named if the last transfer had ended: only rank 1 has no result.
        assert all(names) or not any(names), names
        for error in filter(None, names):
            assert (
                "rank 1 has 1 (the last: " in error or "disagree on transfer" in error or "on rank " in error
            ), error
    raise AssertionError("more allocations than expected")


@pytest.mark.parametrize(("op", "backend"), in_turn(SHARDED, BACKENDS))
def test_no_memory_at_each_allocation_is_named_on_every_rank(short, op, backend):
    failures, _ = short.run(memory_at_each_allocation, op, backend)
    assert failures >= 1


# --- errors of the caller's code ---


def hook_raises(rank, size, backend):
    group = dist.new_group()
    x, weight = torch.ones(ROWS, WIDTH, requires_grad=True), torch.ones(WIDTH, WIDTH)
    for with_hook in (False, True):
        out = overlap_gemm.all_gather_gemm(x, weight, backend=backend, group=group)
        if with_hook and rank == 1:
            out.register_hook(lambda grad: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                out.sum().backward()
            with pytest.raises(DisagreementError, match="disagree on op: .*rank 1 has gemm_all_reduce"):
                call(backend, group)
        elif with_hook:
            with pytest.raises(DisagreementError, match="disagree on op: .*rank 1 has gemm_all_reduce"):
                out.sum().backward()
        else:
            out.sum().backward()
    call(backend, group)


@every_backend
def test_an_exception_in_a_backward_hook_is_named_on_every_rank(short, backend):
    short.run(hook_raises, backend)


def interrupted(rank, size, backend):
    """Interrupts rank 1 while it waits for rank 0, whose wait for rank 1's data then expires."""
    group = dist.new_group()
    call(backend, group)
    if rank == 0:
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match="rank 0: .*failed; one of them has ended|on rank 0: .*rank 1"):
            call(backend, group)
    else:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call(backend, group)
        timer.join()
        signal.signal(signal.SIGINT, before)
        with pytest.raises(RuntimeError, match="out of step.*KeyboardInterrupt. Create a new group"):
            call(backend, group)
    call(backend, dist.new_group())


@every_backend
def test_a_keyboard_interrupt_in_a_call_is_named_on_every_rank(short, backend):
    short.run(interrupted, backend)


# --- signals ---


def stopped(rank, size, backend, seconds):
    """Stops rank 1 for a while, in a series of calls."""
    group = dist.new_group()
    call(backend, group)
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(5):
            call(backend, group)
    except RuntimeError as error:
        return str(error)
    return None


@every_backend
def test_a_rank_that_is_stopped_for_less_than_the_time_out_does_no_harm(short, backend):
    assert short.run(stopped, backend, 0.5) == [None, None]


@one_backend
def test_a_rank_that_is_stopped_for_longer_than_the_time_out_is_named(backend):
    with Ranks(2, timeout=TIMEOUT, limit=60) as group:
        of_peer, of_stopped = group.run(stopped, backend, 2 * TIMEOUT)
    assert "on rank 0: rank 1 has exited or makes no matching call" in of_peer, of_peer
    assert of_stopped and "rank " in of_stopped, of_stopped


def killed(rank, size, backend):
    group = dist.new_group()
    call(backend, group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="on rank 0: rank 1 has exited or makes no matching call"):
        call(backend, group)


@one_backend
def test_a_killed_rank_is_named(backend):
    with Ranks(2, timeout=TIMEOUT, limit=60) as group, pytest.raises(RankError) as failure:
        group.run(killed, backend)
    text = str(failure.value)
    assert "rank 1 of 2" in text and "exit code -9" in text and "rank 0 of 2" not in text, text


# --- limits of the machine ---


def no_more_files(rank, size, backend):
    """Leaves rank 1 no file to open; calls of a group that exists need none."""
    group = dist.new_group()
    dist.barrier(group)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
    try:
        for op in SHARDED:
            call(backend, group, op)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@every_backend
def test_calls_need_no_more_open_files(short, backend):
    short.run(no_more_files, backend)


def address_space():
    """Returns the least bytes of address space in 0.2 s: gloo may still free the last call's tensor."""
    samples = []
    for _ in range(20):
        samples.append(int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
        time.sleep(0.01)
    return min(samples)


def no_more_memory(rank, size, backend):
    """Limits rank 1's address space, so that a product does not fit."""
    group = dist.new_group()
    call(backend, group)
    x, weight = torch.ones(4096, 8), torch.ones(8192, 8)  # a product of 128 MiB
    overlap_gemm.gemm_all_reduce(x, weight, backend=backend, group=group)
    dist.barrier(group)  # gloo's threads let go of the call before
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + (64 << 20), limits[1]))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            overlap_gemm.gemm_all_reduce(x, weight, backend=backend, group=group)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    with pytest.raises(DisagreementError, match="rank 1 has .*: gemm_all_reduce: RuntimeError: .*allocate"):
        call(backend, group)


@every_backend
def test_a_call_that_exceeds_ulimit_v_is_named_on_every_rank(short, backend):
    short.run(no_more_memory, backend)


@pytest.mark.parametrize("room", [8, pytest.param(96, marks=pytest.mark.slow)])
def test_a_rank_that_dies_of_ulimit_v_says_so(room):
    """Leaves `room` MiB: native threads do not start, or a later allocation fails."""
    port = free_port()
    both = JOB.replace("(4, 3)", "(4000, 3)").replace("(5, 3)", "(9000, 3)")
    peer = job(text=both, **of_world(0, port))
    limited = both.replace("world =", LIMIT.format(room=room) + "world =", 1)
    text, _ = (process := job(text=limited, **of_world(1, port))).communicate(timeout=60)
    assert process.returncode, text
    assert re.search(r"process \d+ may use \d+ KiB of address space \(ulimit -v\) and uses", text), text
    text, _ = peer.communicate(timeout=60)
    assert peer.returncode and re.search("rank 1 has exited|[Tt]imed out|[Cc]onnection", text), text


class Compiled:
    """Stands for a compiled function, whose object's bytes are its text."""

    def __init__(self, text):
        self.text = text

    def export_to_c(self, path, function_name):
        Path(path).write_text(self.text)


def cache_entry(rank, size, folder):
    """Returns how this process got the function that all processes need at once."""

    def build():
        time.sleep(0.2)
        return Compiled("object")

    def load(binary):
        return Compiled(binary.read_text())

    dist.barrier()
    with mock.patch.object(compile_cache, "load_function", load):
        cache = compile_cache.CompileCache(Path(folder))
        assert cache.get("a", "sm_90a", build).text == "object"
    return cache.log[0][0]


def test_eight_processes_compile_a_kernel_once(tmp_path):
    with Ranks(8, timeout=60, limit=60) as group:
        origins = group.run(cache_entry, str(tmp_path))
    assert sorted(origins) == ["compiled", *["disk"] * 7]


# --- begin and end of a process ---


def destroyed(rank, size, backend, file):
    """Destroys the world although the library was not finalized, and creates it anew."""
    overlap_gemm.init(device="cpu")
    call(backend)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="2 ranks .*has been destroyed.*finalize"):
        overlap_gemm.gemm_all_reduce(torch.ones(2, 3), torch.ones(4, 3), backend=backend)
    overlap_gemm.finalize()
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    assert overlap_gemm.init(device="cpu").size == size
    call(backend)
    overlap_gemm.finalize()


@one_backend
def test_a_world_that_is_destroyed_before_finalize_is_named(backend, tmp_path):
    with Ranks(2, timeout=TIMEOUT, limit=60) as group:
        group.run(destroyed, backend, str(tmp_path / "store"))


JOB = """
import os, signal, torch
import overlap_gemm
world = overlap_gemm.init(device="cpu", timeout=TIMEOUT)
for backend in ("torch", "sequential", "decomposed"):
    out = overlap_gemm.gemm_all_reduce(torch.ones(4, 3), torch.ones(5, 3), backend=backend)
    assert (out == 3.0 * world.size).all(), out
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"right on rank {world.rank}", flush=True)
"""


LIMIT = """
import resource
overlap_gemm.init  # imported before: a process without room for it dies of a MemoryError of Python's
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ({room} << 20),) * 2)
"""
"""Limits the address space of a process."""


def job(*launcher, text=JOB, seconds=5 * TIMEOUT, **environment):
    """Starts a process of the job; it does not finalize."""
    text = text.replace("TIMEOUT", str(seconds))
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *launcher, *([] if launcher else ["-c", text])], text=True,
        env={**inherited, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def of_world(rank, port):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_process_that_exits_without_finalize_ends_with_0():
    port = free_port()
    both = [job(seconds=START, **of_world(rank, port)) for rank in range(2)]
    for rank, process in enumerate(both):
        text, _ = process.communicate(timeout=2 * START)
        assert process.returncode == 0 and text.strip() == f"right on rank {rank}", text


def test_a_job_that_is_restarted_after_a_killed_rank_is_right(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("TIMEOUT", str(START)))
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"
    process = job(*launcher, str(script))
    text, _ = process.communicate(timeout=4 * START)
    assert process.returncode == 0, text
    assert "right on rank 0" in text and "right on rank 1" in text, text


@pytest.mark.slow
def test_two_jobs_on_one_port_are_right_or_named():
    """Ranks of both may join the job that has the port; the others end when their time is over."""
    port = free_port()
    jobs = [[job(**of_world(rank, port)) for rank in range(2)] for _ in range(2)]
    named = 0
    for processes in jobs:
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=120)
            if process.returncode == 0:
                assert f"right on rank {rank}" in text, text
            else:
                named += 1
                assert re.search(
                    r"address already in use|[Tt]imed out|on rank \d: rank \d has exited", text
                ), text
    assert named, "two servers listen on one port"
