"""Transport ``peer_bulk``: bulk stores from shared memory straight into a peer's mapped memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.device.flags import release_flag
from overlap_gemm.device.memory import bulk_store


@dataclass(frozen=True)
class PeerBulk:
    """Writes to ``peers[owner] + offset``: no tensor map per peer, no limit on the number of peers."""

    def put(self, peers: Any, owner: Any, offset: Any, stage: Any) -> None:
        """Starts one bulk store of a contiguous stage; the calling thread commits and waits.

        Args:
            peers: ``Int64[world]`` workspace addresses.
            owner: destination rank.
            offset: byte offset in the owner's workspace, a multiple of 16.
            stage: contiguous shared-memory tensor.
        """
        bulk_store(stage, peers[owner] + offset)

    def publish(self, peers: Any, owner: Any, flag_offset: Any, epoch: Any) -> None:
        """Releases the flag at ``flag_offset`` in the owner's workspace, at system scope.

        The calling thread has executed a full ``wait_group`` over the tile's stores.
        """
        release_flag(peers[owner] + flag_offset, epoch)
