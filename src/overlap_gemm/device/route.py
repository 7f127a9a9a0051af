"""Where a tile goes: what a kernel tells a transport."""

from __future__ import annotations

from typing import Any, NamedTuple


class Route(NamedTuple):
    """A tile's way to its owner.

    Attributes:
        peers: ``Int64[world]``: workspace addresses, or ``-1 - pe`` for a peer without one.
        rank: this rank.
        owner: destination rank.
        slot: ``Int64``: byte offset of the tile's slot in the owner's workspace.
        staging: ``Int64``: address of the tile's place in this rank's staging buffer.
        flag: ``Int64``: byte offset of the tile's flag in the owner's workspace.
        staged: ``Int64``: address of this rank's own flag that the staged tile is complete.
    """

    peers: Any
    rank: Any
    owner: Any
    slot: Any
    staging: Any
    flag: Any
    staged: Any
