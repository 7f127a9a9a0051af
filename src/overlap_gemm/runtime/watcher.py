"""Names a trap of a kernel although no call follows: a thread that reads the failure record in host memory.

A kernel that gives up writes its record and traps. The next call would raise it, but a replay of a graph, or
a wait for the device, ends in torch's "unspecified launch failure" first, or in the abort of NCCL's watchdog.
The thread writes the record's words to stderr within a tenth of a second. It is too late where the main
thread holds the interpreter's lock in a C loop for longer than the watchdog waits.
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
"""Seconds between two looks."""

_ending = threading.Event()
_watchers: dict[int, threading.Thread] = {}


def watch(words: Array[c_uint32], address: int, describe: Callable[[], str]) -> None:
    """Starts a record's thread, one for each record; none with ``OVERLAP_GEMM_WATCH=0``.

    Args:
        words: the record, of which the first is not 0 when it is complete.
        address: of the record.
        describe: its words, once it is complete.
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
