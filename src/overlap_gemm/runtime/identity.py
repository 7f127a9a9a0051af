"""Which call a call is: what ranks compare, on the device, before any of them gets its result.

Ranks that exchange data must be in the same call. On the device calls of a workspace are counted by its
epoch, whoever launched them, also replays of a graph; what the epoch cannot see is in the *signature*, 32
bits alongside it (:mod:`overlap_gemm.exchange.call`):

- what the ranks' calls must have in common, and nothing else (`call_signature`);
- how many calls of the group raised before their launch (`Progress`): a call that one rank skipped is
  otherwise paired with the peers' next one. It counts from where the op is entered, so also for arguments
  that do not fit, or an output for which there was no memory. Calls that raise on all ranks differ in
  nothing. A captured call carries the count as it was when it was captured.

Portable backends compare the same on the host, in front of each transfer (`runtime.agree.of_calls`).

Since a call that is left out and one that is made again look alike, a retry is explicit (`retry`).

What no signature sees: a replay of the same graph that one rank leaves out, one of several identical calls
that never reached the library, and one that raised where only replays of calls like it follow, captured
before. Then the last call waits for a peer that does not come.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

BITS = 32

_STEP = 0x9E3779B1
"""From one count to the next, so that no count of one kind of calls is likely to be another kind's."""

_MOST_SKIPPED = 4096
"""Counts among which `describe` looks."""

LONGEST_WORDS = 300
"""Characters of an error that peers are told."""

_described: dict[int, str] = {}


def call_signature(op: str, **shared: Any) -> int:
    """A digest of what the ranks' calls must have in common.

    Args:
        op: The op.
        **shared: Facts that are equal on all ranks of such a call; their `str` states them.
    """
    text = f"{op}({', '.join(f'{name}={value}' for name, value in shared.items())})"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=BITS // 8).digest(), "little")
    _described[digest] = text
    return digest


@lru_cache(maxsize=4096)  # of every call
def after_skipped(signature: int, skipped: int) -> int:
    """The signature of a call before which so many raised on this rank, as an int32 kernels take."""
    word = (signature + skipped * _STEP) % (1 << BITS)
    return word - (word >> (BITS - 1) << BITS)


def describe(word: int) -> str:
    """What a signature stands for, as far as this process has made such a call."""
    for skipped in range(_MOST_SKIPPED):
        text = _described.get((word - skipped * _STEP) % (1 << BITS))
        if text is not None:
            return text + (f" after {skipped} that raised before their launch" if skipped else "")
    return f"a call that this process has not made (signature {word % (1 << BITS):#010x})"


class GroupThreadError(RuntimeError):
    """A call was made on a group that is another thread's."""


@dataclass
class Refusal:
    """A call that raised before its first launch or transfer.

    Attributes:
        progress: the group's.
        call: op, shape and dtype.
        is_open: whether its number may be used once more.
    """

    progress: Progress
    call: str
    is_open: bool = True


@dataclass
class Progress:
    """What became of a group's calls on this rank.

    A call begins where `thread` is compared with the current one, and `admit` called if they differ.

    Attributes:
        is_shared: whether there are peers, for whom calls of two threads have no order.
        events: launches and transfers of calls, and the calls that raised before their first one.
        skipped: the latter alone.
        last: how the last of these ended; those that raised on all ranks are left out.
        thread: the one whose group this is; None where `admit` decides.
        retried: the call that comes next, once more.
    """

    is_shared: bool = False
    events: int = 0
    skipped: int = 0
    last: str = ""
    thread: int | None = None
    retried: Refusal | None = None

    def admit(self, op: str, x: Any) -> None:
        """Begins a call that is the first of a thread, or a retry.

        Autograd's threads make the calls of a backward pass, for which the thread that started it waits.

        Args:
            op: The op.
            x: Its first tensor.

        Raises:
            GroupThreadError: The group is the thread's that called first, which has not ended.
            ValueError: The call is not the one to be retried.
        """
        here = threading.get_ident()
        owner = threading._active.get(self.thread)  # type: ignore[attr-defined]
        if owner is not None and self.thread != here and self.is_shared:
            if torch._C._current_graph_task_id() != -1:
                return
            raise GroupThreadError(
                f"{op}: called in {threading.current_thread().name!r}, but the group is of {owner.name!r}, "
                f"which called first. All calls of a group are made by one thread: those of two have no "
                f"order that peers could know; give each thread a group of its own (dist.new_group)"
            )
        self.thread = here
        refusal, self.retried = self.retried, None
        if refusal is None:
            return
        if (call := _words(op, x)) != refusal.call:
            raise ValueError(f"retry: the call that raised was {refusal.call}, this one is {call}")
        refusal.is_open = False
        self.skipped -= 1

    def raised(self, before: int, op: str, x: Any) -> None:
        """A call has raised: counts it if nothing of it was launched; of nested calls the innermost decides.

        Args:
            before: `events` as the call was entered.
            op: The op.
            x: Its first tensor.
        """
        if self.events != before:
            return
        self.events += 1
        self.skipped += 1
        error = sys.exc_info()[1]
        assert error is not None, "called while an error is handled"
        error.refusal = Refusal(self, _words(op, x))  # type: ignore[attr-defined]
        if not getattr(error, "is_on_every_rank", False):
            self.last = f"{op}: {type(error).__name__}: {error}"[:LONGEST_WORDS]

    def __str__(self) -> str:
        """Returns how many calls were skipped, for messages."""
        return f"{self.skipped} (the last: {self.last})" if self.last else str(self.skipped)


@contextmanager
def retry(error: BaseException) -> Iterator[None]:
    """In the block, the next call of the group takes the place of the one that raised `error`.

    A call that raised on one rank alone counts there, so that the rank's next call is not taken for it: like
    layers of a model differ in nothing else. To make the same call again, in its place, is therefore said.
    The other ranks, which wait in that call, do not take part.

    Args:
        error: What a call of this rank raised before anything of it was launched or sent.

    Raises:
        ValueError: No such call raised `error`, it was retried already, or the next call is another one.
    """
    refusal = getattr(error, "refusal", None)
    if not isinstance(refusal, Refusal) or not refusal.is_open:
        reason = "raised it before its launch" if refusal is None else "raised it, and was not retried yet"
        raise ValueError(f"retry({type(error).__name__}): no call of a group {reason}")
    progress = refusal.progress
    progress.retried, thread, progress.thread = refusal, progress.thread, None
    try:
        yield
    finally:
        if progress.retried is refusal:
            progress.retried, progress.thread = None, thread


def _words(op: str, x: Any) -> str:
    return f"{op} of x {list(getattr(x, 'shape', ()))} of {getattr(x, 'dtype', type(x).__name__)}"
