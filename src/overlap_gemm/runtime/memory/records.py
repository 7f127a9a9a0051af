"""Memory of failure records, which a second process watches, and the start of that process.

A kernel that fails writes its failure record to host memory and traps. The next call raises the record as an
error. But a replay of a graph, or a wait for the device, fails earlier: with torch's "unspecified launch
failure", or by the abort of NCCL's watchdog, perhaps while C code holds the interpreter's lock. Therefore the
records are pages of an anonymous file, and another process prints them (:mod:`overlap_gemm.runtime.watcher`).
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import astuple
from functools import cache
from pathlib import Path

from ...spec import OPS
from .. import environment

VARIABLE = "OVERLAP_GEMM_WATCH"

WATCHER = Path(__file__).parents[1] / "watcher.py"

SENT_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that terminals and launchers send to all processes. Those that handle them may fail afterwards."""

_pages: list[mmap.mmap] = []
"""Memory of all records; it stays until the process ends, since a device may write to it until then."""

_lock = threading.Lock()


@cache
def _file(name: str) -> int:
    """Returns a file without a path, as a descriptor."""
    return os.memfd_create(f"overlap_gemm {name}")


def new_record() -> mmap.mmap:
    """Returns a page of zeros for a record, the next one of the file of records."""
    records = _file("records")
    with _lock:
        offset = os.fstat(records).st_size
        os.ftruncate(records, offset + mmap.PAGESIZE)
        _pages.append(mmap.mmap(records, mmap.PAGESIZE, offset=offset))
        return _pages[-1]


def note(signature: int, text: str) -> None:
    """Writes the text of a signature, and the ops so far, to where the watcher finds them at a failure."""
    line = json.dumps([signature, text, [astuple(op) for op in OPS.values()]])
    os.write(_file("texts"), f"{line}\n".encode())


@cache
def watch() -> subprocess.Popen[bytes] | None:
    """Starts the process that prints records, once; returns None if ``OVERLAP_GEMM_WATCH=0``.

    If it cannot be started, that is a warning: every other way to report a failure still works.
    """
    if environment.choice(VARIABLE, ("1", "0")) == "0":
        return None
    files = _file("records"), _file("texts")
    command = [sys.executable, "-I", "-S", str(WATCHER), *map(str, (os.getpid(), mmap.PAGESIZE, *files))]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)  # the process inherits it
    try:
        watcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=files
        )
    except OSError as error:
        warnings.warn(
            f"no process watches for failed kernels ({VARIABLE}=0 disables it): {error}", stacklevel=2
        )
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    watcher.returncode = 0  # no warning at exit that it still runs: it ends after this process
    return watcher
