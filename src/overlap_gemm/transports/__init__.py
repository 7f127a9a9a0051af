"""Device part of the transports, one file each; the roles of a kernel call `interface.Transport`.

A new transport has a subclass of `Transport` with `put` and `store` here and in `DEVICE`; properties in
`spec.transport.TRANSPORTS`; and a host part (`backends.fused.transport_hosts`). If its data is its own flag,
it also overrides the methods that `LL` overrides.
"""

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
"""Device part by name. Transport ``nvshmem`` has two: ``staged`` in a GEMM kernel with a relay kernel next to
it, and ``nvshmem`` in a GEMM that puts itself and in the relay kernel."""
