"""Two words from each rank of a group to every other one, on CPUs over gloo, in front of what they call.

gloo matches messages by (peer, tag), so a rank that is already in a collective of the data is waited for, and
not mistaken for one that answers. Each message is awaited before it is sent: the receive for the next one is
posted when the last one has come. gloo then sends at once what it would otherwise offer first, which takes a
third of the time (benchmarks/results/cpu-identity.json).
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .group import Group

TAG = (1 << 30) - 1
"""Of the messages in which ranks tell each other what they call: above users' tags, below `decomposed`'s."""

WORDS = 2

CPU = torch.device("cpu")


class _Inbox:
    """The receives of one rank that are posted.

    Attributes:
        words: `[P, 2]`, where messages arrive; this rank's row is not written.
        works: Of each peer's next message.
        broken: How an exchange ended before all messages were there; None: none did.
    """

    def __init__(self, group: Group, carrier: dist.Backend) -> None:
        self.words = torch.zeros(group.size, WORDS, dtype=torch.int64)
        self.works = [
            None if peer == group.rank else carrier.recv([self.words[peer]], peer, TAG)
            for peer in range(group.size)
        ]
        self.broken: str | None = None


_inboxes: "WeakKeyDictionary[dist.ProcessGroup, _Inbox]" = WeakKeyDictionary()
"""By process group, and gone with it: a receive that outlives its group keeps connections open."""


def exchange(group: Group, own: torch.Tensor, op: str) -> torch.Tensor:
    """Returns what each rank has as `own`, `[P, 2]`; all ranks must call, in the same order.

    Args:
        group: The ranks, of which gloo carries tensors in host memory.
        own: Two int64.
        op: For messages.

    Raises:
        RuntimeError: A peer is gone, or did not send within the group's timeout.
    """
    process_group = group.process_group
    assert process_group is not None
    # Not through torch's dispatcher, which takes as long as the messages do.
    carrier = process_group._get_backend(CPU)
    inbox = _inboxes.get(process_group)
    if inbox is None:
        inbox = _inboxes[process_group] = _Inbox(group, carrier)
    here = group.rank
    if inbox.broken is not None:
        raise RuntimeError(
            f"{op} on rank {group.global_rank(here)}: the ranks of the group are out of step since an "
            f"earlier call ended in the middle: {inbox.broken}"
        )
    everyone = own.repeat(group.size, 1)
    peer = here
    try:
        sent = [(peer, carrier.send([own], peer, TAG)) for peer in range(group.size) if peer != here]
        for peer, work in enumerate(inbox.works):
            if work is not None:
                work.wait()
                everyone[peer] = inbox.words[peer]
                inbox.works[peer] = carrier.recv([inbox.words[peer]], peer, TAG)
        for peer, work in sent:  # noqa: B007  named below
            work.wait()
    except RuntimeError as error:
        rank, there = group.global_rank(here), group.global_rank(peer)
        inbox.broken = f"{op}: {error}"
        raise RuntimeError(
            f"{op} on rank {rank}: rank {there} is gone, or does something else: it did not say what it "
            f"calls ({error})"
        ) from error
    except BaseException as error:
        inbox.broken = f"{op}: {type(error).__name__}"
        raise
    return everyone
