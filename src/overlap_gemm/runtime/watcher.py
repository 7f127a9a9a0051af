"""Threads that report a failed kernel on stderr even if no call follows.

A kernel that fails writes the failure record in host memory and traps. The next call raises the record as an
error. But a replay of a graph, or a wait for the device, fails earlier: with torch's "unspecified launch
failure", or by the abort of NCCL's watchdog. A thread polls the record and writes its text to stderr within a
tenth of a second. It needs the interpreter's lock: if C code holds the lock for longer, NCCL's watchdog may
end the process first.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from ctypes import Array, c_uint32

from . import environment

VARIABLE = "OVERLAP_GEMM_WATCH"

PERIOD = 0.1
"""Seconds between two polls."""

_ending = threading.Event()
_watchers: dict[int, threading.Thread] = {}


def watch(words: Array[c_uint32], address: int, describe: Callable[[], str]) -> None:
    """Starts a thread that prints a failure to stderr when its record is complete.

    It does nothing if the record has a thread, or if ``OVERLAP_GEMM_WATCH=0``.

    Args:
        words: Failure record; its first word is not 0 when it is complete.
        address: Address of the record, by which threads are distinguished.
        describe: Function that returns the text of a complete record.
    """
    if address in _watchers or environment.choice(VARIABLE, ("1", "0")) == "0":
        return

    def run() -> None:
        while not _ending.wait(PERIOD):
            if words[0]:
                print(f"overlap_gemm: {describe()}", file=sys.stderr, flush=True)
                return

    watcher = _watchers[address] = threading.Thread(target=run, name="overlap_gemm watcher", daemon=True)
    watcher.start()
    atexit.register(_end, watcher)


def _end(watcher: threading.Thread) -> None:
    _ending.set()
    watcher.join(1.0)
