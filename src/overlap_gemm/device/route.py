"""`Route`: destination of a tile, which a kernel passes to a transport."""

from __future__ import annotations

from typing import Any, NamedTuple

from overlap_gemm.device.traced import Scalar


class Route(NamedTuple):
    """A tile's route to its owner.

    Attributes:
        peers: ``Int64[world]``: workspace addresses, or ``-1 - pe`` for a peer without one.
        rank: This rank.
        owner: Destination rank.
        slot: ``Int64``: byte offset of the tile's slot in the owner's workspace.
        staging: ``Int64``: address in this rank's workspace from which the tile is put to an owner without
            P2P access: its place in the staging buffer; for a tile for every rank, this rank's own slot.
        flag: ``Int64``: byte offset of the tile's flag in the owner's workspace.
        staged: ``Int64``: address of this rank's own flag that the tile in ``staging`` is complete.
    """

    peers: Any
    rank: Scalar
    owner: Scalar
    slot: Scalar
    staging: Any
    flag: Scalar
    staged: Scalar
