"""`TransportSpec`: what travels by a transport that callers may ask for."""

from dataclasses import dataclass

from .op import OpSpec
from .pattern import patterns_of

EMPTY_BYTE = 0xFF
"""What every byte is where LL words have not come, in a new workspace as in one that was read
(:mod:`overlap_gemm.device.ll_words`)."""


@dataclass(frozen=True)
class TransportSpec:
    """One transport.

    Attributes:
        name: What `configured` calls it.
        shards: Whether it carries shards of an operand, to the product.
        tiles: Whether it carries tiles, from the product.
        puts: Whether it puts to every peer, whoever is within reach of stores.
        is_flag: Whether data is its own flag: then it carries values of 16 bits alone.
        by_host: Whether the host queues it, on a copy engine.
    """

    name: str
    shards: bool
    tiles: bool
    puts: bool = False
    is_flag: bool = False
    by_host: bool = False

    def carries(self, op: OpSpec) -> bool:
        """Whether the op has it."""
        return self.shards if op.gathers_operand else self.tiles


TRANSPORTS = {
    transport.name: transport
    for transport in (
        TransportSpec("copy_engine", shards=True, tiles=False, by_host=True),
        TransportSpec("peer_bulk", shards=True, tiles=True),
        TransportSpec("ll", shards=False, tiles=True, is_flag=True),
        TransportSpec("nvshmem", shards=True, tiles=True, puts=True),
    )
}
"""By name."""


def transports_of(op: OpSpec) -> tuple[str, ...]:
    """Names of the transports that an op has; none where it has no fused kernel."""
    if not patterns_of(op.name):
        return ()
    return tuple(name for name, transport in TRANSPORTS.items() if transport.carries(op))
