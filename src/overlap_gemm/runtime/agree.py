"""What the ranks of a group must know of each other before they communicate.

The rule: between two collectives nothing may raise on one rank alone, since its peers would wait for it.
Whatever one rank may fail at by itself (its environment, files, devices, memory, compiler) is an attempt of
`together` or `gather`, at a call that all ranks make: each is told who failed, and why.

`same` compares what they call at the first call of each kind, and `equal_length` the lengths of their shards;
`total_length` asks for these in every call. What the ranks call travels with lengths. `of_calls` compares
portable calls in front of each transfer, with the number of calls that raised before. With
`OVERLAP_GEMM_CHECK=1` in every rank's environment (the debug mode) all ranks compare the facts of every call
before it, and raise together, each naming the rank that differs, where otherwise the call would hang until
the group's timeout or compute nonsense; `report` lets them know of a rank whose arguments do not fit.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch

from ..spec.sharding import Shards
from .group import Group
from .ledger import ledger_of
from .messages import exchange
from .order import is_capturing

Facts: TypeAlias = tuple[tuple[str, Any], ...]
T = TypeVar("T")

ASKS = "what they know of each other's shards"
"""The fact that ranks ask each other for lengths, or compare them."""

REFUSED = "the number of calls that raised before their first transfer"
"""The fact by which a call that one rank has left out is known from the peers' next one."""

CHECK_VARIABLE = "OVERLAP_GEMM_CHECK"


_checking: bool | None = None


class DisagreementError(RuntimeError):
    """The ranks of a group differ where they must not, or one of them failed; raised on every rank."""

    is_on_every_rank = True


def gather(
    group: Group, what: str, attempt: Callable[[], T], error: type[DisagreementError] = DisagreementError
) -> list[T]:
    """Every rank's result of an attempt, if it worked on all of them.

    Args:
        group: Every rank of which must call.
        what: Names the attempt in the error.
        attempt: May raise. Its result travels. It must not communicate, unless what fails in it on one rank
            fails on all.
        error: Raised where it failed.

    Raises:
        DisagreementError: On every rank, with the ranks that failed and why. Where all failed for the same
            reason, each raises what its attempt raised.
    """
    if "cpu" in group.device_types and group.has_gloo:  # a peer may be in another call
        _exchange(group, torch.device("cpu"), 0, facts := (("op", what),), facts)
    result: tuple[T, ...] = ()
    failure: Exception | None = None
    try:
        result = (attempt(),)
    except Exception as caught:  # any failure must reach the peers, who would otherwise wait for this rank
        failure = caught
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = group.all_gather_object((mine, result))
    reasons = [reason for reason, _ in everyone]
    if failure is not None and all(reason == mine for reason in reasons):
        raise failure
    if any(reasons):
        failed = [f"rank {group.global_rank(r)}: {reason}" for r, reason in enumerate(reasons) if reason]
        raise error(
            f"{what} failed on {len(failed)} of {group.size} ranks ({'; '.join(failed)})"
        ) from failure
    return [theirs for _, (theirs,) in everyone]


def together(
    group: Group, what: str, attempt: Callable[[], T], error: type[DisagreementError] = DisagreementError
) -> T:
    """This rank's result of an attempt, which stays here, if it worked on every rank; else as `gather`."""
    results: list[T] = []
    gather(group, what, lambda: results.append(attempt()), error)
    return results[0]


def checking() -> bool:
    """Whether the debug mode is on: what the environment said at the first call."""
    global _checking
    if _checking is None:
        _checking = os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")
    return _checking


def _compare(group: Group, facts: dict[str, Any]) -> None:
    """Raises on every rank if one of them has other facts, or has left out another number of calls."""
    own = {**facts, REFUSED: group.progress.skipped}, str(group.progress)
    everyone, progress = zip(*group.all_gather_object(own), strict=True)
    failures = [
        f"rank {group.global_rank(rank)} failed in {theirs['op']}: {theirs['error']}"
        for rank, theirs in enumerate(everyone)
        if "error" in theirs
    ]
    if failures:
        raise DisagreementError("; ".join(failures))
    # Some may ask for lengths where others make a call that they know: what all say comes first.
    said = dict.fromkeys(key for theirs in everyone for key in theirs)
    differing = []
    for fact in sorted(said, key=lambda fact: (any(fact not in theirs for theirs in everyone), fact != ASKS)):
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            view = str(theirs.get(fact, "nothing to compare"))
            holders.setdefault(view, []).append(rank)
        if len(holders) > 1:
            views = ", ".join(
                f"rank {' '.join(str(group.global_rank(rank)) for rank in ranks)} has "
                f"{progress[ranks[0]] if fact == REFUSED else value}"
                for value, ranks in sorted(holders.items(), key=lambda item: len(item[1]))
            )
            differing.append(f"{fact}: {views}")
    if differing:
        refused = [words for words in differing[1:] if words.startswith(REFUSED)]
        words = "; and on ".join(differing[:1] + refused)
        raise DisagreementError(f"{facts['op']}: the ranks of the group disagree on {words}")


def same(group: Group, device: torch.device, facts: Facts, every_time: bool = False) -> None:
    """Raises on every rank unless all make a call of the same facts; in debug mode at every call.

    Otherwise at the first one of these facts, so that ranks which differ from the start learn it by name and
    not from a transport that finds bytes it did not expect, or garbage. Not while a CUDA graph is captured.

    Args:
        group: Every rank of which must call.
        device: Where the op's tensors live.
        facts: (name, value), of which the first is the op.
        every_time: Ask at every call, debug mode or not.

    Raises:
        DisagreementError: The ranks disagree; the message names the fact, and which rank has what.
    """
    if group.process_group is None or group.size == 1:
        return
    if checking():
        _compare(group, dict(facts))
    elif every_time or facts not in group.agreed:
        if is_capturing(device):
            return
        _exchange(group, device, 0, facts, facts)
        if not every_time:
            group.agreed.add(facts)


def differences(group: Group, values: Sequence[Any]) -> str | None:
    """What each rank of a group has, in words; None where all have the same of these, in rank order."""
    if len(set(values)) < 2:
        return None
    return ", ".join(f"rank {group.global_rank(rank)} has {value}" for rank, value in enumerate(values))


def failure(error: Exception) -> tuple[str, str]:
    """The fact that a rank fails; among those of `same` it is told to the others by name."""
    return "error", f"{type(error).__name__}: {error}"


def of_calls(group: Group, device: torch.device, facts: Facts) -> Group:
    """`group`, whose transfers are compared with the peers' before they begin (`Group.enter`).

    On CPUs over gloo, by a message of 16 bytes to each peer: facts, transfer, and number of refused calls.
    Elsewhere later, by a thread (`runtime.ledger`).
    Without it, ranks that call different things which each of them has called before would take each other's
    bytes for their own, or abort in gloo; and what follows a call that raised on one rank alone would be
    taken for that call.

    Args:
        group: Every rank of which makes such a call.
        device: Where the op's tensors live.
        facts: As for `same`.
    """
    if group.process_group is None or group.size == 1:
        return group
    progress = group.progress
    has_messages = device.type == "cpu" and group.has_gloo
    known: dict[tuple[str, int], torch.Tensor] = {}
    noted: dict[tuple[str, int], tuple[int, str]] = {}

    def note(kind: tuple[str, int]) -> None:
        ledger = ledger_of(group)
        if ledger.difference is not None:
            raise DisagreementError(f"{facts[0][1]}: {ledger.difference}")
        if kind not in noted:
            told = (*facts, ("transfer", kind[0]), (REFUSED, progress))
            noted[kind] = _digest((*facts, kind)), ", ".join(f"{name}={value}" for name, value in told)
        ledger.note(*noted[kind])

    def enter(transfer: str) -> None:
        kind = transfer, progress.skipped
        if not has_messages:
            note(kind)
        else:
            if (expected := known.get(kind)) is None:
                words = [progress.skipped, _digest((*facts, ("transfer", transfer)))]
                expected = known[kind] = torch.tensor(words, dtype=torch.int64).repeat(group.size, 1)
            if not torch.equal(exchange(group, expected[group.rank], facts[0][1]), expected):
                _raise_difference(group, (*facts, ("transfer", transfer)))
        progress.events += 1

    return replace(group, enter=enter)


def report(op: str, group: Group, error: Exception) -> None:
    """In debug mode, tells the other ranks, which are about to call `op`, that this one will not."""
    if checking() and group.process_group is not None:
        group.all_gather_object((dict([("op", op), failure(error)]), ""))


def total_length(op: str, what: str, length: int, device: torch.device, group: Group, facts: Facts) -> int:
    """The sum of the ranks' `length`, exchanged between them.

    The exchange goes through host memory where the group has a backend for it (gloo, or "cpu:gloo,cuda:nccl")
    and costs a stream synchronisation where it has none.

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
    facts = (*facts, (ASKS, f"{what}='exchange'"))
    found = _exchange(group, device, length, facts, facts)
    total = sum(found)
    if found != (wanted := Shards.even(total, group.size).sizes):
        raise ValueError(
            f"{op}: the ranks hold {found} {what}; {total} must be cut as torch.chunk does: {wanted}"
        )
    return total


def equal_length(
    op: str, what: str, length: int, device: torch.device, group: Group, facts: Facts, unit: int = 1
) -> int:
    """`total_length` of ranks that have as much as each other, which they compare at the first such call.

    A rank whose length changes later asks the others, who do not: they learn of it in front of the transfer,
    where transfers are compared (`of_calls`), else from what carries it out, or by the group's timeout.

    Args:
        op: For messages.
        what: The name of the sharded extent, for messages.
        length: This rank's share of it.
        device: Where the op's tensors live.
        group: Every rank of which must call.
        facts: As for `same`; they travel with the length.
        unit: Which multiple of the length the facts of `same` have by the name `what`.

    Raises:
        ValueError: On every rank, if the lengths are not equal.
        RuntimeError: On every rank, if they call with different facts.
    """
    facts = (*facts, (ASKS, f"no {what}=, to be compared"))
    total, known = length * group.size, (length, facts)
    if group.process_group is None or group.size == 1 or (known in group.agreed and not checking()):
        return total
    found = _exchange(group, device, length, facts, (*facts, (what, total * unit)))
    if len(set(found)) > 1:
        total, wanted = sum(found), Shards.even(sum(found), group.size).sizes
        way = "" if found == wanted else f", cut as torch.chunk does: {wanted}"
        raise ValueError(
            f"{op}: the ranks hold {found} {what}; without {what}= all must hold as many. "
            f"Pass {what}={total}{way}; or {what}='exchange', if ranks know their own {what} only"
        )
    group.agreed.add(known)
    return total


def _exchange(group: Group, device: torch.device, length: int, facts: Facts, told: Facts) -> list[int]:
    """The ranks' lengths, if all have the same facts; these travel as a digest; if it differs, as `told`.

    By messages (`runtime.messages`) where gloo carries them. In debug mode the facts go first, whole.
    """
    if checking():
        _compare(group, dict(facts))
    on_host = "cpu" in group.device_types
    carrier = torch.device("cpu") if on_host else device
    own = torch.tensor([length, _digest(facts)], dtype=torch.int64, device=carrier)
    if on_host and group.has_gloo:
        everyone = exchange(group, own, facts[0][1])
    else:
        everyone = own.repeat(group.size, 1)
        group.all_gather(everyone, own)
    lengths, digests = everyone.t().tolist()
    if len(set(digests)) > 1:
        _raise_difference(group, told)
    return list(lengths)


def _raise_difference(group: Group, facts: Facts) -> None:
    _compare(group, dict(facts))
    raise AssertionError("equal facts with different digests")


@lru_cache(maxsize=1024)
def _digest(facts: Facts) -> int:
    """The same in every process for the same facts."""
    text = repr(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
