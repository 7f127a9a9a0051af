"""The failure record: what a wait that expired leaves for the host.

Imports nothing, so that the host can read a record without the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

RECORD_WORDS = 9
"""``uint32`` words of a record: 1 when valid (written last), then the fields of :class:`Failure` in order."""


class Op(IntEnum):
    """Which operation the kernel carried out."""

    GEMM_REDUCE_SCATTER = 1
    ALL_GATHER_GEMM = 2
    GEMM_ALL_REDUCE = 3
    GEMM_ALL_GATHER = 4


class Role(IntEnum):
    """Which warp waited, for what."""

    EPILOGUE_PARTIAL = 1  # a peer's partial tile
    COMM_ENTERED = 2  # an owner's entry into the call
    RELAY_STAGED = 3  # the own GEMM kernel's staged tile; the source is the owner it is for


class FailureSite(NamedTuple):
    """Who waits for whom: the part of a record known before the wait."""

    rank: Any
    op: Any
    role: Any
    tile: Any
    source: Any
    index: Any


class Failure(NamedTuple):
    """One expired wait.

    Attributes:
        rank: who waited.
        op: :class:`Op`.
        role: :class:`Role`.
        tile: tile index in the waiting rank's shard.
        source: rank waited for.
        flag: index of the flag in the waiting rank's workspace.
        expected: epoch waited for.
        seen: value last read.
    """

    rank: int
    op: Op
    role: Role
    tile: int
    source: int
    flag: int
    expected: int
    seen: int


def read_record(words: Sequence[int]) -> Failure | None:
    """The failure in a record of ``RECORD_WORDS`` uint32 words, or None if no wait expired."""
    if int(words[0]) == 0:
        return None
    rank, op, role, tile, source, flag, expected, seen = (int(w) for w in words[1:RECORD_WORDS])
    return Failure(rank, Op(op), Role(role), tile, source, flag, expected, seen)
