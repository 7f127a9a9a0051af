"""Device part of the transports, one file each; the roles of a kernel call `interface.Transport`.

A new transport is a subclass of `Transport` with `put` and `store`, and a `TransportSpec` that names it, for
`overlap_gemm.register`. If its data is its own flag, it is a subclass of `LL`.
"""

from importlib import import_module

from overlap_gemm.device.remote import Ref
from overlap_gemm.transports.interface import Transport
from overlap_gemm.transports.ll import LL
from overlap_gemm.transports.nvshmem import Nvshmem, Staged
from overlap_gemm.transports.peer_bulk import PeerBulk

__all__ = ["DEVICE", "LL", "Nvshmem", "PeerBulk", "Ref", "Staged", "Transport", "device_part"]

DEVICE: dict[str, type[Transport]] = {
    "peer_bulk": PeerBulk,
    "ll": LL,
    "staged": Staged,
    "nvshmem": Nvshmem,
}
"""Device part by name. Transport ``nvshmem`` has two: ``staged`` in a GEMM kernel with a relay kernel next to
it, and ``nvshmem`` in a GEMM that puts itself and in the relay kernel."""


def device_part(name: str) -> Transport:
    """Returns the device part of a name in `DEVICE`, or of the ``module:class`` of a registered transport.

    Raises:
        TypeError: The class is no subclass of `Transport`.
    """
    module, _, attribute = name.partition(":")
    kind = getattr(import_module(module), attribute) if attribute else DEVICE[name]
    if not issubclass(kind, Transport):
        raise TypeError(f"the device part of a transport is a subclass of transports.Transport, got {name!r}")
    return kind()
