"""Transport ``nvls``: the switch sums what all ranks have, and copies the sum to all of them.

For a two-shot all-reduce alone. A partial stays in its rank's own memory, in the place of its tile, which is
the same on every rank; its owner is told by a flag there, as ever. The owner loads the sum of all partials
through the workspaces' multicast address (:mod:`overlap_gemm.device.multicast`), and stores the finished sum
through it, once for all ranks. The multicast address is after the ranks' own in the table of addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overlap_gemm.device.memory import bulk_store
from overlap_gemm.device.multicast import alias_fence, load_sum, store_everywhere
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Address, Fragment, Scalar
from overlap_gemm.transports.base import Transport


@dataclass(frozen=True)
class Nvls(Transport):
    """Bulk stores into this rank's own memory, flags at peers, sums and results through the switch."""

    def put(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """Starts one bulk store of a stage's first bytes at home; the calling thread commits and waits."""
        bulk_store(stage, route.peers[route.rank] + route.slot + offset, num_bytes)

    def store(self, peers: Any, peer: Scalar, offset: Address, values: Fragment) -> None:
        """One thread stores a chunk of 16 bytes at ``offset`` in every workspace; ``peer`` is ``world``."""
        store_everywhere(peers[peer] + offset, values)

    def store_to_all(self, exchange: Any, offset: Address, values: Fragment) -> None:
        """One store is for all."""
        self.store(exchange.peers, exchange.world, offset, values)

    def source_of(self, rank: Scalar, owner: Scalar) -> Any:
        """A tile stays at home, in the place of its owner."""
        return owner

    def publish_unit(self, publish: Callable[[], None]) -> None:
        """A peer reads the sum by its own address, and everybody's next tiles are stored by such.

        Each lane's fence lies between these and its loads and stores through the multicast address.
        """
        alias_fence()
        publish()

    def await_partials(self, call: Any, op: Any, tile: Scalar) -> None:
        """What the ranks have stored, and read, through their own addresses is before each lane's fence."""
        super().await_partials(call, op, tile)
        alias_fence()

    def partials(self, call: Any) -> tuple[Any, Any, int]:
        """One source, the switch, for all of them."""
        exchange = call.exchange
        return exchange.peers[exchange.world], exchange.rank, 1

    def load_partial(self, address: Address, values: Fragment) -> None:
        """The ranks' sum."""
        load_sum(address, values)
