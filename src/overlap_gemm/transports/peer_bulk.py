"""Transport ``peer_bulk``: bulk stores from shared memory to a peer's mapped memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_gemm.device.memory import bulk_store, store_run
from overlap_gemm.device.remote import Ref
from overlap_gemm.device.traced import Fragment, Scalar
from overlap_gemm.transports.interface import Transport


@dataclass(frozen=True)
class PeerBulk(Transport):
    """Transport by stores to peers' addresses, without a tensor map per peer.

    Every rank must be P2P-accessible, which is not checked.
    """

    def put(self, target: Ref, stage: Any, num_bytes: Scalar) -> None:
        """Starts one bulk store of a stage's first bytes; the calling thread commits and waits."""
        bulk_store(stage, target.address, num_bytes)

    def store(self, target: Ref, values: Fragment) -> None:
        """Stores a chunk in the memory of a rank; one thread."""
        store_run(target.address, values)
