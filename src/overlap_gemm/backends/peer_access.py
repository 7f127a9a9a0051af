"""Peer access between the GPUs of a group, probed once, at the first call that depends on it.

The ranks exchange facts of their GPUs, then try to map each other's memory. All ranks store the same result,
because the choice of `auto` must be the same on all ranks. The probe is collective.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

import torch

from ..config.arch import arch_of_capability
from ..runtime.agree import differences, gather
from ..runtime.executor import why_no_cuda
from ..runtime.group import Group
from ..runtime.memory.symmetric import TorchSymmetric
from ..runtime.order import forbid_capture
from ..runtime.peers import reserved_sms
from ..tuning.machine import machine_for, why_uncalibrated

PROBE_BYTES = 16


@dataclass(frozen=True)
class PeerAccess:
    """Facts of the ranks' GPUs and their peer access; the same on all ranks.

    Attributes:
        arch: Architecture that kernels are compiled for; empty if our kernels do not run on all ranks.
        num_sms: SMs that kernels may use on every rank, less ``OVERLAP_GEMM_RESERVE_SMS``. The reserve of a
            call (`configured`, ``reserve_sms=``) may differ between ranks, so no choice reads it.
        why_not: Reason the ranks cannot store to each other's memory; None if they can.
        uncalibrated: Reason times of fused kernels are unknown (`tuning.machine.why_uncalibrated`), or None.
    """

    arch: str
    num_sms: int
    why_not: str | None
    uncalibrated: str | None = None


@dataclass(frozen=True)
class Device:
    """Facts of one rank's GPU, which the ranks exchange.

    Attributes:
        why_not: Reason fused kernels do not run on this GPU; None if they do.
        arch: Architecture that kernels are compiled for.
        num_sms: Number of SMs, less those reserved by the environment.
        constants: `Machine.digest` of the constants of the time model; empty if there are none.
        host: Name of the host.
        uuid: UUID of the GPU.
        uncalibrated: Reason the times of fused kernels are unknown, as in `PeerAccess`.
    """

    why_not: str | None
    arch: str
    num_sms: int
    constants: str
    host: str
    uuid: str
    uncalibrated: str | None = None


_known: dict[tuple[str, torch.device], tuple[ReferenceType[Group], PeerAccess]] = {}


def peer_access_of(group: Group, device: torch.device) -> PeerAccess:
    """Returns the facts of a group's GPUs. The first call for a group and device is collective.

    Args:
        group: Ranks that take part.
        device: CUDA device of this rank.

    Raises:
        CaptureError: The facts are not known yet, and a CUDA graph is being captured.
    """
    known = _known.get((group.name, device))
    if known is None or known[0]() is not group:
        known = _known[group.name, device] = (ref(group), _probe(group, device))
    return known[1]


def _probe(group: Group, device: torch.device) -> PeerAccess:
    """Returns the facts of a group's GPUs by exchange and by a trial allocation; collective."""
    if group.size == 1:
        return PeerAccess("", 0, "one rank has nothing to transfer")
    forbid_capture(device, f"the peer access between the ranks of group {group.name!r} cannot be probed")
    everyone = gather(group, "comparing the ranks' GPUs", lambda: this_device(device))
    access = compare(group, everyone)
    if access.why_not is not None:
        return access
    failures = gather(group, "probing peer access", lambda: _why_no_access(device, everyone))
    if not any(failures):
        # Mapping a few bytes verifies the peer access that the driver reports.
        try:
            TorchSymmetric(group, PROBE_BYTES, device).close()
            failures = group.all_gather_object(None)
        except Exception as error:  # all ranks must store the same result, whatever the error is
            failures = group.all_gather_object(f"{type(error).__name__}: {error}")
    failed = [f"rank {group.global_rank(rank)}: {why}" for rank, why in enumerate(failures) if why]
    why_not = (
        f"not all ranks have P2P access to each other's memory ({'; '.join(failed)})" if failed else None
    )
    return replace(access, why_not=why_not)


def this_device(device: torch.device) -> Device:
    """Returns the facts of this rank's GPU, for the other ranks."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    known = arch_of_capability((properties.major, properties.minor))
    arch = known.name if known else ""
    machine = machine_for(arch, properties.name) if arch else None
    why_not, usable = why_no_cuda(index), properties.multi_processor_count
    try:
        usable -= reserved_sms()
        short = None if usable > 0 else f"OVERLAP_GEMM_RESERVE_SMS={reserved_sms()} leaves no SM"
    except ValueError as error:  # the other ranks are waiting for this rank's facts
        short = str(error)
    return Device(
        why_not or short,
        arch,
        usable,
        "" if machine is None else machine.digest,
        socket.gethostname(),
        str(properties.uuid),
        why_uncalibrated(arch, properties.name) if arch else None,
    )


def compare(group: Group, everyone: Sequence[Device]) -> PeerAccess:
    """Returns the common facts of the ranks' GPUs, before peers' memory is mapped.

    Args:
        group: Ranks that take part.
        everyone: Facts of each rank's GPU, in rank order.
    """
    num_sms = min(device.num_sms for device in everyone)
    if unfit := next(((r, device.why_not) for r, device in enumerate(everyone) if device.why_not), None):
        return PeerAccess("", 0, f"rank {group.global_rank(unfit[0])}: {unfit[1]}")
    for fact, what in (("arch", "architectures"), ("constants", "constants of their machines")):
        if views := differences(group, [getattr(device, fact) for device in everyone]):
            return PeerAccess("", 0, f"the ranks have different {what}: {views}")
    arch = everyone[0].arch
    if views := differences(group, [device.host for device in everyone]):
        return PeerAccess(arch, num_sms, f"the ranks are on different hosts: {views}")
    return PeerAccess(
        arch, num_sms, None, next((device.uncalibrated for device in everyone if device.uncalibrated), None)
    )


def _why_no_access(device: torch.device, everyone: Sequence[Device]) -> str | None:
    """Returns a message that names the visible devices without peer access; None if there are none."""
    ours = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    local = torch.cuda.current_device() if device.index is None else device.index
    visible = [ours[peer.uuid] for peer in everyone if peer.uuid in ours]
    apart = [peer for peer in visible if peer != local and not torch.cuda.can_device_access_peer(local, peer)]
    return f"device {local} cannot access device {' '.join(map(str, apart))}" if apart else None
