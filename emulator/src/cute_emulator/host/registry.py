"""Registry of host memory that the machine may access, with reference counts: call arguments overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cute_emulator.machine.memory import GlobalMemory

ARGUMENT = "argument"
"""Name, in reports, of memory that is registered as an argument of a call."""


@dataclass
class _Range:
    base: int
    end: int
    holds: set[int]


@dataclass
class Registry:
    """Reference counts of byte ranges; memory is registered with the machine while its count is positive.

    Overlapping ranges (a tensor and a slice of it) are one allocation while any of them is held.

    Attributes:
        memory: Memory of the machine.
    """

    memory: GlobalMemory
    _ranges: list[_Range] = field(default_factory=list)
    _next: int = 0
    _alive: list[Any] = field(default_factory=list)

    def hold(self, address: int, nbytes: int, rank: int, name: str) -> int:
        """Lets kernels access a range until `release` of the returned key."""
        key, self._next = self._next, self._next + 1
        if self.memory.is_multicast(address):
            return key
        known = self.memory.lookup(address)
        if known is not None and known.kind == "symmetric" and address + nbytes <= known.end:
            return key
        end = address + nbytes
        touching = [r for r in self._ranges if r.base < end and address < r.end]
        if len(touching) == 1 and touching[0].base <= address and end <= touching[0].end:
            touching[0].holds.add(key)
            return key
        merged = _Range(address, end, {key})
        for old in touching:
            merged.base, merged.end = min(merged.base, old.base), max(merged.end, old.end)
            merged.holds |= old.holds
            self.memory.unregister(old.base)
            self._ranges.remove(old)
        self.memory.register(merged.base, merged.end - merged.base, rank, name)
        self._ranges.append(merged)
        return key

    def release(self, keys: Iterable[int]) -> None:
        """Releases keys; memory without a remaining key is unregistered from the machine."""
        gone = set(keys)
        for item in [r for r in self._ranges if r.holds & gone]:
            item.holds -= gone
            if not item.holds:
                allocation = self.memory.find(item.base, 1)
                if allocation.name == ARGUMENT:  # the host may still use it, kernels may not
                    allocation.name = f"{ARGUMENT} of an earlier call"
                self.memory.unregister(item.base)
                self._ranges.remove(item)

    def keep_alive(self, owner: Any) -> None:
        """Keeps a reference to the owner of held memory."""
        self._alive.append(owner)
