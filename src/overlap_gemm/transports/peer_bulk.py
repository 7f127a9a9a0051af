"""Transport ``peer_bulk``: bulk stores from shared memory to a peer's mapped memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.device.memory import bulk_store, store_run
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Address, Fragment, Scalar
from overlap_gemm.transports.interface import Transport


@dataclass(frozen=True)
class PeerBulk(Transport):
    """Transport by stores to peers' addresses, without a tensor map per peer.

    Every rank must be P2P-accessible: entries ``-1 - pe`` of ``peers`` are not checked.
    """

    def put(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """Starts one bulk store of a stage's first bytes; the calling thread commits and waits."""
        bulk_store(stage, route.peers[route.owner] + route.slot + offset, num_bytes)

    def store(self, peers: Any, peer: Scalar, offset: Address, values: Fragment) -> None:
        """Stores a chunk at ``offset`` of the workspace of ``peer``; one thread."""
        store_run(peers[peer] + offset, values)
