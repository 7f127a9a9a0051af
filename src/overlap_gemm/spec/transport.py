"""`TransportSpec`: properties of a transport that callers may request.

| transport | x by shards | tiles of the product | peers |
|---|---|---|---|
| `copy_engine` | yes | no | P2P-accessible |
| `peer_bulk` | yes | yes | P2P-accessible |
| `ll` | no | yes, values of 16 bits | P2P-accessible |
| `nvshmem` | yes, but no all-to-all | yes | all |
"""

from dataclasses import dataclass

from .op import OpSpec
from .pattern import patterns_of

EMPTY_BYTE = 0xFF
"""Value of each byte of an LL packet that has not arrived: in a new workspace, and after a packet was read
(:mod:`overlap_gemm.device.ll_words`)."""


@dataclass(frozen=True)
class TransportSpec:
    """Properties of one transport.

    Attributes:
        name: Name in `configured`.
        shards: Whether it sends shards of an operand, before the product.
        tiles: Whether it sends tiles of the product.
        puts: Whether it reaches peers that are not P2P-accessible, by puts.
        is_flag: Whether data is its own flag; such a transport sends only values of 16 bits.
        by_host: Whether the host queues copies on a copy engine; else kernels send.
        device: ``module:class`` of its device part, a subclass of `transports.Transport`, if it is
            registered (`overlap_gemm.register`); "" for a transport of the library.
    """

    name: str
    shards: bool
    tiles: bool
    puts: bool = False
    is_flag: bool = False
    by_host: bool = False
    device: str = ""

    def carries(self, op: OpSpec) -> bool:
        """Returns whether the transport can send what the op sends.

        Puts send entire shards of x. An all-to-all of x sends a part of a shard to each rank.
        """
        if not op.operand_is_sent:
            return self.tiles
        return self.shards and (op.gathers_operand or not self.puts)  # puts are of entire shards


TRANSPORTS = {
    transport.name: transport
    for transport in (
        TransportSpec("copy_engine", shards=True, tiles=False, by_host=True),
        TransportSpec("peer_bulk", shards=True, tiles=True),
        TransportSpec("ll", shards=False, tiles=True, is_flag=True),
        TransportSpec("nvshmem", shards=True, tiles=True, puts=True),
    )
}
"""Transports by name."""


def add_transport(transport: TransportSpec) -> None:
    """Adds a transport of tiles to `TRANSPORTS`.

    Raises:
        ValueError: A transport has this name already; or it has no device part, or not that of tiles which
            kernels store in the memory of P2P-accessible peers.
    """
    name = transport.name
    if name in TRANSPORTS:
        raise ValueError(f"transport {name!r} is there already; there are {', '.join(TRANSPORTS)}")
    if not transport.tiles or transport.shards or transport.puts or transport.by_host:
        raise ValueError(
            f"transport {name!r} must have tiles=True, and shards, puts and by_host False: a registered "
            f"transport stores tiles at peers, got {transport}"
        )
    if not all(transport.device.partition(":")):
        raise ValueError(
            f"transport {name!r} needs device='module:class', that of a subclass of "
            f"overlap_gemm.transports.Transport, got {transport.device!r}"
        )
    TRANSPORTS[name] = transport


def transports_of(op: OpSpec) -> tuple[str, ...]:
    """Returns the names of the transports of an op; none if the op has no fused kernel."""
    if not patterns_of(op.name):
        return ()
    return tuple(name for name, transport in TRANSPORTS.items() if transport.carries(op))
