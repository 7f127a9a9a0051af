"""Identity of a call, which ranks compare on the device before any of them returns a result.

Ranks that exchange data must be in the same call. On the device the epoch of a workspace counts its calls,
whatever launched them, including replays of a graph. The *signature*, 32 bits next to the epoch, covers the
rest (:mod:`overlap_gemm.exchange.call`):

- the facts that the ranks' calls must have in common: layouts (`call_signature`), options (`with_options`);
- the number of the group's calls that raised before their launch (`Progress`). Otherwise a call that one rank
  skipped is paired with the peers' next call.

The count begins where the op is entered, so it includes invalid arguments and failed allocations of outputs.
Calls that raise on all ranks are counted on all, so the counts stay equal. A captured call has the count of
its capture.

Portable backends compare the same facts on the host before each transfer (`runtime.agree.of_calls`).

A skipped call and a repeated call look alike, so a retry must be explicit (`retry`).

A signature does not detect:

- a replay of the same graph that one rank omits;
- one of several identical calls that never reached the library;
- a call that raised, if only replays follow, captured before it, and the calls of all ranks are identical.

In these cases the last call waits for a peer that does not come.
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

from .memory.records import note

BITS = 32

_STEP = 0x9E3779B1
"""Step of the signature from one count to the next; it makes equal signatures of different calls unlikely."""

_MAX_DESCRIBED_SKIPS = 4096
"""Number of counts that `describe` tries."""

MAX_ERROR_CHARS = 300
"""Length to which an error is cut before it is sent to peers."""

described: dict[int, str] = {}
"""Texts of signatures of this process."""


def call_signature(op: str, **shared: Any) -> int:
    """Returns a digest of the facts that the ranks' calls must have in common.

    Args:
        op: Name of the op.
        **shared: Facts that are equal on all ranks in such a call; the digest is over their `str`.
    """
    return _signature_of(f"{op}({', '.join(f'{name}={value}' for name, value in shared.items())})")


def with_options(signature: int, options: str) -> int:
    """Returns the signature of a call with options that do not change its layout.

    Args:
        signature: Signature of the layout, from `call_signature`.
        options: Options that are equal on all ranks in such a call, as text.
    """
    return _signature_of(f"{describe(signature)} with {options}") if options else signature


def _signature_of(text: str) -> int:
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=BITS // 8).digest(), "little")
    described[digest] = text
    note(digest, text)
    return digest


@lru_cache(maxsize=4096)  # of every call
def after_skipped(signature: int, skipped: int) -> int:
    """Returns the signature of a call after `skipped` calls raised on this rank, as an int32 for kernels."""
    word = (signature + skipped * _STEP) % (1 << BITS)
    return word - (word >> (BITS - 1) << BITS)


def describe(word: int) -> str:
    """Returns a text for a signature if this process has made such a call."""
    for skipped in range(_MAX_DESCRIBED_SKIPS):
        text = described.get((word - skipped * _STEP) % (1 << BITS))
        if text is not None:
            return text + (f" after {skipped} calls that raised before their launch" if skipped else "")
    return f"a call that this process has not made (signature {word % (1 << BITS):#010x})"


class GroupThreadError(RuntimeError):
    """A thread made a call on a group that belongs to another thread."""


@dataclass
class Refusal:
    """A call that raised before its first launch or transfer.

    Attributes:
        progress: Progress of the group.
        call: Op, shape and dtype.
        is_open: True if the call may still be retried.
    """

    progress: Progress
    call: str
    is_open: bool = True


@dataclass
class Progress:
    """Counters of a group's calls on this rank.

    A call begins by comparing `thread` with the current thread, and by calling `admit` if they differ.

    Attributes:
        is_shared: True if there are peers, for which calls of two threads would have no order.
        events: Number of launches and transfers of calls, plus the number of calls that raised before their
            first one.
        skipped: Number of calls that raised before their first launch or transfer, on this rank or on all.
        last: Error of the last of them that was not raised on all ranks by a `DisagreementError`.
        thread: Identifier of the thread that the group belongs to; None: `admit` decides.
        retried: Call that the next call repeats, or None.
        exchanges: Number of exchanges of the backend `decomposed`, equal on all ranks.
    """

    is_shared: bool = False
    events: int = 0
    skipped: int = 0
    last: str = ""
    thread: int | None = None
    retried: Refusal | None = None
    exchanges: int = 0

    def admit(self, op: str, x: Any) -> None:
        """Begins a call that is the first of a thread, or a retry.

        A group with peers belongs to the thread that called first, until that thread ends. Any thread of
        autograd is admitted while it runs a backward pass; the thread that started the pass waits for it.

        Args:
            op: Name of the op.
            x: First tensor of the call.

        Raises:
            GroupThreadError: The group belongs to another thread, which called first and has not ended.
            ValueError: The call differs from the one to be retried.
        """
        current = threading.get_ident()
        owner = threading._active.get(self.thread)  # type: ignore[attr-defined]
        if owner is not None and self.thread != current and self.is_shared:
            import torch  # not above: the watcher imports this module

            if torch._C._current_graph_task_id() != -1:
                return
            raise GroupThreadError(
                f"{op}: called in thread {threading.current_thread().name!r}, but the group belongs to "
                f"thread {owner.name!r}, which called first. All calls of a group must be made by one "
                f"thread, because peers need one order: create a group for each thread (dist.new_group)"
            )
        self.thread = current
        refusal, self.retried = self.retried, None
        if refusal is None:
            return
        if (call := _call_text(op, x)) != refusal.call:
            raise ValueError(f"retry: the call must be the one that raised, {refusal.call}, got {call}")
        refusal.is_open = False
        self.skipped -= 1

    def raised(self, before: int, op: str, x: Any) -> None:
        """Counts a call that has raised if nothing of it was launched.

        The innermost of nested calls counts. The outer one may be retried, unless something preceded.

        Args:
            before: `events` at the entry of the call.
            op: Name of the op.
            x: First tensor of the call.
        """
        error = sys.exc_info()[1]
        assert error is not None, "called while an error is handled"
        if self.events != before:
            refusal = getattr(error, "refusal", None)
            if refusal is not None and refusal.progress is self:
                refusal.call, refusal.is_open = _call_text(op, x), self.events == before + 1
            return
        self.events += 1
        self.skipped += 1
        error.refusal = Refusal(self, _call_text(op, x))  # type: ignore[attr-defined]
        if not getattr(error, "is_on_every_rank", False):
            self.last = f"{op}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]

    def __str__(self) -> str:
        """Returns the number of skipped calls and the last error, for messages."""
        return f"{self.skipped} (the last: {self.last})" if self.last else str(self.skipped)


@contextmanager
def retry(error: BaseException) -> Iterator[None]:
    """Makes the next call of the group, in the block, a repetition of the call that raised `error`.

    A call that raised on one rank alone is counted there, so that peers do not pair that rank's next call
    with it: calls of equal layers have equal facts. To repeat the call in its place must therefore be
    explicit. Op, shape and dtype of x must be those of that call. The other ranks wait in the call and do not
    use `retry`. Without it the ranks differ in the next call: MismatchedCallsError (fused), or
    DisagreementError (portable backends).

    Args:
        error: Exception of a call of this rank, raised before anything of it was launched or sent.

    Raises:
        ValueError: No such call raised `error`, it was retried already, or the next call is a different one.
    """
    refusal = getattr(error, "refusal", None)
    if not isinstance(refusal, Refusal) or not refusal.is_open:
        reason = "raised it before its launch" if refusal is None else "raised it and was not retried yet"
        raise ValueError(f"retry({type(error).__name__}): no call of a group {reason}")
    progress = refusal.progress
    progress.retried, thread, progress.thread = refusal, progress.thread, None
    try:
        yield
    finally:
        if progress.retried is refusal:
            progress.retried, progress.thread = None, thread


def _call_text(op: str, x: Any) -> str:
    shape = () if getattr(x, "is_nested", False) else getattr(x, "shape", ())  # a nested x has none
    return f"{op} of x {list(shape)} of {getattr(x, 'dtype', type(x).__name__)}"
