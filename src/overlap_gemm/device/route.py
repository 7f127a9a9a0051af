"""`Route`: where a tile is sent, as a kernel passes it to a transport."""

from __future__ import annotations

from typing import Any, NamedTuple

from overlap_gemm.device.traced import Scalar


class Route(NamedTuple):
    """Destination of a tile, and its places in both workspaces.

    Attributes:
        peers: ``Int64[world]``: workspace addresses; ``-1 - pe`` for a rank that is not P2P-accessible.
        rank: This rank.
        owner: Rank to which the tile is sent.
        slot: ``Int64``: byte offset of the tile's slot in the owner's workspace.
        staging: ``Int64``: local address from which the tile is put to an owner without P2P access: in the
            staging buffer, or (tile for every rank) this rank's slot.
        flag: ``Int64``: byte offset of the tile's flag in the owner's workspace.
        staged: ``Int64``: address of the local flag for a complete tile at ``staging``.
    """

    peers: Any
    rank: Scalar
    owner: Scalar
    slot: Scalar
    staging: Any
    flag: Scalar
    staged: Scalar
