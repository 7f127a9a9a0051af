"""Exchange of two int64 values between all ranks of a group, on CPUs over gloo, before a call.

gloo matches messages by (peer, tag). A message of this module therefore never matches a data collective: a
rank that is still in one is waited for. The receive of a peer's next message is posted when its last one has
arrived. gloo then sends directly instead of offering the message first, which takes a third of the time
(benchmarks/results/cpu-identity.json).
"""

import ctypes
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .group import Group

TAG = (1 << 30) - 1
"""Tag of these messages: above users' tags, below those of the backend `decomposed`."""

WORDS = 2

CPU = torch.device("cpu")


class _Inbox:
    """Posted receives of one rank, and the message that it sends.

    Attributes:
        carrier: gloo backend of the group. torch's dispatcher would take as long as the messages.
        rows: Row of each rank in `[P, 2]` int64. This rank's is sent, messages are received into the others.
        peers: Ranks other than this one.
        works: Handle of the receive of each peer's next message, by rank.
        broken: Error that ended an exchange before all messages arrived; None: there was none.
    """

    def __init__(self, group: Group, process_group: dist.ProcessGroup) -> None:
        self.carrier = process_group._get_backend(CPU)
        self._words = torch.zeros(group.size, WORDS, dtype=torch.int64)
        self.rows, self.peers = self._words.unbind(), [r for r in range(group.size) if r != group.rank]
        self._address, self._nbytes = self._words.data_ptr(), self._words.nbytes
        self._local = self.rows[group.rank].data_ptr()
        self.works: dict[int, dist.Work] = {}
        self.broken: str | None = None
        self.receive()

    def write(self, local: bytes) -> None:
        """Writes this rank's row; tensors of 16 bytes take ten times as long."""
        ctypes.memmove(self._local, local, len(local))

    def read(self) -> bytes:
        """Returns a copy of all rows."""
        return ctypes.string_at(self._address, self._nbytes)

    def receive(self) -> None:
        """Posts the receive of each peer's next message.

        A profiler must not record it: the receive ends in a later call, when the profiler may have stopped.
        torch then writes the end into freed memory.
        """
        watched = torch.autograd._profiler_enabled()
        if watched:
            torch.autograd._enable_record_function(False)
        try:
            for peer in self.peers:
                self.works[peer] = self.carrier.recv([self.rows[peer]], peer, TAG)
        finally:
            if watched:
                torch.autograd._enable_record_function(True)


_inboxes: "WeakKeyDictionary[dist.ProcessGroup, _Inbox]" = WeakKeyDictionary()
"""Inboxes by process group, and removed with it: a receive that outlives its group keeps connections open."""


def exchange(group: Group, local: bytes, op: str) -> bytes:
    """Returns every rank's `local`, in rank order. All ranks must call in the same order.

    Args:
        group: Group whose gloo backend sends tensors in host memory.
        local: Two int64 values of this rank, as bytes.
        op: Name of the op, for messages.

    Raises:
        RuntimeError: A peer is gone, or did not send within the group's timeout.
    """
    process_group = group.process_group
    assert process_group is not None
    inbox = _inboxes.get(process_group)
    if inbox is None:
        inbox = _inboxes[process_group] = _Inbox(group, process_group)
    my_rank = group.rank
    if inbox.broken is not None:
        raise RuntimeError(
            f"{op} on rank {group.global_rank(my_rank)}: the ranks of the group are out of step, because an "
            f"earlier exchange ended before all messages arrived: {inbox.broken}. Create a new group"
        )
    row, peer = inbox.rows[my_rank], my_rank
    try:
        inbox.write(local)
        sent = [(peer, inbox.carrier.send([row], peer, TAG)) for peer in inbox.peers]
        for peer, work in inbox.works.items():  # noqa: B007  used in the error message
            work.wait()
        everyone = inbox.read()
        inbox.receive()
        for peer, work in sent:  # noqa: B007  as above
            work.wait()
    except RuntimeError as error:
        rank, peer_rank = group.global_rank(my_rank), group.global_rank(peer)
        inbox.broken = f"{op}: {error}"
        raise RuntimeError(
            f"{op} on rank {rank}: rank {peer_rank} has exited or makes no matching call; its message did "
            f"not arrive ({error})"
        ) from error
    except BaseException as error:
        inbox.broken = f"{op}: {type(error).__name__}"
        raise
    return everyone
