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

What no signature sees: a replay of the same graph that one rank leaves out, one of several identical calls
that never reached the library, and one that raised where only replays of calls like it follow, captured
before. Then the last call waits for a peer that does not come.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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


@dataclass
class Progress:
    """What became of a group's calls on this rank.

    Attributes:
        events: launches and transfers of calls, and the calls that raised before their first one.
        skipped: the latter alone.
        last: how the last of these ended; those that raised on all ranks are left out.
    """

    events: int = 0
    skipped: int = 0
    last: str = ""

    def raised(self, before: int, op: str) -> None:
        """A call has raised: counts it if nothing of it was launched; of nested calls the innermost decides.

        Args:
            before: `events` as the call was entered.
            op: The op.
        """
        if self.events != before:
            return
        self.events += 1
        self.skipped += 1
        error = sys.exc_info()[1]
        if not getattr(error, "is_on_every_rank", False):
            self.last = f"{op}: {type(error).__name__}: {error}"[:LONGEST_WORDS]

    def __str__(self) -> str:
        """Returns how many calls were skipped, for messages."""
        return f"{self.skipped} (the last: {self.last})" if self.last else str(self.skipped)
