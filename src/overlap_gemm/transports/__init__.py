"""Device part of the transports, one file each; the roles of a kernel call `interface.Transport`."""

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
"""Device part by name; ``staged`` is the part of ``nvshmem`` in a kernel with a relay kernel."""
