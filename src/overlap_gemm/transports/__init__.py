"""Ways for a tile to reach a peer. One file each: the device half, called by the comm role."""

from overlap_gemm.transports.ll import LL
from overlap_gemm.transports.nvls import Nvls
from overlap_gemm.transports.nvshmem import Nvshmem, Staged
from overlap_gemm.transports.peer_bulk import PeerBulk

__all__ = ["Nvls", "Nvshmem", "PeerBulk", "LL", "Staged"]
