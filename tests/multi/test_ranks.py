"""The set of processes that other tests run on: what it says when a rank fails, hangs or crashes."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import RankError, Ranks


def starts_a_process(rank, size):
    return subprocess.Popen(["sleep", "60"]).pid


def test_what_ranks_started_ends_with_them():
    with Ranks(2) as ranks:
        started = [Path(f"/proc/{pid}/status") for pid in ranks.run(starts_a_process)]
        assert all(status.exists() for status in started)
    deadline = time.monotonic() + 10
    while any(status.exists() and "zombie" not in status.read_text() for status in started):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.01)


def hangs(rank, size):
    dist.barrier()  # all have come here before one fails
    if rank == 1:
        raise ValueError("this one came first")
    if rank == 2:
        threading.Event().wait(60)
    if rank == 0:
        time.sleep(60)


def test_the_first_failure_stands_first_and_a_hang_shows_its_stack(monkeypatch):
    ranks = Ranks(3)
    monkeypatch.setattr(ranks, "_grace", 0.5)
    with pytest.raises(RankError) as failure:
        ranks.run(hangs)
    text = str(failure.value)
    assert text.startswith("rank 1 of 3, after ")
    assert "this one came first" in text
    for rank, what in ((0, "in hangs"), (2, "in wait")):
        found = rf"rank {rank} of 3, after .* s:\ndid not end in time\n(.*\n)*.*{what}\n"
        assert re.search(found, text), text
    assert not ranks.alive


def crashes(rank, size):
    if rank == 1:
        os.abort()
    return rank


def test_a_crash_shows_its_signal_and_its_stack():
    with Ranks(2) as ranks, pytest.raises(RankError) as failure:
        ranks.run(crashes)
    text = str(failure.value)
    assert text.startswith("rank 1 of 2, after ")
    assert re.search(
        r"the process is gone, exit code -6\nFatal Python error: Aborted\n(.*\n)*.* in crashes\n", text
    ), text


def terminates(rank, size):
    if rank == 1:
        thread = threading.Thread(target=ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev)
        thread.start()
        thread.join()


def test_a_crash_shows_what_native_code_said():
    with Ranks(2) as ranks, pytest.raises(RankError) as failure:
        ranks.run(terminates)
    own, _, others = str(failure.value).partition("rank 0 of 2, after ")
    assert "exit code -6" in own
    assert "stderr of rank 1:\nterminate called without an active exception" in own, own
    assert "stderr of rank 1" not in others


def gathers(rank, size):
    """The ranks' mistake: gloo's thread ends the process that has less room."""
    own = torch.zeros(8 if rank else 64)
    dist.all_gather([torch.zeros_like(own) for _ in range(size)], own)


def test_an_abort_in_gloos_thread_is_named():
    with Ranks(2) as ranks, pytest.raises(RankError, match="the process is gone, exit code -6") as failure:
        ranks.run(gathers)
    assert "Received data size doesn't match expected size" in str(failure.value), failure.value


def gloos_options(rank, size):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    groups = (dist.group.WORLD, dist.new_group(list(range(size))), mesh["a"].get_group())
    return [(options._threads, options._timeout.total_seconds()) for options in map(gloos, groups)]


def gloos(group):
    return group._get_backend(torch.device("cpu")).options


def test_groups_of_gloo_have_one_worker_and_the_worlds_time_out():
    """Those that a mesh makes, too."""
    with Ranks(2, timeout=7) as ranks:
        assert ranks.run(gloos_options) == [[(1, 7)] * 3] * 2


TORCH_ALONE = """
import sys, time
import torch, torch.distributed as dist

threads, seconds = int(sys.argv[1]), float(sys.argv[2])
gloo = dist.ProcessGroupGloo
options = gloo._Options()
options._devices, options._threads = [gloo.create_device(interface="lo")], threads
group = gloo(dist.HashStore(), 0, 1, options)
own, end = torch.ones(4), time.monotonic() + seconds
while time.monotonic() < end:
    for work in [getattr(group, sys.argv[3])([[torch.empty(4)]], [own]) for _ in range(64)]:
        work.wait()
"""
"""One process, one group; 64 all-gathers are in flight at a time, and each is waited for."""


def crashes_within(seconds, threads, op):
    done = subprocess.run(
        [sys.executable, "-c", TORCH_ALONE, str(threads), str(seconds), op], capture_output=True, timeout=100
    )
    assert done.returncode in (0, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS), done.stderr.decode()
    return done.returncode != 0


@pytest.mark.slow
def test_two_workers_of_gloo_corrupt_the_heap_of_torch_alone():
    """Why ranks have one: all-gathers as DTensor makes them end the process, on two CPUs within seconds.

    Not with one worker, nor where the collective's name is short ("ALLGATHER": it lies in the string).
    When this fails torch has fixed it, and ranks may have two workers again.
    """
    assert len(os.sched_getaffinity(0)) > 1, "one worker at a time does no harm"
    assert not crashes_within(20, 1, "allgather_coalesced")
    assert not crashes_within(20, 2, "allgather")
    assert any(crashes_within(30, 2, "allgather_coalesced") for _ in range(4))


def killed(rank, size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("function", [killed, crashes])
def test_nothing_is_forgiven(function, monkeypatch):
    """A crash in torch, too, is a failure of the test that it was in, with the stacks that it left."""
    ranks = Ranks(3)
    monkeypatch.setattr(ranks, "_grace", 0.5)
    with pytest.raises(RankError):
        ranks.run(function)
    with pytest.raises(RuntimeError, match="have been closed, or ended by a failure"):
        ranks.run(function)
