"""Consecutive stores to shared memory, executed as one: an epilogue has four in a row."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.machine.lane_order import LaneStore
from cute_emulator.machine.lane_plan import LanePlan, lane_plan
from cute_emulator.numbers.lanes import FULL, LANES

if TYPE_CHECKING:
    from cute_emulator.machine.access import Access
    from cute_emulator.machine.warp import Group


@lru_cache(maxsize=1024)
def _plans(addresses: bytes, base: int, row_shift: int) -> tuple[LanePlan, list[LanePlan]]:
    """Returns the plan of all lanes of several stores, and of each."""
    size = 4 * LANES
    each = [addresses[at : at + size] for at in range(0, len(addresses), size)]
    return lane_plan(addresses, base, row_shift), [lane_plan(part, base, row_shift) for part in each]


def store_run(
    group: Group, accesses: list[Access], addresses: tuple[Any, ...], values: tuple[tuple[Any, ...], ...]
) -> bool:
    """Executes ordinary stores of 16 bytes per lane, by all lanes, to their CTA's shared memory.

    Args:
        group: Group that stores.
        accesses: Store instructions.
        addresses: Address of each store, by lane.
        values: Four registers of each store.

    Returns:
        False if the stores have another form, or if there may be something to report: then nothing was
        executed.
    """
    registers = [v for each in values for v in each]
    cta, first = group.warp.cta, accesses[0]
    shared = cta.grid.checks.shared
    if (
        group.mask != FULL
        or cta.cluster.watch
        or {*map(type, registers), *map(type, addresses)} != {np.ndarray}
    ):
        return False
    if any(a.dtype != np.uint32 for a in addresses):
        return False
    plan, each = _plans(np.concatenate(addresses).tobytes(), cta.base, first.row_shift)
    if not plan.aligned or plan.highest >> first.row_shift >= len(cta.chunks):
        return False
    agent = group.warp.agent
    if shared is not None:
        if not shared.stores(agent, cta, [access.line for access in accesses], plan, first.size):
            return False
        for access, part in zip(accesses, each, strict=True):
            end = part.highest + first.size
            at = part.offsets, part.lowest, end
            group.warp.unsynced.add(LaneStore(group.warp, cta, FULL, *at, first.size, access.line))
    rows = np.concatenate(registers).reshape(len(accesses), -1, LANES).transpose(0, 2, 1)
    cta.chunks[plan.rows] = rows.reshape(-1).view(np.complex128)
    agent.touched = True
    group.effects += len(accesses)
    cta.mark_stored(plan.chunks, plan.lowest, plan.highest, agent.epoch)
    return True
