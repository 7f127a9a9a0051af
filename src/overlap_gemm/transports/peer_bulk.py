"""Transport ``peer_bulk``: bulk stores from shared memory straight into a peer's mapped memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Uint32

from overlap_gemm.device.flags import raise_flag, release_flag
from overlap_gemm.device.memory import bulk_store, store_run
from overlap_gemm.device.route import Route


@dataclass(frozen=True)
class PeerBulk:
    """Writes to ``peers[owner] + offset``: no tensor map per peer, no limit on the number of peers."""

    flag = Uint32
    puts = False
    words = False
    multicast = False

    def put(self, route: Route, offset: Any, stage: Any, num_bytes: Any) -> None:
        """Starts one bulk store of a stage's first bytes; the calling thread commits and waits.

        Args:
            route: the tile's way to its owner.
            offset: bytes from the tile's slot, a multiple of 16.
            stage: contiguous shared-memory tensor.
            num_bytes: a multiple of 16.
        """
        bulk_store(stage, route.peers[route.owner] + route.slot + offset, num_bytes)

    def publish(self, route: Route, num_bytes: Any, epoch: Any, fenced: bool = False) -> None:
        """Releases the tile's flag at system scope.

        The calling thread has executed a full ``wait_group`` over the tile's stores and, if ``fenced``, a
        `release_fence` behind it.
        """
        if fenced:
            raise_flag(route.peers[route.owner] + route.flag, epoch)
        else:
            self.signal(route.peers, route.rank, route.owner, route.flag, epoch)

    def signal(self, peers: Any, rank: Any, peer: Any, offset: Any, epoch: Any) -> None:
        """Releases the flag at ``offset`` in the workspace of ``peer``."""
        release_flag(peers[peer] + offset, epoch)

    def store(self, peers: Any, peer: Any, offset: Any, values: Any) -> None:
        """One thread stores a chunk's values at ``offset`` in the workspace of ``peer``.

        Whoever releases a flag for them has observed the store: it is the same thread, or a barrier behind.
        """
        store_run(peers[peer] + offset, values)
