"""What the ranks of a group must know of each other before they communicate.

`total_length` is part of an op; what the ranks call travels with the lengths. `same` compares what they call
at the first call of each kind. With `OVERLAP_GEMM_CHECK=1` in every rank's environment (the debug mode) all
ranks compare the facts of every call before it, and raise together, each naming the rank that differs, where
otherwise the call would hang until the group's timeout or compute nonsense; `report` lets them know of a rank
whose arguments do not fit together.
"""

import hashlib
import os
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..sharding import Shards
from .group import Group

Facts: TypeAlias = tuple[tuple[str, Any], ...]

TAG = (1 << 30) - 1
"""Of the messages in which ranks tell each other what they call: above users' tags, below `decomposed`'s."""

CHECK_VARIABLE = "OVERLAP_GEMM_CHECK"


_checking: bool | None = None


class DisagreementError(RuntimeError):
    """The ranks of a group differ where they must not, or one of them failed; raised on every rank."""


def checking() -> bool:
    """Whether the debug mode is on: what the environment said at the first call."""
    global _checking
    if _checking is None:
        _checking = os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")
    return _checking


def _compare(group: Group, facts: dict[str, Any]) -> None:
    """Raises on every rank if one of them has other facts."""
    everyone = group.all_gather_object(facts)
    failures = [
        f"rank {group.global_rank(rank)} failed in {theirs['op']}: {theirs['error']}"
        for rank, theirs in enumerate(everyone)
        if "error" in theirs
    ]
    if failures:
        raise DisagreementError("; ".join(failures))
    for fact in sorted({key for theirs in everyone for key in theirs}, key=lambda key: (key != "op", key)):
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            holders.setdefault(str(theirs.get(fact)), []).append(group.global_rank(rank))
        if len(holders) > 1:
            views = ", ".join(
                f"rank {' '.join(map(str, ranks))} has {value}"
                for value, ranks in sorted(holders.items(), key=lambda item: len(item[1]))
            )
            raise DisagreementError(f"{facts['op']}: the ranks of the group disagree on {fact}: {views}")


def same(group: Group, device: torch.device, facts: Facts) -> None:
    """Raises on every rank unless all make a call of the same facts; in debug mode at every call.

    Otherwise at the first one of these facts, so that ranks which differ from the start learn it by name and
    not from a transport that finds bytes it did not expect, or garbage. Not while a CUDA graph is captured.

    Args:
        group: Every rank of which must call.
        device: Where the op's tensors live.
        facts: (name, value), of which the first is the op.

    Raises:
        DisagreementError: The ranks disagree; the message names the fact, and which rank has what.
    """
    if group.process_group is None or group.size == 1:
        return
    if checking():
        _compare(group, dict(facts))
    elif facts not in group.agreed:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        _exchange(group, device, 0, facts)
        group.agreed.add(facts)


def report(op: str, group: Group, error: Exception) -> None:
    """In debug mode, tells the other ranks, which are about to call `op`, that this one will not."""
    if checking() and group.process_group is not None:
        group.all_gather_object({"op": op, "error": f"{type(error).__name__}: {error}"})


def total_length(op: str, what: str, length: int, device: torch.device, group: Group, facts: Facts) -> int:
    """The sum of the ranks' `length`, exchanged between them.

    The exchange goes through host memory where the group has a backend for it (gloo, or "cpu:gloo,cuda:nccl")
    and costs a stream synchronisation where it has none; callers who know the total pass it and save the
    exchange.

    Args:
        op: For messages.
        what: The name of the sharded extent, for messages.
        length: This rank's share of it.
        device: Where the op's tensors live.
        group: Every rank of which must call.
        facts: As for `same`; they travel with the length.

    Raises:
        ValueError: On every rank, if the lengths are not shards as `torch.chunk` cuts them.
        RuntimeError: On every rank, if they call with different facts.
    """
    if group.size == 1:
        return length
    if group.process_group is None:
        raise ValueError(f"{op}: virtual ranks cannot ask each other for {what}; pass the total")
    if checking():
        _compare(group, dict(facts))
    found = _exchange(group, device, length, facts)
    wanted = Shards.even(sum(found), group.size).sizes
    if found != wanted:
        raise ValueError(
            f"{op}: the ranks hold {found} {what}; {sum(found)} must be cut as torch.chunk does: {wanted}"
        )
    return sum(found)


def _exchange(group: Group, device: torch.device, length: int, facts: Facts) -> list[int]:
    """The ranks' lengths, if all have the same facts; these travel as a digest, whole only if it differs.

    By messages of a tag of their own where gloo carries them, so that a rank which is already in the data's
    collective is waited for, and not mistaken for one that answers.
    """
    on_host = "cpu" in group.device_types
    carrier = torch.device("cpu") if on_host else device
    own = torch.tensor([length, _digest(facts)], dtype=torch.int64, device=carrier)
    everyone = own.repeat(group.size, 1)
    if on_host and group.has_gloo:
        peers = [peer for peer in range(group.size) if peer != group.rank]
        ranks = {"group": group.process_group, "tag": TAG}
        works = [(peer, dist.irecv(everyone[peer], group_src=peer, **ranks)) for peer in peers]
        works += [(peer, dist.isend(own, group_dst=peer, **ranks)) for peer in peers]
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                here, there = group.global_rank(group.rank), group.global_rank(peer)
                raise RuntimeError(
                    f"{facts[0][1]} on rank {here}: rank {there} is gone, or does something else: it did not "
                    f"say what it calls ({error})"
                ) from error
    else:
        group.all_gather(everyone, own)
    lengths, digests = everyone.t().tolist()
    if len(set(digests)) > 1:
        _compare(group, dict(facts))
        raise AssertionError("equal facts with different digests")
    return list(lengths)


@lru_cache(maxsize=1024)
def _digest(facts: Facts) -> int:
    """The same in every process for the same facts."""
    text = repr(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
