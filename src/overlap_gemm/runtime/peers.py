"""A rank's side of a group: where its kernels run, what all ranks agreed on, what they share.

Ranks agree once, at the group's first fused call: on the architecture, on the model's constants, on how many
SMs a kernel may count on and on how long it waits. The configuration of a kernel, and with it the layout of
the memory that ranks share, follows from the first three, so ranks that each took their own would read each
other's tiles wrongly: a GPU cut by MIG or a green context has fewer SMs than its neighbour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import environment
from . import executor as executors
from .agree import DisagreementError, differences, gather, together
from .executor import Executor, cuda_executor
from .group import Group
from .memory.virtual_ranks import virtual_ranks
from .order import forbid_capture, is_capturing

if TYPE_CHECKING:
    from .memory.workspace import SizeClass, Workspace

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(seconds=30)
"""How long virtual ranks wait for each other; a process group has a time-out of its own."""


@dataclass(frozen=True)
class Agreed:
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
        prepared: what the ranks have prepared together (`prepare`).
        lock: held while something is made that calls share; ranks make it together, so each must once.
    """

    group: Group
    executor: Executor
    agreed: Agreed
    reserve_sms: int
    workspaces: dict[SizeClass, Workspace] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    prepared: set[Hashable] = field(default_factory=set, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def prepare(self, key: Hashable, what: str, attempt: Callable[[], T]) -> T:
        """This rank's result of an attempt; where the ranks make the first one of its kind, of `together`.

        Later ones are this rank's affair: its operands may lie otherwise than those of its peers, who do not
        ask again. Nor do ranks ask while a CUDA graph is captured.

        Args:
            key: its kind, which follows from what all ranks know; so they all come to the first one at once.
            what: names the attempt in the error.
            attempt: may raise; must not communicate.

        Raises:
            DisagreementError: on every rank, with the ranks that failed and why.
        """
        if key in self.prepared:
            return attempt()
        capturing = is_capturing(self.executor.device)
        result = attempt() if capturing else together(self.group, what, attempt)
        self.prepared.add(key)
        return result

    def holds(self, group: Group) -> bool:
        """Whether this is about ``group``: names come again after a process group's or emulator's end."""
        return self.group.process_group is group.process_group and self.executor.is_open


_lock = threading.Lock()
_peers: dict[tuple[str, torch.device], Peers] = {}
left_behind: list[Workspace] = []
"""Of groups that ended without `close_workspaces`, or with captured calls. No call uses them, but their
memory stays: a graph may still store into it."""


def peers_of(group: Group, device: torch.device, constants: Callable[[str], str]) -> Peers:
    """The rank's side of ``group`` on ``device``; at its first use the ranks agree, which is collective.

    Args:
        group: the ranks.
        device: where this one's tensors are.
        constants: an architecture's `Agreed.constants`.

    Raises:
        DisagreementError: on every rank, if they cannot; where all fail alike, what they failed with.
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
            peers = _peers[key] = _meet(group, device, constants)
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
    if (virtual := virtual_ranks(group)) is not None:
        return virtual.executor(group.rank)
    if device.type == "cuda":
        return cuda_executor(torch.cuda.current_device() if device.index is None else device.index)
    assert executors.emulation is not None, "why_not excludes a CPU without an emulator"
    return executors.emulation.executor()


def _meet(group: Group, device: torch.device, constants: Callable[[str], str]) -> Peers:
    if (virtual := virtual_ranks(group)) is not None:
        reserve = reserved_sms()
        everyone = [
            _own_terms(group, virtual.executor(rank), reserve, constants) for rank in range(group.size)
        ]
        return Peers(group, virtual.executor(group.rank), common(group, everyone), reserve)
    found: list[tuple[Executor, int]] = []

    def own_terms() -> Agreed:
        executor, reserve = executor_for(group, device), reserved_sms()
        found.append((executor, reserve))
        return _own_terms(group, executor, reserve, constants)

    everyone = gather(group, "preparing the first fused call", own_terms)
    executor, reserve = found[0]
    return Peers(group, executor, common(group, everyone), reserve)


def common(group: Group, everyone: Sequence[Agreed]) -> Agreed:
    """What the ranks' own terms, in rank order, come to.

    Raises:
        DisagreementError: they have different architectures or constants.
    """
    for what, theirs in (
        ("architectures", [own.arch for own in everyone]),
        (
            "constants of the model (overlap-gemm tune, OVERLAP_GEMM_MACHINE)",
            [own.constants for own in everyone],
        ),
    ):
        if views := differences(group, theirs):
            raise DisagreementError(
                f"the ranks of a fused call must run the same kernel, and have different {what}: {views}"
            )
    bounds, first = [own.timeout_ns for own in everyone], everyone[0]
    timeout = 0 if 0 in bounds else max(bounds)
    return Agreed(first.arch, first.constants, min(own.num_sms for own in everyone), timeout)


def _own_terms(group: Group, executor: Executor, reserve: int, constants: Callable[[str], str]) -> Agreed:
    usable = executor.num_sms - reserve
    if usable < 1:
        raise ValueError(
            f"OVERLAP_GEMM_RESERVE_SMS={reserve} leaves no SM: a kernel on {executor.device} may fill "
            f"{executor.num_sms}"
        )
    return Agreed(executor.arch, constants(executor.arch), usable, timeout_ns(group, executor.device))


def timeout_ns(group: Group, device: torch.device) -> int:
    """How long a kernel waits for a peer, in nanoseconds; 0 for ever.

    ``OVERLAP_GEMM_TIMEOUT`` (seconds), else the process group's own time-out on that device.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    given = environment.seconds("OVERLAP_GEMM_TIMEOUT")
    if given is None:
        own = group.timeout(device.type)
        return (DEFAULT_TIMEOUT if own is None else own) // timedelta(microseconds=1) * 1000
    return int(given * 1e9)


def reserved_sms() -> int:
    """SMs that kernels leave to others, by ``OVERLAP_GEMM_RESERVE_SMS``; 0 without it.

    Raises:
        ValueError: the variable is not a number of SMs.
    """
    return environment.count("OVERLAP_GEMM_RESERVE_SMS", "SMs")
