"""A rank's state of a group on one device: executor, agreed limits, shared memory.

The ranks agree once, at the group's first fused call, on the architecture, the model's constants, the number
of usable SMs, and the timeout. The first three determine a kernel's configuration, and with it the layout of
shared memory. Ranks with different layouts would read wrong tiles; a GPU partitioned by MIG or a green
context, for example, has fewer SMs than its neighbour.
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
"""Timeout of virtual ranks, 30 s; a process group has its own timeout."""


@dataclass(frozen=True)
class Agreed:
    """Values that are equal on all ranks.

    Attributes:
        arch: Architecture that kernels are compiled for; the ranks' values must be equal.
        constants: Digest of all other inputs of the choice of configurations; the ranks' values must be
            equal.
        num_sms: SMs that every rank's kernels may fill: the minimum over the ranks.
        timeout_ns: Nanoseconds that a kernel waits for a peer: the maximum over the ranks. 0 means for ever,
            on all ranks, if it is the value of any rank.
    """

    arch: str
    constants: str
    num_sms: int
    timeout_ns: int


@dataclass
class Peers:
    """State of one rank of a group on one device.

    Attributes:
        group: Group of the ranks.
        executor: Executor that runs this rank's kernels.
        agreed: Values that are equal on all ranks.
        reserve_sms: SMs of this rank that kernels leave free, unless a call passes another number.
        workspaces: Memory shared by the ranks, by the size class of the calls that use it.
        plans: Prepared calls, by call signature.
        prepared: Keys of `prepare` on which the ranks have agreed.
        lock: Held while an object that calls share is made. The ranks make it together, so each makes it
            once.
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
        """Returns this rank's result of an attempt; the first attempt with a key is made by `together`.

        Later attempts with the key are local, because peers may make none: the strides of their operands may
        differ from this rank's. Attempts during the capture of a CUDA graph are local, too.

        Args:
            key: Kind of the attempt; it depends only on values that all ranks have, so that all make the
                first one at the same call.
            what: Name of the attempt in the error.
            attempt: Function that may raise and must not communicate.

        Raises:
            DisagreementError: On every rank, with the failed ranks and the reasons.
        """
        if key in self.prepared:
            return attempt()
        capturing = is_capturing(self.executor.device)
        result = attempt() if capturing else together(self.group, what, attempt)
        self.prepared.add(key)
        return result

    def holds(self, group: Group) -> bool:
        """Returns whether this state is valid for ``group``.

        A later process group may have the name of a destroyed one, and an emulator may have been closed.
        """
        return self.group.process_group is group.process_group and self.executor.is_open


_lock = threading.Lock()
_peers: dict[tuple[str, torch.device], Peers] = {}
orphaned: list[Workspace] = []
"""Workspaces of destroyed groups: no `close_workspaces` freed them before.

No call uses them, but their memory is not freed: peers or a graph may still store into it. They count for the
limit.
"""


def peers_of(group: Group, device: torch.device, constants: Callable[[str], str]) -> Peers:
    """Returns the rank's state of ``group`` on ``device``. The first call per group and device is collective.

    Args:
        group: Group of the ranks.
        device: Device of this rank's tensors.
        constants: Function that returns `Agreed.constants` of an architecture.

    Raises:
        DisagreementError: On every rank, if the ranks cannot agree. If all fail alike, each raises its own
            exception.
        CaptureError: The first call is made during CUDA graph capture.
    """
    key = (group.name, device)
    peers = _peers.get(key)
    if peers is not None and peers.holds(group):
        return peers
    forbid_capture(device, "ranks cannot agree on their first fused call")
    with _lock:
        peers = _peers.get(key)
        if peers is None or not peers.holds(group):
            if peers is not None and peers.executor.is_open:
                orphan(peers)
            peers = _peers[key] = _agree(group, device, constants)
        return peers


def local_peers(name: str | None = None) -> list[Peers]:
    """Returns the states of the group called ``name``, or of all groups, one per device."""
    return [peers for (group, _), peers in _peers.items() if name in (None, group)]


def orphan(peers: Peers) -> None:
    """Moves the workspaces of a state to `orphaned`."""
    orphaned.extend(dict.fromkeys(peers.workspaces.values()))
    peers.workspaces = {}


def remove_peers(peers: Peers) -> None:
    """Removes a state that has no workspaces; the ranks agree again at the next fused call."""
    for key in [key for key, known in _peers.items() if known is peers]:
        del _peers[key]


def executor_for(group: Group, device: torch.device) -> Executor:
    """Returns a rank's executor: of its virtual world, of its CUDA device, or of the open emulator."""
    if (virtual := virtual_ranks(group)) is not None:
        return virtual.executor(group.rank)
    if device.type == "cuda":
        return cuda_executor(torch.cuda.current_device() if device.index is None else device.index)
    assert executors.emulation is not None, "why_not excludes a CPU without an emulator"
    return executors.emulation.executor()


def _agree(group: Group, device: torch.device, constants: Callable[[str], str]) -> Peers:
    """Returns this rank's state in a group, with what all ranks have in common; collective."""
    if (virtual := virtual_ranks(group)) is not None:
        reserve = reserved_sms()
        everyone = [
            _proposal(group, virtual.executor(rank), reserve, constants) for rank in range(group.size)
        ]
        return Peers(group, virtual.executor(group.rank), merge_proposals(group, everyone), reserve)
    local: list[tuple[Executor, int]] = []

    def propose() -> Agreed:
        executor, reserve = executor_for(group, device), reserved_sms()
        local.append((executor, reserve))
        return _proposal(group, executor, reserve, constants)

    everyone = gather(group, "preparing the first fused call", propose)
    executor, reserve = local[0]
    return Peers(group, executor, merge_proposals(group, everyone), reserve)


def merge_proposals(group: Group, everyone: Sequence[Agreed]) -> Agreed:
    """Returns the values for all ranks, from the ranks' proposals in rank order.

    Raises:
        DisagreementError: The architectures or constants differ.
    """
    for what, theirs in (
        ("architectures", [each.arch for each in everyone]),
        (
            "constants of the model (overlap-gemm tune, OVERLAP_GEMM_MACHINE)",
            [each.constants for each in everyone],
        ),
    ):
        if views := differences(group, theirs):
            raise DisagreementError(
                f"the ranks of a fused call must run the same kernel, but have different {what}: {views}"
            )
    bounds, first = [each.timeout_ns for each in everyone], everyone[0]
    timeout = 0 if 0 in bounds else max(bounds)
    return Agreed(first.arch, first.constants, min(each.num_sms for each in everyone), timeout)


def _proposal(group: Group, executor: Executor, reserve: int, constants: Callable[[str], str]) -> Agreed:
    """Returns the facts of one rank, of which `merge_proposals` makes the common ones."""
    usable = executor.num_sms - reserve
    if usable < 1:
        raise ValueError(
            f"OVERLAP_GEMM_RESERVE_SMS={reserve} must be less than the {executor.num_sms} SMs of "
            f"{executor.device}"
        )
    return Agreed(executor.arch, constants(executor.arch), usable, timeout_ns(group, executor.device))


def timeout_ns(group: Group, device: torch.device) -> int:
    """Returns how long a kernel waits for a peer, in nanoseconds; 0 for ever.

    It is ``OVERLAP_GEMM_TIMEOUT`` (seconds), otherwise the process group's timeout on that device, for
    virtual ranks `DEFAULT_TIMEOUT`. It is read at the group's first fused call on a device, and again at the
    first one after `close_workspaces`.

    Raises:
        ValueError: The variable is not a number of seconds.
    """
    configured = environment.seconds("OVERLAP_GEMM_TIMEOUT")
    if configured is None:
        of_group = group.timeout(device.type)
        return (DEFAULT_TIMEOUT if of_group is None else of_group) // timedelta(microseconds=1) * 1000
    return max(int(configured * 1e9), 1 if configured else 0)


def reserved_sms() -> int:
    """Returns the number of SMs that kernels leave free, ``OVERLAP_GEMM_RESERVE_SMS``; 0 if it is not set.

    Raises:
        ValueError: The variable is not a number of SMs.
    """
    return environment.count("OVERLAP_GEMM_RESERVE_SMS", "SMs")
