"""Groups that poll memory, by the 16-byte granules that they poll, and their wake-up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cute_emulator.machine.lane_plan import granules_of
from cute_emulator.numbers.lanes import FULL, lane_array


def granules(address: Any, mask: int, size: int) -> Iterable[int]:
    """Returns the 16-byte granules that an access touches, in the order of its lanes."""
    if address.__class__ is int:
        return range(address >> 4, (address + size + 15) >> 4)
    return granules_of(address if mask == FULL else address[lane_array(mask)], size)


def notify(watch: dict[int, list[Any]], touched: Iterable[int]) -> None:
    """Wakes groups that poll any of these granules."""
    for granule in touched:
        for group in watch.pop(granule, ()):
            group.polls.clear()
            group.wake()
