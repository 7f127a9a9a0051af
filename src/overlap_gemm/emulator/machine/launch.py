"""What the host hands to the machine: one kernel launch of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        ptx: Text of the PTX module.
        entry: Name of the `.entry` to run.
        grid: Number of CTAs along x, y, z (of CTAs, not of clusters).
        block: Threads of a CTA along x, y, z.
        cluster: CTAs of a cluster along x, y, z.
        dynamic_smem: Bytes of dynamic shared memory of a CTA.
        params: One blob per kernel parameter, each as long as `entry_params` says.
        rank: The rank that launches.
        stream: Launches of one (rank, stream) run one after the other, in order of submission.
        cooperative: Every CTA of the grid must be resident at once.
        programmatic: Programmatic dependent launch: may start before its predecessor in the stream ended.
        const_image: Initial bytes of `.const` symbols of this rank (NVSHMEM's device state).
    """

    ptx: str
    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    params: tuple[bytes, ...] = ()
    rank: int = 0
    stream: int = 0
    cooperative: bool = False
    programmatic: bool = False
    const_image: Mapping[str, bytes] = field(default_factory=dict)
