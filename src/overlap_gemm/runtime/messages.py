"""Exchange of two int64 values between all ranks of a group, on CPUs over gloo, before a call.

gloo matches messages by (peer, tag). A message of this module therefore never matches a data collective: a
rank that is still in one is waited for. The receive of a peer's next message is posted when its last one has
arrived. gloo then sends directly instead of offering the message first, which takes a third of the time
(benchmarks/results/cpu-identity.json).
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .group import Group

TAG = (1 << 30) - 1
"""Tag of these messages: above users' tags, below those of the backend `decomposed`."""

WORDS = 2

CPU = torch.device("cpu")


class _Inbox:
    """Posted receives of one rank.

    Attributes:
        words: `[P, 2]` int64, into which messages are received; this rank's row is unused.
        works: Handle of the receive of each peer's next message.
        broken: Error that ended an exchange before all messages arrived; None: there was none.
    """

    def __init__(self, group: Group, carrier: dist.Backend) -> None:
        self.words = torch.zeros(group.size, WORDS, dtype=torch.int64)
        self.works = [
            None if peer == group.rank else self.receive(carrier, peer) for peer in range(group.size)
        ]
        self.broken: str | None = None

    def receive(self, carrier: dist.Backend, peer: int) -> dist.Work:
        """Returns the handle of a receive of the next message of `peer`.

        A profiler must not record it: the receive ends in a later call, when the profiler may have stopped.
        torch then writes the end into freed memory.
        """
        watched = torch.autograd._profiler_enabled()
        if watched:
            torch.autograd._enable_record_function(False)
        try:
            return carrier.recv([self.words[peer]], peer, TAG)
        finally:
            if watched:
                torch.autograd._enable_record_function(True)


_inboxes: "WeakKeyDictionary[dist.ProcessGroup, _Inbox]" = WeakKeyDictionary()
"""Inboxes by process group, and removed with it: a receive that outlives its group keeps connections open."""


def exchange(group: Group, local: torch.Tensor, op: str) -> torch.Tensor:
    """Returns every rank's `local` as `[P, 2]`. All ranks must call in the same order.

    Args:
        group: Group whose gloo backend sends tensors in host memory.
        local: Two int64 values of this rank.
        op: Name of the op, for messages.

    Raises:
        RuntimeError: A peer is gone, or did not send within the group's timeout.
    """
    process_group = group.process_group
    assert process_group is not None
    # Call the backend directly: torch's dispatcher takes as long as the messages.
    carrier = process_group._get_backend(CPU)
    inbox = _inboxes.get(process_group)
    if inbox is None:
        inbox = _inboxes[process_group] = _Inbox(group, carrier)
    my_rank = group.rank
    if inbox.broken is not None:
        raise RuntimeError(
            f"{op} on rank {group.global_rank(my_rank)}: the ranks of the group are out of step, because an "
            f"earlier exchange ended before all messages arrived: {inbox.broken}. Create a new group"
        )
    everyone = local.repeat(group.size, 1)
    peer = my_rank
    try:
        sent = [(peer, carrier.send([local], peer, TAG)) for peer in range(group.size) if peer != my_rank]
        for peer, work in enumerate(inbox.works):
            if work is not None:
                work.wait()
                everyone[peer] = inbox.words[peer]
                inbox.works[peer] = inbox.receive(carrier, peer)
        for peer, work in sent:  # noqa: B007  used in the error message
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
