"""Ways to a peer. One file each: the device half, which the roles call (`base.Transport`)."""

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
"""The device half of each way to peers, by its name; ``staged`` is ``nvshmem`` with a relay kernel."""
