"""The ring's stages, and how the epilogue's visitors (`config.visitors`) are applied to sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute, utils
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import NUM_MATRICES
from overlap_gemm.config.visitors import Sum
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES
from overlap_gemm.device.traced import Extras, Fragment, Scalar


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

    def first_column(self, chunk: Scalar) -> Any:
        """First column in the CTA tile of the subtile in which a chunk lies."""
        return chunk // self.per_subtile % self.config.epi_columns * self.config.epi_tile[1]

    def locate(self, chunk: Scalar) -> tuple[Any, Any]:
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
class Visits:
    """Applies visitors to fp32 sums, in the two forms in which they come; loads what they read.

    Attributes:
        config: the kernel's configuration.
        of: which sums these are: partial ones, complete ones, or both at once (no other rank adds to them).
    """

    config: GemmConfig
    of: tuple[Sum, ...]

    def on_chunk(self, values: Fragment, row: Scalar, column: Scalar, extras: Extras) -> None:
        """Visits ``values`` of neighbouring columns of ``row``, the first of which is ``column``, in range.

        Args:
            values: fp32, in registers.
            row: their row, see `visitors.Operand`.
            column: a multiple of their number.
            extras: the tensors of `GemmConfig.epilogue_operands`.
        """
        for visitor, tensors in self._visitors(extras):
            read = []
            for operand, tensor in zip(visitor.operands, tensors, strict=True):
                if operand.along == "rows":
                    read.append(tensor[row].to(cutlass.Float32))
                else:
                    loaded = _load_run(tensor, column, cute.size(values)).load()
                    read.append(loaded.to(cutlass.Float32).reshape(values.shape))
            values.store(visitor.apply(values.load(), *read))

    def on_fragment(self, fragment: Fragment, own: Any, row: Scalar, column: Scalar, extras: Extras) -> None:
        """Visits a thread's values of a subtile, loading once per run of neighbouring columns.

        Rows and columns past the end read the last ones: their values are clipped when they are stored.

        Args:
            fragment: the values, fp32.
            own: gives this thread's part of a tensor that is shaped like a subtile.
            row: the subtile's first row, see `visitors.Operand`.
            column: its first column.
            extras: the tensors of `GemmConfig.epilogue_operands`: 16-byte aligned; the size of one along
                columns is a multiple of 8.
        """
        for visitor, tensors in self._visitors(extras):
            read = [
                self._elements(operand, tensor, own, row, column, cute.size(fragment))
                for operand, tensor in zip(visitor.operands, tensors, strict=True)
            ]
            for i, values in enumerate(zip(*read, strict=True) if read else [()] * cute.size(fragment)):
                fragment[i] = visitor.apply(fragment[i], *values)

    def _visitors(self, extras: Extras) -> list[tuple[Any, Any]]:
        """The visitors of these sums, each with its tensors."""
        found, first = [], NUM_MATRICES if self.config.blocks else 0
        for visitor in self.config.epilogue:
            end = first + len(visitor.operands)
            if visitor.of in self.of:
                found.append((visitor, extras[first:end] if extras is not None else ()))
            first = end
        return found

    def _elements(
        self, operand: Any, tensor: Any, own: Any, row: Scalar, column: Scalar, size: int
    ) -> list[Any]:
        """An operand's value, fp32, for each element of a thread's fragment."""
        along_rows, tile = operand.along == "rows", self.config.epi_tile
        mode = 0 if along_rows else 1
        first = (row if along_rows else column) + own(cute.make_identity_tensor(tile))[0][mode]
        stride = (1, 0) if along_rows else (0, 1)
        layout = own(cute.make_tensor(tensor.iterator, cute.make_layout(tile, stride=stride))).layout
        offsets = [layout(i) for i in range(size)]
        places = sorted(set(offsets))
        # A size along rows need not be a multiple of anything, so one by one.
        run = next(
            n
            for n in ((1,) if along_rows else (8, 4, 2, 1))
            if all(place - places[i - i % n] == i % n for i, place in enumerate(places))
        )
        values: dict[int, Any] = {}
        for start in places[::run]:
            place = cutlass.min(first + start, cute.size(tensor) - run)
            if along_rows:  # which may be apart
                values[start] = tensor[place].to(cutlass.Float32)
                continue
            wide = _load_run(tensor, place, run).load().to(cutlass.Float32)
            values |= {start + i: wide[i] for i in range(run)}
        return [values[offset] for offset in offsets]


def _load_run(vector: Any, first: Scalar, run: int) -> Any:
    """``run`` neighbouring elements; ``first`` is a multiple of ``run``."""
    loaded = cute.make_rmem_tensor(run, vector.element_type)
    source = vector.iterator + cute.assume(first, divby=run)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(run)), loaded)
    return loaded
