"""Special registers (PTX ISA 10): properties of a warp, its launch and the clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.window import SMEM_BASE
from cute_emulator.numbers.lanes import FULL, LANE_IDS

if TYPE_CHECKING:
    from cute_emulator.machine.warp import Warp


def special(warp: Warp, name: str) -> Any:
    """Returns the value of a special register, of all lanes or by lane.

    Raises:
        EmulatorError: The register is not modelled.
    """
    if name not in SPECIAL:
        raise EmulatorError(f"special register {name} is not modelled")
    return SPECIAL[name](warp)


def _dim(get: Callable[[Warp], tuple[int, int, int]]) -> list[Callable[[Warp], int]]:
    return [lambda w, n=n: get(w)[n] for n in range(3)]  # type: ignore[misc]


def _cluster_counts(w: Warp) -> tuple[int, int, int]:
    (gx, gy, gz), (cx, cy, cz) = w.grid.launch.grid, w.grid.launch.cluster
    return gx // cx, gy // cy, gz // cz


def _cluster_id(w: Warp) -> tuple[int, int, int]:
    (x, y, z), (cx, cy, cz) = w.cta.cluster.first, w.grid.launch.cluster
    return x // cx, y // cy, z // cz


def _in_cluster(w: Warp) -> tuple[int, int, int]:
    (x, y, z), (fx, fy, fz) = w.cta.ctaid, w.cta.cluster.first
    return x - fx, y - fy, z - fz


_MASKS = {
    "eq": lambda n: 1 << n, "lt": lambda n: (1 << n) - 1, "le": lambda n: (2 << n) - 1,
    "gt": lambda n: FULL & ~((2 << n) - 1), "ge": lambda n: FULL & ~((1 << n) - 1),
}  # fmt: skip

SPECIAL: dict[str, Callable[[Warp], Any]] = {
    "%laneid": lambda w: LANE_IDS,
    "%warpid": lambda w: w.index,
    "%nwarpid": lambda w: len(w.cta.warps),
    "%smid": lambda w: w.cta.sm,
    "%nsmid": lambda w: w.grid.residency.num_sms,
    "%gridid": lambda w: w.grid.number,
    "%cluster_ctarank": lambda w: w.cta.rank_in_cluster,
    "%cluster_nctarank": lambda w: w.cta.cluster.size,
    "%is_explicit_cluster": lambda w: w.cta.cluster.size > 1,
    "%dynamic_smem_size": lambda w: w.grid.launch.dynamic_smem,
    "%total_smem_size": lambda w: w.grid.smem_bytes - SMEM_BASE,
    "%clock": lambda w: w.grid.scheduler.read_clock(w) & 0xFFFFFFFF,
    "%clock64": lambda w: w.grid.scheduler.read_clock(w),
    "%clock_hi": lambda w: w.grid.scheduler.read_clock(w) >> 32,
    "%globaltimer": lambda w: w.grid.scheduler.read_clock(w),
    "%globaltimer_lo": lambda w: w.grid.scheduler.read_clock(w) & 0xFFFFFFFF,
    "%globaltimer_hi": lambda w: w.grid.scheduler.read_clock(w) >> 32,
    "WARP_SZ": lambda w: 32,
}
for _n, _axis in enumerate("xyz"):
    SPECIAL[f"%tid.{_axis}"] = lambda w, n=_n: w.tid[n]  # type: ignore[misc]
    for _name, _get in {
        "%ntid": lambda w: w.grid.launch.block,
        "%ctaid": lambda w: w.cta.ctaid,
        "%nctaid": lambda w: w.grid.launch.grid,
        "%clusterid": _cluster_id,
        "%nclusterid": _cluster_counts,
        "%cluster_ctaid": _in_cluster,
        "%cluster_nctaid": lambda w: w.grid.launch.cluster,
    }.items():
        SPECIAL[f"{_name}.{_axis}"] = _dim(_get)[_n]
for _name, _rule in _MASKS.items():
    _table = np.array([_rule(n) for n in range(32)], np.uint32)
    SPECIAL[f"%lanemask_{_name}"] = lambda w, t=_table: t  # type: ignore[misc]
