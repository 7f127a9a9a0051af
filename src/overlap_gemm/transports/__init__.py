"""Transports, one file each: their device part, which the roles call (`interface.Transport`)."""

from overlap_gemm.transports.interface import Transport
from overlap_gemm.transports.ll import LL
from overlap_gemm.transports.nvshmem import Nvshmem, Staged
from overlap_gemm.transports.peer_bulk import PeerBulk

__all__ = ["DEVICE", "LL", "Nvshmem", "PeerBulk", "Staged", "Transport"]

DEVICE: dict[str, type[Transport]] = {
    "peer_bulk": PeerBulk,
    "ll": LL,
    "staged": Staged,
    "nvshmem": Nvshmem,
}
"""Device part of each transport, by name; ``staged`` is ``nvshmem`` with a relay kernel."""
