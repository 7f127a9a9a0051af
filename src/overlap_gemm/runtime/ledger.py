"""What the ranks of a group have called, compared afterwards: for transfers of which no rank waits.

Calls over NCCL are queued, and the host goes on: a message before each one would make it wait. So each rank
keeps a ledger of its calls. A thread writes its end to the group's store, reads those of its peers, and
compares. A difference is named on every rank within about a second: on stderr, since the host may be waiting
for a stream that never ends, and as an error of the next call. Results between the difference and that error
are not to be used. Replays of CUDA graphs are no calls.
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
"""Seconds between two looks at the store."""

KEPT = 4096
"""Calls whose number and identity are kept: as many as one rank may be ahead of another."""

PUBLISHED = 32
"""Calls that are written to the store, of which the first that differs is named."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class Ledger:
    """The calls of one rank in a group.

    Attributes:
        difference: how the ranks' calls differ; None: they do not, as far as is known.
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
        """Notes a call.

        Args:
            word: Digest of what ranks have in common.
            text: The same for messages.
        """
        self._chain = (self._chain * _STEP + word) & _MASK
        self._number += 1
        self._calls.append((self._number, self._chain, text))

    def _watch(self) -> None:
        while self._process_group() is not None and self.difference is None:
            if _ending.wait(PERIOD):
                return
            try:
                self._compare()
            except Exception:  # the store is gone with the job
                return

    def _compare(self) -> None:
        calls = list(self._calls)
        if calls and calls[-1][0] != self._written:
            self._store.set(self._key(self._group.rank), json.dumps(calls[-PUBLISHED:]))
            self._written = calls[-1][0]
        said = self._key("difference")
        if not self._store.check([said]):
            own = {number: (chain, text) for number, chain, text in calls}
            for peer in range(self._group.size):
                key = self._key(peer)
                if peer == self._group.rank or not self._store.check([key]):
                    continue
                if words := self._differs(own, json.loads(self._store.get(key)), peer):
                    self._store.compare_set(said, "", words)  # the first rank's words are everyone's
        if self._store.check([said]):
            self.difference = self._store.get(said).decode()
            rank = self._group.global_rank(self._group.rank)
            print(f"overlap_gemm: rank {rank}: {self.difference}", file=sys.stderr, flush=True)

    def _differs(self, own: dict[int, tuple[int, str]], theirs: list[Any], peer: int) -> str | None:
        for number, chain, text in theirs:
            if number in own and own[number][0] != chain:
                here, there = (self._group.global_rank(rank) for rank in (self._group.rank, peer))
                return (
                    f"the ranks of the group disagree on call {number}: rank {here} has {own[number][1]}; "
                    f"rank {there} has {text}"
                )
        return None

    def _key(self, what: object) -> str:
        return f"overlap_gemm/ledger/{what}"


def _end(watcher: threading.Thread) -> None:
    """Ends a watcher before the interpreter: a thread that comes back from C++ later aborts the process."""
    _ending.set()
    watcher.join(1.0)


_ending = threading.Event()
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def ledger_of(group: Group) -> Ledger:
    """Returns a group's ledger, which begins with the first call."""
    process_group = group.process_group
    assert process_group is not None
    ledger = _ledgers.get(process_group)
    if ledger is None:
        _, store = dist.distributed_c10d._world.pg_map[process_group]
        ledger = _ledgers[process_group] = Ledger(group, store)
    return ledger
