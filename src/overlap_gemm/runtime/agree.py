"""What the ranks of a group must know of each other before they communicate.

`total_length` is part of an op. `check` and `report` are the debug mode: with `OVERLAP_GEMM_CHECK=1` in every
rank's environment, all ranks compare the facts of each call before it and raise together, each naming the
rank that differs, where otherwise the call would hang until the group's timeout or compute nonsense.
"""

import os
from typing import Any

import torch

from ..sharding import Shards
from .group import Group

CHECK_VARIABLE = "OVERLAP_GEMM_CHECK"


def checking() -> bool:
    """Whether the debug mode is on."""
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


def _compare(group: Group, facts: dict[str, Any]) -> None:
    """Raises on every rank if one of them has other facts."""
    everyone = group.all_gather_object(facts)
    failures = [
        f"rank {group.global_rank(rank)} failed in {theirs['op']}: {theirs['error']}"
        for rank, theirs in enumerate(everyone)
        if "error" in theirs
    ]
    if failures:
        raise RuntimeError("; ".join(failures))
    for fact in sorted({key for theirs in everyone for key in theirs}, key=lambda key: (key != "op", key)):
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            holders.setdefault(str(theirs.get(fact)), []).append(group.global_rank(rank))
        if len(holders) > 1:
            views = ", ".join(
                f"rank {' '.join(map(str, ranks))} has {value}"
                for value, ranks in sorted(holders.items(), key=lambda item: len(item[1]))
            )
            raise RuntimeError(f"{facts['op']}: the ranks of the group disagree on {fact}: {views}")


def check(group: Group, **facts: Any) -> None:
    """In debug mode, raises on every rank unless all call with the same facts, of which `op` is one.

    Raises:
        RuntimeError: The ranks disagree; the message names the fact, and which rank has what.
    """
    if checking() and group.process_group is not None:
        _compare(group, facts)


def report(op: str, group: Group, error: Exception) -> None:
    """In debug mode, tells the other ranks, which are about to call `op`, that this one will not."""
    if checking() and group.process_group is not None:
        group.all_gather_object({"op": op, "error": f"{type(error).__name__}: {error}"})


def total_length(op: str, what: str, length: int, device: torch.device, group: Group) -> int:
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

    Raises:
        ValueError: On every rank, if the lengths are not shards as `torch.chunk` cuts them.
    """
    if group.size == 1:
        return length
    if group.process_group is None:
        raise ValueError(f"{op}: virtual ranks cannot ask each other for {what}; pass the total")
    check(group, op=op, step=f"exchange of {what}")
    carrier = torch.device("cpu") if "cpu" in group.device_types else device
    lengths = torch.empty(group.size, dtype=torch.int64, device=carrier)
    own = torch.tensor([length], dtype=torch.int64, device=carrier)
    group.all_gather(lengths, own)
    found = lengths.tolist()
    wanted = Shards.even(sum(found), group.size).sizes
    if found != wanted:
        raise ValueError(
            f"{op}: the ranks hold {found} {what}; {sum(found)} must be cut as torch.chunk does: {wanted}"
        )
    return sum(found)
