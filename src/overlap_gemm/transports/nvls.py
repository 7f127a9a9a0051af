"""Transport ``nvls``: the switch sums what all ranks have, and copies the sum to all of them.

For a two-shot all-reduce alone. A partial stays in its rank's own memory, in the place of its tile, which is
the same on every rank; its owner is told by a flag there, as ever. The owner loads the sum of all partials
through the workspaces' multicast address (:mod:`overlap_gemm.device.multicast`), and stores the finished sum
through it, once for all ranks. The multicast address is after the ranks' own in the table of addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.device.memory import bulk_store
from overlap_gemm.device.multicast import store_everywhere
from overlap_gemm.device.route import Route
from overlap_gemm.transports.within_reach import WithinReach


@dataclass(frozen=True)
class Nvls(WithinReach):
    """Bulk stores into this rank's own memory, flags at peers, sums and results through the switch."""

    words = False
    multicast = True

    def put(self, route: Route, offset: Any, stage: Any, num_bytes: Any) -> None:
        """Starts one bulk store of a stage's first bytes at home; the calling thread commits and waits."""
        bulk_store(stage, route.peers[route.rank] + route.slot + offset, num_bytes)

    def store(self, peers: Any, peer: Any, offset: Any, values: Any) -> None:
        """One thread stores a chunk of 16 bytes at ``offset`` in every workspace; ``peer`` is ``world``."""
        store_everywhere(peers[peer] + offset, values)
