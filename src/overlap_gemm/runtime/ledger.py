"""Comparison of the ranks' calls after the fact, for transfers that no rank waits for.

Calls over NCCL are queued and the host continues; a message before each call would make the host wait. So
each rank records its calls in a ledger. A thread writes the latest entries to the group's store, reads those
of its peers, and compares them.

Every rank reports a difference within about a second: on stderr, because the host may be waiting for a stream
that never completes, and as a `DisagreementError` of the next call. Results between the difference and the
error are invalid. Replays of CUDA graphs are not recorded.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import weakref
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .group import Group

PERIOD = 0.2
"""Seconds between two comparisons."""

KEPT = 4096
"""Number of calls that are kept: one rank may be this far ahead of another."""

PUBLISHED = 32
"""Number of calls that are written to the store; the first that differs is reported."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class Ledger:
    """Calls of one rank in a group.

    Attributes:
        difference: Description of how the ranks' calls differ; None: no difference is known.
    """

    def __init__(self, group: Group, store: Any) -> None:
        self.difference: str | None = None
        self._group, self._store = group, store
        self._calls: deque[tuple[int, int, str]] = deque(maxlen=KEPT)
        self._number = self._chain = self._written = 0
        process_group = group.process_group
        assert process_group is not None
        self._process_group = weakref.ref(process_group)
        watcher = threading.Thread(target=self._watch, name="overlap_gemm ledger", daemon=True)
        watcher.start()
        atexit.register(_end, watcher)

    def note(self, word: int, text: str) -> None:
        """Records a call.

        Args:
            word: Digest of the facts that are equal on all ranks.
            text: The facts, for messages.
        """
        self._chain = (self._chain * _STEP + word) & _MASK
        self._number += 1
        self._calls.append((self._number, self._chain, text))

    def _watch(self) -> None:
        """Compares until a difference appears or the group ends; body of the ledger's thread."""
        while self._process_group() is not None and self.difference is None:
            if _ending.wait(PERIOD):
                return
            try:
                self._compare()
            except Exception:  # the store ends with the job
                return

    def _compare(self) -> None:
        """Publishes this rank's last calls in the store, and compares them with the peers'."""
        calls = list(self._calls)
        if calls and calls[-1][0] != self._written:
            self._store.set(self._key(self._group.rank), json.dumps(calls[-PUBLISHED:]))
            self._written = calls[-1][0]
        difference_key = self._key("difference")
        if not self._store.check([difference_key]):
            local = {number: (chain, text) for number, chain, text in calls}
            for peer in range(self._group.size):
                key = self._key(peer)
                if peer == self._group.rank or not self._store.check([key]):
                    continue
                if words := self._differs(local, json.loads(self._store.get(key)), peer):
                    self._store.compare_set(difference_key, "", words)  # the first one's text
        if self._store.check([difference_key]):
            self.difference = self._store.get(difference_key).decode()
            rank = self._group.global_rank(self._group.rank)
            print(f"overlap_gemm: rank {rank}: {self.difference}", file=sys.stderr, flush=True)

    def _differs(self, local: dict[int, tuple[int, str]], remote: list[Any], peer: int) -> str | None:
        """Returns a message for the first common call that differs from a peer's, or None."""
        for number, chain, text in remote:
            if number in local and local[number][0] != chain:
                my_rank, peer_rank = (self._group.global_rank(rank) for rank in (self._group.rank, peer))
                return (
                    f"the ranks of the group disagree on call {number}: rank {my_rank} has "
                    f"{local[number][1]}; rank {peer_rank} has {text}"
                )
        return None

    def _key(self, what: object) -> str:
        return f"overlap_gemm/ledger/{what}"


def _end(watcher: threading.Thread) -> None:
    """Ends the thread before the interpreter: one that returns from C++ later aborts the process."""
    _ending.set()
    watcher.join(1.0)


_ending = threading.Event()
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def ledger_of(group: Group) -> Ledger:
    """Returns a group's ledger; it is created at the group's first call."""
    process_group = group.process_group
    assert process_group is not None
    ledger = _ledgers.get(process_group)
    if ledger is None:
        _, store = dist.distributed_c10d._world.pg_map[process_group]
        ledger = _ledgers[process_group] = Ledger(group, store)
    return ledger
