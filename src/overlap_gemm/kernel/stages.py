"""The ring's stages: their layout in shared memory, and the wire format of a subtile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute, utils
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES
from overlap_gemm.device.traced import Scalar


class RingStages(NamedTuple):
    """The ring's shared memory in two views; the last mode is the stage.

    A stage holds one subtile, rows contiguous and swizzled, as a TMA store expects it. The same bytes, as one
    block, are the wire format: see `StageChunks` for the place of an element.

    Attributes:
        tiled: ``(epi_m, epi_n, stages)``.
        flat: ``(elements, stages)``.
    """

    tiled: Any
    flat: Any


def stage_layout(config: GemmConfig, dtype: str) -> Any:
    """Returns the swizzled layout of one subtile in a stage, for a TMA descriptor."""
    make = getattr(utils, config.on.ring_swizzle).make_smem_layout_epi
    return cute.select(make(DTYPES[dtype], LayoutEnum.ROW_MAJOR, config.epi_tile, 1), mode=[0, 1])


def allocate_stages(config: GemmConfig, dtype: str, smem: Any) -> RingStages:
    """Allocates the ring's stages, for subtiles of ``dtype``."""
    storage = smem.allocate_tensor(
        cutlass.Uint8, cute.make_layout(config.stage_bytes * config.ring_stages), byte_alignment=1024
    )
    element, layout = DTYPES[dtype], stage_layout(config, dtype)
    stages = cute.make_layout(config.ring_stages, stride=config.stage_bytes * 8 // element.width)
    block = cute.make_layout((config.epi_tile[0] * config.epi_tile[1],))
    return RingStages(
        cute.make_tensor(
            cute.recast_ptr(storage.iterator, layout.inner, dtype=element), cute.append(layout.outer, stages)
        ),
        cute.make_tensor(cute.recast_ptr(storage.iterator, dtype=element), cute.append(block, stages)),
    )


def has_empty_subtiles(config: GemmConfig) -> bool:
    """Returns whether a tile with columns in range may have subtiles without: else no check is needed."""
    return config.cluster_tile[1] > config.epi_tile[1]


@dataclass(frozen=True)
class StageChunks:
    """Wire format of a subtile: the place in the tile of each 16-byte chunk.

    Chunk ``p`` of a subtile is in the subtile's row ``r = p // per_row``. By the stage's swizzle its column,
    in chunks, is

    - rows of 128 bytes (``per_row`` = 8): ``(p % 8) ^ (r % 8)``;
    - rows of 64 bytes (4), two of which share 128 bytes: ``(p % 4) ^ (r // 2 % 4)``.

    Attributes:
        config: The kernel's configuration, whose subtile and slot type determine the format.
    """

    config: GemmConfig

    @property
    def elements(self) -> int:
        """Returns the number of elements of a chunk."""
        return CHUNK_BYTES * 8 // DTYPES[self.config.slot_dtype].width

    @property
    def per_row(self) -> int:
        """Returns the number of chunks in a row of the subtile: 4 or 8."""
        return self.config.epi_tile[1] // self.elements

    @property
    def per_subtile(self) -> int:
        """Returns the number of chunks of a subtile."""
        return self.config.epi_tile[0] * self.per_row

    def first_column(self, chunk: Scalar) -> Any:
        """Returns the first column in the CTA tile of the subtile that contains a chunk."""
        return chunk // self.per_subtile % self.config.epi_columns * self.config.epi_tile[1]

    def locate(self, chunk: Scalar) -> tuple[Any, Any]:
        """Returns (row, first column) in the CTA tile of a chunk, numbered over all subtiles of the tile."""
        epi_m, epi_n = self.config.epi_tile
        subtile, inside = chunk // self.per_subtile, chunk % self.per_subtile
        row, place = inside // self.per_row, inside % self.per_row
        column = place ^ (row // (8 // self.per_row) % self.per_row)
        return (
            subtile // self.config.epi_columns * epi_m + row,
            subtile % self.config.epi_columns * epi_n + column * self.elements,
        )
