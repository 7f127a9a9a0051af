"""`TransportSpec`: what travels by a transport that callers may ask for."""

from dataclasses import dataclass

from .op import OpSpec
from .pattern import PATTERNS, patterns_of


@dataclass(frozen=True)
class TransportSpec:
    """One transport.

    Attributes:
        name: What `configured` calls it.
        shards: Whether it carries shards of an operand, to the product.
        tiles: Whether it carries tiles, from the product.
        sums: Whether it is the one that sums them, in an order of its own, where sums return to all ranks.
    """

    name: str
    shards: bool
    tiles: bool
    sums: bool = False

    def carries(self, op: OpSpec) -> bool:
        """Whether the op has it."""
        if op.gathers_operand:
            return self.shards
        return self.tiles and (not self.sums or any(PATTERNS[name].returns for name in patterns_of(op.name)))


TRANSPORTS = {
    transport.name: transport
    for transport in (
        TransportSpec("copy_engine", shards=True, tiles=False),
        TransportSpec("peer_bulk", shards=True, tiles=True),
        TransportSpec("ll", shards=False, tiles=True),
        TransportSpec("nvshmem", shards=True, tiles=True),
        TransportSpec("nvls", shards=False, tiles=True, sums=True),
    )
}
"""By name."""


def transports_of(op: OpSpec) -> tuple[str, ...]:
    """Names of the transports that an op has."""
    return tuple(name for name, transport in TRANSPORTS.items() if transport.carries(op))
