"""`TransportSpec`: data that a transport, which callers may request, can send."""

from dataclasses import dataclass

from .op import OpSpec
from .pattern import patterns_of

EMPTY_BYTE = 0xFF
"""Value of every byte of an LL packet that has not arrived, in a new workspace as in one that was read
(:mod:`overlap_gemm.device.ll_words`)."""


@dataclass(frozen=True)
class TransportSpec:
    """One transport.

    Attributes:
        name: Name in `configured`.
        shards: Whether it sends shards of an operand, to the product.
        tiles: Whether it sends tiles, from the product.
        puts: Whether it puts to every peer, P2P-accessible or not.
        is_flag: Whether data is its own flag: then it sends values of 16 bits only.
        by_host: Whether the host queues it, on a copy engine.
    """

    name: str
    shards: bool
    tiles: bool
    puts: bool = False
    is_flag: bool = False
    by_host: bool = False

    def carries(self, op: OpSpec) -> bool:
        """Returns whether the op can use the transport."""
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


def transports_of(op: OpSpec) -> tuple[str, ...]:
    """Returns the names of an op's transports; none if it has no fused kernel."""
    if not patterns_of(op.name):
        return ()
    return tuple(name for name, transport in TRANSPORTS.items() if transport.carries(op))
