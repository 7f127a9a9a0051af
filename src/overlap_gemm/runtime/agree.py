"""Agreement between the ranks of a group before they communicate.

The rule: between two collectives nothing may raise on one rank alone, since its peers would wait for it.
Environment, files, devices, memory and compiler may fail on one rank alone. Code that uses them is passed
to `together` or `gather`, in a call that all ranks make. Every rank then gets the failed ranks and reasons.

| function | compares | when |
|---|---|---|
| `same` | facts of the call | first call with these facts |
| `equal_length` | facts, and equal lengths of the shards | first call with these facts and this length |
| `total_length` | facts, and lengths of the shards | every call |
| `of_calls` | facts, transfer, number of calls that raised | each transfer of a portable call |

With `OVERLAP_GEMM_CHECK=1` in every rank's environment (debug mode) all ranks compare the facts of every call
before it. They raise together, and each names the rank that differs. `report` notifies the other ranks that
this rank's arguments are invalid. The variable is read once, at the first call.

Without debug mode a different call is noticed later. Over gloo `of_calls` raises DisagreementError before
data is sent. Over NCCL the next call raises it (`runtime.ledger`). Fused kernels compare signatures on the
device (`runtime.identity`): MismatchedCallsError, or CommTimeoutError if a rank makes no call.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch

from ..spec.sharding import Shards
from . import environment
from .group import Group
from .ledger import ledger_of
from .messages import exchange
from .order import is_capturing

Facts: TypeAlias = tuple[tuple[str, Any], ...]
T = TypeVar("T")

LENGTHS = "how the lengths of shards are determined"
"""Name of the fact that ranks exchange lengths, or compare them."""

SKIPPED = "the number of calls that raised before their first transfer"
"""Name of the fact that shows a call which one rank has skipped, in the peers' next call."""

CHECK_VARIABLE = "OVERLAP_GEMM_CHECK"


_checking: bool | None = None


class DisagreementError(RuntimeError):
    """Ranks of a group differ where they must be equal, or one of them failed. Raised on every rank."""

    is_on_every_rank = True


def gather(
    group: Group, what: str, attempt: Callable[[], T], error: type[DisagreementError] = DisagreementError
) -> list[T]:
    """Returns every rank's result of an attempt if it succeeded on all ranks.

    Args:
        group: Group of which every rank must call.
        what: Name of the attempt in the error.
        attempt: Function that may raise; its result is sent to all ranks. It may communicate only if it then
            fails on all ranks or on none.
        error: Exception class if the attempt failed on some ranks.

    Raises:
        DisagreementError: On every rank, with the failed ranks and the reasons. If all ranks failed with the
            same type and text, each raises the exception of its attempt.
    """
    if "cpu" in group.device_types and group.has_gloo:  # a peer may be in a different call
        _exchange(group, torch.device("cpu"), 0, facts := (("op", what),), facts)
    result: tuple[T, ...] = ()
    failure: Exception | None = None
    try:
        result = (attempt(),)
    except Exception as caught:  # any failure must be sent to the waiting peers
        failure = caught
    local_reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = group.all_gather_object((local_reason, result))
    reasons = [reason for reason, _ in everyone]
    if failure is not None and all(reason == local_reason for reason in reasons):
        raise failure
    if any(reasons):
        failed = [f"rank {group.global_rank(r)}: {reason}" for r, reason in enumerate(reasons) if reason]
        raise error(
            f"{what} failed on {len(failed)} of {group.size} ranks ({'; '.join(failed)})"
        ) from failure
    return [value for _, (value,) in everyone]


def together(
    group: Group, what: str, attempt: Callable[[], T], error: type[DisagreementError] = DisagreementError
) -> T:
    """Returns this rank's result of an attempt if it succeeded on all ranks; results are not sent.

    Errors are those of `gather`.
    """
    results: list[T] = []
    gather(group, what, lambda: results.append(attempt()), error)
    return results[0]


def checking() -> bool:
    """Returns whether debug mode is on; the environment is read at the first call.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    global _checking
    if _checking is None:
        _checking = environment.choice(CHECK_VARIABLE, ("0", "1")) == "1"
    return _checking


def _compare(group: Group, facts: dict[str, Any]) -> None:
    """Raises on every rank if ranks have different facts or numbers of skipped calls."""
    local = {**facts, SKIPPED: group.progress.skipped}, str(group.progress)
    everyone, progress = zip(*group.all_gather_object(local), strict=True)
    failures = [
        f"rank {group.global_rank(rank)} failed in {theirs['op']}: {theirs['error']}"
        for rank, theirs in enumerate(everyone)
        if "error" in theirs
    ]
    if failures:
        raise DisagreementError("; ".join(failures))
    # Ranks that exchange lengths have other facts than those that do not: common facts are reported first.
    names = dict.fromkeys(key for theirs in everyone for key in theirs)
    differing = []
    for fact in sorted(
        names, key=lambda fact: (any(fact not in theirs for theirs in everyone), fact != LENGTHS)
    ):
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            view = str(theirs.get(fact, "nothing to compare"))
            holders.setdefault(view, []).append(rank)
        if len(holders) > 1:
            views = ", ".join(
                f"rank {' '.join(str(group.global_rank(rank)) for rank in ranks)} has "
                f"{progress[ranks[0]] if fact == SKIPPED else value}"
                for value, ranks in sorted(holders.items(), key=lambda item: len(item[1]))
            )
            differing.append(f"{fact}: {views}")
    if differing:
        skipped = [words for words in differing[1:] if words.startswith(SKIPPED)]
        words = "; and on ".join(differing[:1] + skipped)
        raise DisagreementError(f"{facts['op']}: the ranks of the group disagree on {words}")


def same(group: Group, device: torch.device, facts: Facts, every_time: bool = False) -> None:
    """Raises on every rank unless all make a call with the same facts.

    Facts are compared at the first call with them; in debug mode, or with `every_time`, at every call.
    Without debug mode nothing is compared while a CUDA graph is captured.

    Args:
        group: Group of which every rank must call.
        device: Device of the op's tensors.
        facts: (name, value) pairs; the first is the op.
        every_time: Compare at every call.

    Raises:
        DisagreementError: The ranks disagree; the message names the fact and each rank's value.
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
    """Returns a text with each rank's value, or None if all values (in rank order) are equal."""
    if len(set(values)) < 2:
        return None
    return ", ".join(f"rank {group.global_rank(rank)} has {value}" for rank, value in enumerate(values))


def failure(error: Exception) -> tuple[str, str]:
    """Returns a fact ("error", text), with which a failed rank calls `same`: it then raises on every rank."""
    return "error", f"{type(error).__name__}: {error}"


def of_calls(group: Group, device: torch.device, facts: Facts) -> Group:
    """Returns `group` with a function that compares each transfer with the peers' before it (`Group.enter`).

    On CPUs over gloo it sends 16 bytes to each peer: the number of skipped calls, and a digest of facts and
    transfer. On other devices a thread compares later (`runtime.ledger`). Without the comparison, ranks in
    different calls would take each other's bytes as their own, or abort in gloo. A rank on which one call
    raised would pair its next call with the peers' earlier one.

    Args:
        group: Group of which every rank makes such a call.
        device: Device of the op's tensors.
        facts: (name, value) pairs that are equal on all ranks; the first is the op.
    """
    if group.process_group is None or group.size == 1:
        return group
    progress = group.progress
    has_messages = device.type == "cpu" and group.has_gloo
    known: dict[tuple[str, int], bytes] = {}
    noted: dict[tuple[str, int], tuple[int, str]] = {}

    def note(kind: tuple[str, int]) -> None:
        ledger = ledger_of(group)
        if ledger.difference is not None:
            raise DisagreementError(f"{facts[0][1]}: {ledger.difference}")
        if kind not in noted:
            described = (*facts, ("transfer", kind[0]), (SKIPPED, progress))
            text = ", ".join(f"{name}={value}" for name, value in described)
            noted[kind] = _digest((*facts, kind)), text
        ledger.note(*noted[kind])

    def enter(transfer: str) -> None:
        kind = transfer, progress.skipped
        if not has_messages:
            note(kind)
        else:
            if kind not in known:
                words = progress.skipped, _digest((*facts, ("transfer", transfer)))
                known[kind] = struct.pack("2q", *words)
            local = known[kind]
            if exchange(group, local, facts[0][1]) != local * group.size:
                _raise_difference(group, (*facts, ("transfer", transfer)))
        progress.events += 1

    return replace(group, enter=enter)


def report(op: str, group: Group, error: Exception) -> None:
    """Notifies the other ranks, in debug mode, that this rank will not make their call of `op`."""
    if checking() and group.process_group is not None:
        group.all_gather_object((dict([("op", op), failure(error)]), ""))


def total_length(op: str, what: str, length: int, device: torch.device, group: Group, facts: Facts) -> int:
    """Returns the sum of the ranks' `length`, which they exchange.

    The exchange uses host memory if the group has a backend for it (gloo, or "cpu:gloo,cuda:nccl"). Otherwise
    it costs a stream synchronisation.

    Args:
        op: Name of the op, for messages.
        what: Name of the sharded extent, for messages.
        length: This rank's share of the extent.
        device: Device of the op's tensors.
        group: Group of which every rank must call.
        facts: (name, value) pairs that are sent with the length and must be equal; the first is the op.

    Raises:
        ValueError: On every rank, if the lengths are not those of `torch.chunk`.
        RuntimeError: On every rank, if the facts differ.
    """
    if group.size == 1:
        return length
    if group.process_group is None:
        raise ValueError(f"{op}: virtual ranks cannot exchange their {what}; pass {what}=<total>")
    facts = (*facts, (LENGTHS, f"{what}='exchange'"))
    lengths = _exchange(group, device, length, facts, facts)
    total = sum(lengths)
    if lengths != (expected := Shards.even(total, group.size).sizes):
        raise ValueError(
            f"{op}: the ranks hold {lengths} {what}; {total} must be split as by torch.chunk: {expected}"
        )
    return total


def equal_length(
    op: str, what: str, length: int, device: torch.device, group: Group, facts: Facts, unit: int = 1
) -> int:
    """Returns `total_length` for shards of equal length, which the ranks compare at the first such call.

    If the length changes later on one rank, that rank compares again, but the others do not. They notice it
    before the transfer where transfers are compared (`of_calls`), otherwise by an error of the backend or by
    the group's timeout.

    Args:
        op: Name of the op, for messages.
        what: Name of the sharded extent, for messages.
        length: This rank's share of the extent.
        device: Device of the op's tensors.
        group: Group of which every rank must call.
        facts: (name, value) pairs that are sent with the length and must be equal; the first is the op.
        unit: Rows for each element of the length; messages show the total times `unit`.

    Raises:
        ValueError: On every rank, if the lengths are not equal.
        RuntimeError: On every rank, if the facts differ.
    """
    known = length, facts = _compared(what, length, facts)
    total = length * group.size
    if group.process_group is None or group.size == 1 or (known in group.agreed and not checking()):
        return total
    lengths = _exchange(group, device, length, facts, (*facts, (what, total * unit)))
    if len(set(lengths)) > 1:
        total, expected = sum(lengths), Shards.even(sum(lengths), group.size).sizes
        split = "" if lengths == expected else f", split as by torch.chunk: {expected}"
        raise ValueError(
            f"{op}: the ranks hold {lengths} {what}; without {what}= all must hold as many. "
            f"Pass {what}={total}{split}; or {what}='exchange', if a rank has no total"
        )
    group.agreed.add(known)
    return total


def is_equal(group: Group, what: str, length: int, facts: Facts) -> bool:
    """Returns whether `equal_length` has compared these lengths."""
    return _compared(what, length, facts) in group.agreed


def _compared(what: str, length: int, facts: Facts) -> tuple[int, Facts]:
    return length, (*facts, (LENGTHS, f"no {what}=, compared"))


def _exchange(group: Group, device: torch.device, length: int, facts: Facts, described: Facts) -> list[int]:
    """Returns the ranks' lengths if all have the same facts.

    Lengths and a digest of `facts` are sent by messages (`runtime.messages`) over gloo, otherwise by a
    collective. If digests differ, the facts `described` are compared and reported. In debug mode `facts` are
    compared first.
    """
    if checking():
        _compare(group, dict(facts))
    on_host, words = "cpu" in group.device_types, (length, _digest(facts))
    if on_host and group.has_gloo:
        received = exchange(group, struct.pack("2q", *words), facts[0][1])
        everyone = list(struct.iter_unpack("2q", received))
    else:
        local = torch.tensor(words, dtype=torch.int64, device=torch.device("cpu") if on_host else device)
        gathered = local.repeat(group.size, 1)
        group.all_gather(gathered, local)
        everyone = gathered.tolist()
    lengths, digests = zip(*everyone, strict=True)
    if len(set(digests)) > 1:
        _raise_difference(group, described)
    return list(lengths)


def _raise_difference(group: Group, facts: Facts) -> None:
    _compare(group, dict(facts))
    raise AssertionError("equal facts with different digests")


@lru_cache(maxsize=1024)
def _digest(facts: Facts) -> int:
    """Returns a 64-bit digest of facts, the same in every process."""
    text = repr(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
