"""Tensor-memory accesses of warps that are not waited for yet, and conflicting operations.

`tcgen05.ld` and `tcgen05.st` are asynchronous: until `tcgen05.wait::ld` (`::st`) of the same warp, the cells
may still be read (written). So a product must neither overwrite nor read them, and a dealloc must not free
them (PTX ISA 9.7.16.6.2). Cells are recorded as sets of columns for each half of a warp's 32 lanes, because
two accumulators of M=64 may share columns.
"""

from __future__ import annotations

HALVES = (0, 16)  # first lanes of the halves of a warp's lanes


class TmemOrder:
    """Accesses of one CTA that are in flight."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], list[int]] = {}

    def begin(self, kind: str, warp: int, lane: int, lanes: int, first: int, columns: int) -> None:
        """Records an access that a warp issued.

        Args:
            kind: `ld` or `st`.
            warp: Number of the warp in the CTA.
            lane: First lane, counted in the CTA's 128.
            lanes: 16 or 32.
            first: First column.
            columns: Number of columns.
        """
        sets = self._open.setdefault((kind, warp), [0, 0])
        for half, start in enumerate(HALVES):
            if lanes == 32 or lane % 32 == start:
                sets[half] |= _columns(first, columns)

    def wait(self, kind: str, warp: int) -> None:
        """Executes `tcgen05.wait::ld` or `::st` of a warp."""
        self._open.pop((kind, warp), None)

    def conflict(
        self, kinds: tuple[str, ...], first: int, columns: int, halves: tuple[int, ...] = (0, 1)
    ) -> tuple[str, int] | None:
        """Returns the (kind, warp) of an access in flight among `kinds` to these cells, or None."""
        if not self._open:
            return None
        wanted = _columns(first, columns)
        for (kind, warp), sets in self._open.items():
            if kind in kinds and any(sets[half] & wanted for half in halves):
                return kind, warp
        return None


def _columns(first: int, count: int) -> int:
    return ((1 << count) - 1) << first
