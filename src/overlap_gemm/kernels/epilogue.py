"""The ring's stages, and what is done to complete sums before they are stored: the bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute, utils
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES
from overlap_gemm.kernels.config import GemmConfig


class RingStages(NamedTuple):
    """The ring's shared memory, seen two ways; the last mode is the stage.

    A stage holds one subtile, rows contiguous and swizzled, as a TMA store expects it. The same bytes, as one
    block, are the wire format: see `StageChunks` for where an element lies in it.

    Attributes:
        tiled: ``(epi_m, epi_n, stages)``.
        flat: ``(elements, stages)``.
    """

    tiled: Any
    flat: Any


def stage_layout(config: GemmConfig, dtype: str) -> Any:
    """Swizzled layout of one subtile in a stage, as a TMA descriptor is built with."""
    make = utils.sm90.make_smem_layout_epi if config.arch == "sm_90a" else utils.sm100.make_smem_layout_epi
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
    """Whether a tile that has columns may have subtiles without: else nobody need ask."""
    return config.cluster_tile[1] > config.epi_tile[1]


@dataclass(frozen=True)
class StageChunks:
    """The wire format: where the 16-byte chunks of a subtile lie in the tile.

    Chunk ``p`` of a block lies in row ``p // per_row``; which of the row's chunks it is, the stage's swizzle
    says: it permutes the chunks of a row by the row's number (128-byte rows: by its 3 low bits; 64-byte rows,
    two of which share 128 bytes: by the 2 bits above the lowest).

    Attributes:
        config: the kernel's configuration, of which the subtile and the slot type decide.
    """

    config: GemmConfig

    @property
    def elements(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES * 8 // DTYPES[self.config.slot_dtype].width

    @property
    def per_row(self) -> int:
        """Chunks of a row of the subtile: 4 or 8."""
        return self.config.epi_tile[1] // self.elements

    @property
    def per_subtile(self) -> int:
        """Chunks of a subtile."""
        return self.config.epi_tile[0] * self.per_row

    def first_column(self, chunk: Any) -> Any:
        """First column in the CTA tile of the subtile in which a chunk lies."""
        return chunk // self.per_subtile % self.config.epi_columns * self.config.epi_tile[1]

    def locate(self, chunk: Any) -> tuple[Any, Any]:
        """(row, first column) in the CTA tile of its ``chunk``-th chunk, counted over its subtiles."""
        epi_m, epi_n = self.config.epi_tile
        subtile, inside = chunk // self.per_subtile, chunk % self.per_subtile
        row, place = inside // self.per_row, inside % self.per_row
        column = place ^ (row // (8 // self.per_row) % self.per_row)
        return (
            subtile // self.config.epi_columns * epi_m + row,
            subtile % self.config.epi_columns * epi_n + column * self.elements,
        )


@dataclass(frozen=True)
class Bias:
    """Adds the bias of its column to each complete sum: an epilogue in the two forms in which sums come.

    Attributes:
        config: the kernel's configuration.
    """

    config: GemmConfig

    def on_chunk(self, values: Any, column: Any, bias: Any) -> None:
        """Adds to fp32 ``values`` of neighbouring columns, the first of which is ``column``, in range."""
        loaded = _load_run(bias, column, cute.size(values))
        values.store(values.load() + loaded.load().to(cutlass.Float32).reshape(values.shape))

    def on_fragment(self, fragment: Any, own: Any, column: Any, bias: Any) -> None:
        """Adds to a thread's fp32 values of a subtile, loading once per run of neighbouring columns.

        Runs past the end read the last columns: their values are clipped by the output's store.

        Args:
            fragment: the values.
            own: gives this thread's part of a tensor that is shaped like a subtile.
            column: the subtile's first column in the output.
            bias: 16-byte aligned; its size is a multiple of 8.
        """
        tile = self.config.epi_tile
        first = column + own(cute.make_identity_tensor(tile))[0][1]
        row = own(cute.make_tensor(bias.iterator, cute.make_layout(tile, stride=(0, 1))))
        offsets = [row.layout(i) for i in range(cute.size(fragment))]
        columns = sorted(set(offsets))
        run = next(
            n for n in (8, 4, 2, 1) if all(c - columns[i - i % n] == i % n for i, c in enumerate(columns))
        )
        values: dict[int, Any] = {}
        for start in columns[::run]:
            loaded = _load_run(bias, cutlass.min(first + start, cute.size(bias) - run), run)
            wide = loaded.load().to(cutlass.Float32)
            values |= {start + i: wide[i] for i in range(run)}
        for i, offset in enumerate(offsets):
            fragment[i] = fragment[i] + values[offset]


def _load_run(bias: Any, column: Any, run: int) -> Any:
    """``run`` neighbouring elements of the bias; ``column`` is a multiple of ``run``."""
    loaded = cute.make_rmem_tensor(run, bias.element_type)
    source = bias.iterator + cute.assume(column, divby=run)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(run)), loaded)
    return loaded
