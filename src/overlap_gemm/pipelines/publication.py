"""Lagged publication: the commit after which a tile, whose bulk stores one thread issued, may be signalled.

A tile is ``subtiles`` bulk groups of one thread. The thread never stops after a tile to wait for its stores.
After every commit it executes one full ``cp.async.bulk.wait_group inflight`` (PTX ISA: without ``.read`` it
waits until the writes are made visible to the executing thread). When ``g`` groups are committed, the first
``g - inflight`` are written. So a tile may be published as soon as its last group is among them. With
subtiles = 4 and inflight = 2, tile t is published after subtile 1 of tile t+1:

| commit  | t,0 | t,1 | t,2 | t,3 | t+1,0 | t+1,1 |
|---------|-----|-----|-----|-----|-------|-------|
| written |     |     | t,0 | t,1 | t,2   | t,3   |
| publish |     |     |     |     |       | t     |

``wait_group.read`` must not replace the full wait: it guarantees only that shared memory was read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaggedPublication:
    """The commit after which a tile's stores are written.

    Attributes:
        subtiles: Bulk groups per tile, at least 1.
        inflight: Groups the full wait after each commit leaves pending, at least 0.
    """

    subtiles: int
    inflight: int

    def __post_init__(self) -> None:
        """Raises ValueError for ``subtiles`` less than 1, or ``inflight`` less than 0."""
        if self.subtiles < 1 or self.inflight < 0:
            raise ValueError(
                f"subtiles={self.subtiles} must be at least 1 and inflight={self.inflight} at least 0"
            )

    @property
    def subtile(self) -> int:
        """Returns the number of a subtile: after its commit in tile ``t``, tile ``t - lag`` is written."""
        return (self.inflight - 1) % self.subtiles

    @property
    def lag(self) -> int:
        """Returns by how many tiles publication is late; the last ``lag`` tiles are published at the end."""
        return -(-self.inflight // self.subtiles)
