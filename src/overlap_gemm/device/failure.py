"""Failure record: eleven words in pinned host memory that an expired wait writes before it traps.

This module imports nothing of the DSL, so the host can read a record without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from overlap_gemm.device.traced import Scalar

RECORD_WORDS = 11
"""Number of ``uint32`` words of a record. Word 0 is 1 if the record is valid, and is written last (release).
The fields of :class:`Failure` follow; the last two have 64 bits, low half first."""

NOTHING = (1 << 64) - 1
"""Value of `Failure.seen` if an LL packet (:mod:`device.ll_words`) has not arrived."""


_HALF = 0xFFFFFFFF


class Role(IntEnum):
    """Role that waited, and what it waited for."""

    OTHER = 0
    RECEIVE_PARTIAL = 1  # a rank's partial tile
    CALL_ENTERED = 2  # a peer's entry into the call
    RELAY_STAGED = 3  # the local GEMM kernel's staged tile; the source is the owner it is for
    LOAD_GATE = 5  # a shard of the gathered operand
    RECEIVE_RESULT = 7  # a rank's finished tile, or a part of one
    CALL_READ = 6  # a peer's signal that it has read everything sent to it
    IN_CALL = 4  # no wait: another launch (seen) than this one (expected) is registered on the device
    COMPLETE_ROWS = 9  # this rank's units of the rows from `index` on
    CALL_IDENTITY = 8  # a peer's entry, which has arrived with another identity (seen) than expected


class FailureSite(NamedTuple):
    """Place of a wait: the fields of a `Failure` that are known before the wait.

    A user's kernel sets those that it needs, ``FailureSite(tile=tile, index=flag)``. ``index`` becomes
    `Failure.flag`; the other fields keep their names.
    """

    rank: Scalar = 0
    op: Any = 0
    role: Any = Role.OTHER
    tile: Scalar = 0
    source: Scalar = 0
    index: Scalar = 0


class Failure(NamedTuple):
    """One expired or refused wait.

    Attributes:
        rank: Rank that waited.
        op: `OpSpec.code` of the op, or the number of a user's kernel; 0 if it has none.
        role: :class:`Role` that waited, or the number of a user's kernel.
        tile: Number of the tile in the waiting rank's shard. `Role.LOAD_GATE`: of the shard, or the chunk.
            `Role.RELAY_STAGED`: of the piece. 0 if the wait is for no tile.
        source: Rank that was waited for.
        flag: Number of the flag among the arrival flags of the waiting rank's workspace. For an entry, a "has
            read" signal or a gathered shard (any piece of it): the peer's rank. `Role.COMPLETE_ROWS`: the
            first row.
        expected: Expected epoch. `Role.CALL_ENTERED`: its low 32 bits. `Role.CALL_IDENTITY`: the expected
            entry signal. `Role.IN_CALL`: number of this launch. `Role.COMPLETE_ROWS`: number of units.
        seen: Last value read, of the same kind as ``expected``. `Role.IN_CALL`: number of the launch that was
            registered before. `NOTHING`: an LL packet has not arrived.
    """

    rank: int
    op: int
    role: int
    tile: int
    source: int
    flag: int
    expected: int
    seen: int


def read_record(words: Sequence[int]) -> Failure | None:
    """Returns the failure in a record, or None if no wait has expired.

    A failed wait for an entry signal has the role `Role.CALL_IDENTITY` if the signal has the expected epoch
    and another signature. Otherwise it has `Role.CALL_ENTERED`: the limit expired, or a later epoch arrived.
    A number that is no `Role` stays an ``int``.

    Args:
        words: `RECORD_WORDS` words, read as ``uint32`` or as ``int32``.
    """
    if int(words[0]) == 0:
        return None
    rank, op, role, tile, source, flag, *halves = (int(word) & _HALF for word in words[1:RECORD_WORDS])
    expected, seen = (halves[i] | halves[i + 1] << 32 for i in (0, 2))
    if role == Role.CALL_ENTERED:  # both are identities (`device.flags.wait_identity`)
        late, here, there = (expected ^ seen) & _HALF, expected & _HALF, seen & _HALF
        role, expected, seen = (role, here, there) if late else (Role.CALL_IDENTITY, expected, seen)
    return Failure(rank, op, _named(role), tile, source, flag, expected, seen)


def _named(number: int) -> int:
    """Returns the `Role` with this number, or the number itself if there is none."""
    try:
        return Role(number)
    except ValueError:
        return number
