"""Lagged publication: when may a tile be announced whose bulk stores one thread issued?

A tile is ``subtiles`` bulk groups of one thread. The thread never stops after a tile to wait for its stores;
after every commit it executes one full ``cp.async.bulk.wait_group inflight`` (PTX ISA: without ``.read`` it
waits until the writes are made visible to the executing thread). So when ``g`` groups are committed, the
first ``g - inflight`` are written, and a tile may be published as soon as its last group is among them:

    commit      | t,0 | t,1 | t,2 | t,3 | t+1,0 | t+1,1 | ...        subtiles = 4, inflight = 2
    written     |     |     | t,0 | t,1 | t,2   | t,3   |
    publish     |     |     |     |     |       |  t    |            after subtile 1 of tile t+1

``wait_group.read`` must not take the place of the full wait: it only says that shared memory was read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaggedPublication:
    """At which commit a tile's stores are known to be written.

    Attributes:
        subtiles: bulk groups per tile, at least 1.
        inflight: groups the full wait after each commit leaves pending, at least 0.
    """

    subtiles: int
    inflight: int

    def __post_init__(self) -> None:
        """Raises ValueError for counts that name no point."""
        if self.subtiles < 1 or self.inflight < 0:
            raise ValueError(
                f"subtiles={self.subtiles} must be at least 1 and inflight={self.inflight} at least 0"
            )

    @property
    def subtile(self) -> int:
        """After committing this subtile of some tile ``t``, tile ``t - lag`` is written."""
        return (self.inflight - 1) % self.subtiles

    @property
    def lag(self) -> int:
        """Tiles between the one being committed and the one published; as many are left for the flush."""
        return -(-self.inflight // self.subtiles)
