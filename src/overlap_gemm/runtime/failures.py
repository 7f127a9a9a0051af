"""Errors of failed kernels. Nothing here imports torch, so the watcher's process imports it quickly."""

from __future__ import annotations

from collections.abc import Sequence

from ..device.failure import NOTHING, Failure, Role, read_record
from ..spec import op_coded
from .identity import describe


class CommTimeoutError(RuntimeError):
    """A kernel's wait for a peer expired. The CUDA context of the process is unusable afterwards.

    Attributes:
        failure: Record written by the waiting lane.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        seen = "nothing" if failure.seen == NOTHING else failure.seen
        op, role = op_coded(failure.op), Role(failure.role).name.lower()
        super().__init__(
            f"{op}: rank {failure.rank} ({role}) gave up on "
            f"rank {failure.source}: tile {failure.tile}, flag {failure.flag}, "
            f"expected epoch {failure.expected}, seen {seen}. "
            f"Rank {failure.source} has exited, is stalled, or did not make the same calls."
        )


class OverlappingCallsError(RuntimeError):
    """Two fused calls ran on a device at once. The CUDA context of the process is unusable afterwards.

    Attributes:
        failure: Record of the later call; `seen` is the number of the call that was running.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(
            f"{op_coded(failure.op)}: call {failure.expected} of rank {failure.rank} began while call "
            f"{failure.seen} ran on the same device; the two could wait for each other for ever. "
            f"Eager calls are ordered, and so are calls captured in one graph, but only its stream orders "
            f"a replay. Replay graphs of fused calls on the stream of the other fused calls, or make one "
            f"stream wait for the other (torch.cuda.Stream.wait_stream)."
        )


class MismatchedCallsError(RuntimeError):
    """A peer is in a different call. The CUDA context of the process is unusable afterwards.

    No rank returns a result of two different calls.

    Attributes:
        failure: Record; `expected` and `seen` are this rank's and the peer's identity of the call
            (`exchange.call.Call.identity`).
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        local_call, peer_call = describe(failure.expected >> 32), describe(failure.seen >> 32)
        super().__init__(
            f"{op_coded(failure.op)}: rank {failure.rank} is in {local_call}, rank {failure.source} in "
            f"{peer_call}, as call {failure.expected & 0xFFFFFFFF} of their workspace. All ranks of a group "
            f"must make the same calls in the same order, also when graphs are replayed. A call that raised "
            f"on one rank alone is counted there and cannot be made up for."
        )


FAILURES: dict[int, type[CommTimeoutError | OverlappingCallsError | MismatchedCallsError]] = {
    Role.IN_CALL: OverlappingCallsError,
    Role.CALL_IDENTITY: MismatchedCallsError,
}
"""Exception class by the role that wrote the record; for other roles it is CommTimeoutError."""


def error_of(words: Sequence[int]) -> CommTimeoutError | OverlappingCallsError | MismatchedCallsError:
    """Returns the error of a complete record (`device.failure.read_record`)."""
    failure = read_record(words)
    assert failure is not None
    return FAILURES.get(failure.role, CommTimeoutError)(failure)
