"""Measurements of a group: those that rank 0 read from its file, and those made by the ranks since.

All ranks must choose alike, so only the file of rank 0 is read; files of other ranks may differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch

from ..runtime.agree import DisagreementError, differences, gather
from ..runtime.compile_cache import dsl_version, source_digest
from ..runtime.environment import choice, seconds
from ..runtime.group import Group
from ..spec import OpSpec
from ..spec.promises import NO_PROMISES, Promises
from ..tuning.measured import (
    AUTOTUNE_VARIABLE,
    POLICIES,
    Conditions,
    Entries,
    Measured,
    Policy,
    conditions,
    read,
)
from ..tuning.settings import settings

SECONDS_VARIABLE = "OVERLAP_GEMM_AUTOTUNE_SECONDS"

DEFAULT_SECONDS = 60.0
"""Default limit, 60 s, for compiling and starting the candidates of a kind; later ones are excluded."""


@dataclass
class GroupMeasurements:
    """Measurements of a group, the same on all its ranks.

    Attributes:
        under: Conditions on which the times depend (GPU, driver, versions), those of rank 0.
        policy: Policy of the environment or of `with_policy`; None if there is none.
        seconds: Limit in seconds for compiling and starting the candidates of a kind; 0: no limit.
        kinds: Measurement by `Problem.kind`. None means that calls of the kind already run by the time
            model's choice, which does not change while the group exists.
        refused: (kind, candidate) that ended a process, and are not tried again.
    """

    under: Conditions
    policy: Policy | None
    seconds: float
    kinds: dict[str, Measured | None] = field(default_factory=dict)
    refused: frozenset[tuple[str, str]] = frozenset()

    @contextmanager
    def with_policy(self, policy: Policy | None) -> Iterator[None]:
        """Sets the policy within the block, on every rank; None changes nothing."""
        before = self.policy
        self.policy = policy or before
        try:
            yield
        finally:
            self.policy = before


def uses_measurements(op: OpSpec, requested: str, group: Group, promises: Promises = NO_PROMISES) -> bool:
    """Returns whether measurements may determine the calls of an op in a group; the same on all ranks.

    They may if `requested` leaves a choice of backend or of fused kernel, and the settings (`configured`)
    name no kernel. The group must have several ranks and a process group. Calls with promises are not
    measured: they exclude kernels, and differ in bits from one kernel to another.

    Args:
        op: Definition of the op.
        requested: The caller's `backend=`.
        group: Group of the calls.
        promises: Promises of the calls.
    """
    is_open = requested.startswith("fused") or requested.endswith("auto")
    is_open &= promises == NO_PROMISES and not settings().names_kernels(op)
    return is_open and group.process_group is not None and group.size > 1


_stored: dict[tuple[str, int], tuple[ReferenceType[Group], GroupMeasurements]] = {}
"""Measurements by (group name, rank), because emulated ranks are threads of one process.

Those of a group that was destroyed stay until the next group.
"""


def all_measurements() -> list[GroupMeasurements]:
    """Returns the measurements of each group of this process."""
    return [stored for _, stored in _stored.values()]


def measurements_of(group: Group, device: torch.device) -> GroupMeasurements:
    """Returns the measurements of a group; its first call is collective and reads rank 0's file.

    Args:
        group: Ranks that take part.
        device: Device of this rank's tensors.

    Raises:
        DisagreementError: On every rank: an environment variable differs between ranks or is invalid on one,
            or rank 0 cannot read its file.
    """
    place = group.name, group.rank
    stored = _stored.get(place)
    if stored is None or stored[0]() is not group:
        for other, (owner, _) in list(_stored.items()):
            if owner() is None:
                _stored.pop(other, None)
        stored = _stored[place] = (ref(group), _read(group, device))
    return stored[1]


def _read(group: Group, device: torch.device) -> GroupMeasurements:
    """Returns the measurements of rank 0's file, and the common policy; collective."""

    def read_local() -> tuple[Policy | None, float, Conditions, Entries | None]:
        under = {**conditions(device, group.size), "dsl": dsl_version(), "kernels": source_digest()[:16]}
        entries = read(under) if group.rank == 0 else None
        return _policy(), _seconds(), under, entries

    everyone = gather(group, "reading measurements", read_local)
    for place, variable in ((0, AUTOTUNE_VARIABLE), (1, SECONDS_VARIABLE)):
        if views := differences(group, [theirs[place] for theirs in everyone]):
            raise DisagreementError(f"{variable} must be the same on all ranks, got {views}")
    policy, limit, under, entries = everyone[0]
    assert entries is not None
    kinds: Mapping[str, Measured | None] = entries.measured
    return GroupMeasurements(under, policy, limit, dict(kinds), entries.refused)


def _policy() -> Policy | None:
    if AUTOTUNE_VARIABLE not in os.environ:
        return None
    value = choice(AUTOTUNE_VARIABLE, POLICIES)
    return next(policy for policy in POLICIES if policy == value)


def _seconds() -> float:
    limit = seconds(SECONDS_VARIABLE)
    return DEFAULT_SECONDS if limit is None else limit
