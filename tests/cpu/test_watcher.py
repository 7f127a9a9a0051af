"""A failure record is named on stderr by another process although no call follows."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

RECORD = """
import ctypes, os, struct, sys, time
from overlap_gemm.device.failure import RECORD_WORDS, Role
from overlap_gemm.runtime import identity
from overlap_gemm.runtime.memory.records import new_record, watch

assert "torch" not in sys.modules
signatures = [identity.call_signature("gemm_reduce_scatter", rows=rows) for rows in (512, 768)]
new_record()
record, watcher = new_record(), watch()
assert watch() is watcher  # one for all records of a process
identities = (5 | signatures[0] << 32, 5 | signatures[1] << 32)
words = struct.pack("<6I2Q", 3, 1, Role.CALL_ENTERED, 0, 2, 7, *identities)

def fail():
    record[4 : 4 + len(words)] = words
    record[0] = 1

def say(*what):
    print(*what, flush=True)

say(watcher.pid if watcher else 0)
"""
HOLDS_THE_LOCK = """
if os.fork() == 0:  # another process completes the record, which is shared memory
    time.sleep(0.5)
    fail()
    os._exit(0)
ctypes.PyDLL(None).usleep(3_000_000)  # PyDLL: this process runs no other thread of Python until then
say("unlocked")
os.abort()
"""


@contextmanager
def started(code, switch=None):
    """Yields a process that has a record and runs `code`, and the identifier of its watcher, or 0."""
    env = {name: value for name, value in os.environ.items() if name != "OVERLAP_GEMM_WATCH"}
    env |= {} if switch is None else {"OVERLAP_GEMM_WATCH": switch}
    command, pipe = [sys.executable, "-c", RECORD + code], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        yield process, int(process.stdout.readline())


def runs(pid):
    """Returns whether a process runs; one that has ended may stay as a zombie if no process awaits it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid, within=1.0):
    limit = time.monotonic() + within
    while runs(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    return not runs(pid)


def test_a_record_is_named_while_c_code_holds_the_interpreters_lock():
    with started(HOLDS_THE_LOCK) as (process, watcher):
        line = process.stderr.readline()
        assert line.startswith("overlap_gemm: MismatchedCallsError: gemm_reduce_scatter: rank 3 is in "), line
        assert "gemm_reduce_scatter(rows=512), rank 2 in gemm_reduce_scatter(rows=768), as call 5" in line
        assert process.poll() is None and runs(watcher)
        out, rest = process.communicate(timeout=60)
    assert out == "unlocked\n" and process.returncode == -signal.SIGABRT
    assert "overlap_gemm: " not in rest  # once
    assert ends(watcher)


def test_a_record_that_is_completed_just_before_an_abort_is_named():
    with started("fail(); os.abort()") as (process, watcher):
        process.wait(60)
        aborted = time.monotonic()
        assert "overlap_gemm: MismatchedCallsError: " in process.stderr.readline()
        assert time.monotonic() - aborted < 1.0
    assert ends(watcher)


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_without_a_failure_prints_nothing_and_leaves_no_process(ending):
    with started(ending) as (process, watcher):
        assert process.communicate(timeout=60) == ("", "")
    assert watcher and ends(watcher)


def test_a_forked_child_does_not_keep_the_watcher():
    with started("say(os.fork() or time.sleep(20))\ntime.sleep(20)") as (process, watcher):
        child = int(process.stdout.readline())
        for signum in (signal.SIGINT, signal.SIGTERM):  # by a terminal or a launcher, to all processes
            os.kill(watcher, signum)
        assert not ends(watcher, within=0.3)
        process.kill()
        process.wait()
        try:
            assert ends(watcher) and runs(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_no_process_is_started_if_it_is_switched_off():
    with started("fail(); time.sleep(0.5)", switch="0") as (process, watcher):
        assert watcher == 0 and process.communicate(timeout=60) == ("", "")


def test_a_watcher_that_cannot_be_started_is_a_warning():
    with started("sys.executable = '/nowhere'; watch.__wrapped__()") as (process, _):
        _, errors = process.communicate(timeout=60)
    assert "no process watches for failed kernels (OVERLAP_GEMM_WATCH=0 disables it): " in errors
