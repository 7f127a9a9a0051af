"""The A and B operands as every mainloop hands them to its kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """TMA views of A (M x K) and B (N x K) and the tiled MMA that reads them.

    Attributes:
        mma: ``cute.TiledMma``.
        tma_a: TMA load atom of A.
        a: A's coordinate tensor (M, K).
        tma_b: TMA load atom of B.
        b: B's coordinate tensor (N, K).
    """

    mma: Any
    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
