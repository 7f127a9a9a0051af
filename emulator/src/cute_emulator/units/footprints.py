"""Footprints of `tcgen05.mma` in shared and in tensor memory, for the checks of races."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cute_emulator.units.tcgen05 import Cells, Mma


class Footprint(NamedTuple):
    """Memory that a product reads and writes in each of its CTAs; equal for K steps in the same atoms.

    Attributes:
        ctas: Number of CTAs.
        atoms: First and last chunk number of the complete swizzle atoms that contain A and B.
        d: Cells of D, as `Mma.d_cells`.
        others: Cells of A and of scale factors in tensor memory, if any.
    """

    ctas: int
    atoms: tuple[tuple[int, int], ...]
    d: Cells
    others: tuple[Cells, ...]


@lru_cache(maxsize=1024)
def footprint(mma: Mma, ctas: int) -> Footprint:
    """Returns the footprint of a product."""
    atoms = [tile.atoms(*form) for tile, form in mma.smem_tiles(ctas)]
    others = [cells for cells in (mma.a_cells(), *mma.scale_cells(ctas)) if cells[1]]
    return Footprint(ctas, tuple([(a.start, a.stop) for a in atoms]), mma.d_cells(ctas), tuple(others))


@lru_cache(maxsize=1024)
def smem_spans(mma: Mma, ctas: int) -> list[tuple[int, int]]:
    """Returns ranges of chunk numbers, first and end, that contain all of `Mma.smem_reads`."""
    return [tile.span(*form) for tile, form in mma.smem_tiles(ctas)]
