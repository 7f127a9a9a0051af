"""What the transports have in common all of whose peers have an address, in the table of addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

from overlap_gemm.device.flags import raise_flag, release_flag
from overlap_gemm.device.route import Route


@dataclass(frozen=True)
class WithinReach(ABC):
    """A transport (`kernels.surface.Transport`) whose flags are stores to their owner."""

    puts = False

    @abstractmethod
    def put(self, route: Route, offset: Any, stage: Any, num_bytes: Any) -> None:
        """See `kernels.surface.Transport`.

        Args:
            route: the tile's way to its owner.
            offset: bytes from the tile's slot, a multiple of 16.
            stage: contiguous shared-memory tensor.
            num_bytes: of the stage's first, a multiple of 16.
        """

    @abstractmethod
    def store(self, peers: Any, peer: Any, offset: Any, values: Any) -> None:
        """See `kernels.surface.Transport`."""

    @final
    def publish(self, route: Route, num_bytes: Any, epoch: Any, fenced: bool = False) -> None:
        """Releases the tile's flag at system scope.

        The calling thread has executed a full ``wait_group`` over the tile's stores and, if ``fenced``, a
        `release_fence` after it.
        """
        if fenced:
            raise_flag(route.peers[route.owner] + route.flag, epoch)
        else:
            self.signal(route.peers, route.rank, route.owner, route.flag, epoch)

    @final
    def signal(self, peers: Any, rank: Any, peer: Any, offset: Any, value: Any) -> None:
        """Releases ``value`` in the flag at ``offset`` in the workspace of ``peer``."""
        release_flag(peers[peer] + offset, value)
