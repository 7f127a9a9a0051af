"""A rank's side of a group: where its kernels run, what all ranks agreed on, what they share.

Ranks agree once, at the group's first fused call: on the architecture, on the model's constants, on how many
SMs a kernel may count on and on how long it waits. The configuration of a kernel, and with it the layout of
the memory that ranks share, follows from the first three, so ranks that each took their own would read each
other's tiles wrongly: a GPU cut by MIG or a green context has fewer SMs than its neighbour.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .agree import DisagreementError
from .executor import Executor, cuda_executor, emulator_executor, open_emulator
from .group import Group
from .order import forbid_capture
from .virtual import virtual_world

if TYPE_CHECKING:
    from .workspace import SizeClass, Workspace

DEFAULT_TIMEOUT = timedelta(seconds=30)
"""How long virtual ranks wait for each other; a process group has a time-out of its own."""


@dataclass(frozen=True)
class Terms:
    """What ranks must agree on.

    Attributes:
        arch: what kernels are compiled for; the same on all ranks.
        constants: a digest of what else configurations are chosen by; the same on all ranks.
        num_sms: SMs that every rank's kernels may fill: the fewest of any rank.
        timeout_ns: how long a kernel waits for a peer, 0 for ever: the longest of any rank.
    """

    arch: str
    constants: str
    num_sms: int
    timeout_ns: int


@dataclass
class Peers:
    """A rank's side of a group on one device.

    Attributes:
        group: the ranks.
        executor: where this rank's kernels run.
        agreed: what holds on all ranks.
        reserve_sms: SMs of this rank that kernels leave to others, unless a call says otherwise.
        workspaces: the memory the ranks share, by the size class of the calls that use it.
        plans: what earlier calls prepared for those like them, by what tells calls apart.
        lock: held while something is made that calls share; ranks make it together, so each must once.
    """

    group: Group
    executor: Executor
    agreed: Terms
    reserve_sms: int
    workspaces: dict[SizeClass, Workspace] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def holds(self, group: Group) -> bool:
        """Whether this is about ``group``: names come again after a process group's or emulator's end."""
        return self.group.process_group is group.process_group and self.executor.is_open


_lock = threading.Lock()
_peers: dict[tuple[str, torch.device], Peers] = {}
left_behind: list[Workspace] = []
"""Of groups that ended without `close_workspaces`, or with captured calls. No call uses them, but their
memory stays: a graph may still store into it."""

__per_process__ = {"_lock": threading.Lock, "_peers": dict, "left_behind": list}


def peers_of(group: Group, device: torch.device, constants: Callable[[str], str]) -> Peers:
    """The rank's side of ``group`` on ``device``; at its first use the ranks agree, which is collective.

    Args:
        group: the ranks.
        device: where this one's tensors are.
        constants: an architecture's `Terms.constants`.

    Raises:
        DisagreementError: on every rank, if they cannot.
        ValueError: a variable of this rank's environment holds no number.
        CaptureError: it is the first use, during CUDA graph capture.
    """
    key = (group.name, device)
    peers = _peers.get(key)
    if peers is not None and peers.holds(group):
        return peers
    forbid_capture(device, "the ranks cannot agree")
    with _lock:
        peers = _peers.get(key)
        if peers is None or not peers.holds(group):
            if peers is not None and peers.executor.is_open:
                left_behind.extend(dict.fromkeys(peers.workspaces.values()))
            peers = _peers[key] = _meet(group, executor_for(group, device), constants)
        return peers


def sides(name: str | None = None) -> list[Peers]:
    """The sides of the group called ``name``, or all that there are."""
    return [peers for (group, _), peers in _peers.items() if name in (None, group)]


def forget(peers: Peers) -> None:
    """Drops a side that shares no memory any more; the ranks agree anew when it is needed again."""
    for key in [key for key, known in _peers.items() if known is peers]:
        del _peers[key]


def executor_for(group: Group, device: torch.device) -> Executor:
    """Where a rank's kernels run: with its virtual world, on its CUDA device, or in the open emulator."""
    if (world := virtual_world(group)) is not None:
        return world.executor(group.rank)
    if device.type == "cuda":
        return cuda_executor(torch.cuda.current_device() if device.index is None else device.index)
    emulator = open_emulator()
    assert emulator is not None, "why_not excludes a CPU without an emulator"
    return emulator_executor(emulator, emulator.calling_rank())


def _meet(group: Group, executor: Executor, constants: Callable[[str], str]) -> Peers:
    reserve = reserved_sms()
    if (world := virtual_world(group)) is not None:
        everyone = [_own_terms(group, world.executor(rank), reserve, constants) for rank in range(group.size)]
        return Peers(group, executor, common(group, everyone), reserve)
    # A rank that fails here tells the others, who would otherwise wait for it.
    own: Terms | str
    failure: Exception | None = None
    try:
        own = _own_terms(group, executor, reserve, constants)
    except Exception as error:
        own, failure = f"{type(error).__name__}: {error}", error
    everyone = group.all_gather_object(own)
    if failure is not None:
        raise failure
    return Peers(group, executor, common(group, everyone), reserve)


def common(group: Group, everyone: Sequence[Terms | str]) -> Terms:
    """What the ranks' own terms come to.

    Args:
        group: the ranks.
        everyone: in rank order; of a rank that could not find out, why.

    Raises:
        DisagreementError: there is such a rank, or they have different architectures.
    """
    terms = [own for own in everyone if isinstance(own, Terms)]
    if len(terms) < len(everyone):
        failed = [
            f"rank {group.global_rank(r)}: {why}" for r, why in enumerate(everyone) if isinstance(why, str)
        ]
        raise DisagreementError(f"fused calls failed before the first one began on {'; '.join(failed)}")
    for what, theirs in (
        ("architectures", [own.arch for own in terms]),
        (
            "constants of the model (overlap-gemm tune, OVERLAP_GEMM_MACHINE)",
            [own.constants for own in terms],
        ),
    ):
        if len(set(theirs)) > 1:
            views = ", ".join(f"rank {group.global_rank(r)} has {own}" for r, own in enumerate(theirs))
            raise DisagreementError(
                f"the ranks of a fused call must run the same kernel, and have different {what}: {views}"
            )
    bounds = [own.timeout_ns for own in terms]
    timeout = 0 if 0 in bounds else max(bounds)
    return Terms(terms[0].arch, terms[0].constants, min(own.num_sms for own in terms), timeout)


def _own_terms(group: Group, executor: Executor, reserve: int, constants: Callable[[str], str]) -> Terms:
    usable = executor.num_sms - reserve
    if usable < 1:
        raise ValueError(
            f"OVERLAP_GEMM_RESERVE_SMS={reserve} leaves no SM: a kernel on {executor.device} may fill "
            f"{executor.num_sms}"
        )
    return Terms(executor.arch, constants(executor.arch), usable, timeout_ns(group, executor.device))


def timeout_ns(group: Group, device: torch.device) -> int:
    """How long a kernel waits for a peer, in nanoseconds; 0 for ever.

    ``OVERLAP_GEMM_TIMEOUT`` (seconds), else the process group's own time-out on that device.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    text = os.environ.get("OVERLAP_GEMM_TIMEOUT")
    if text is None:
        own = group.timeout(device.type)
        return (DEFAULT_TIMEOUT if own is None else own) // timedelta(microseconds=1) * 1000
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 2**32:
        raise ValueError(f"OVERLAP_GEMM_TIMEOUT must be a number of seconds, 0 for no limit; got {text!r}")
    return int(seconds * 1e9)


def reserved_sms() -> int:
    """SMs that kernels leave to others, by ``OVERLAP_GEMM_RESERVE_SMS``; 0 without it.

    Raises:
        ValueError: the variable is not a number of SMs.
    """
    text = os.environ.get("OVERLAP_GEMM_RESERVE_SMS", "0")
    if not text.isdecimal():
        raise ValueError(f"OVERLAP_GEMM_RESERVE_SMS must be a number of SMs, got {text!r}")
    return int(text)
