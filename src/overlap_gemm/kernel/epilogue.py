"""The ring's stages, and how the epilogue's visitors (`config.visitors`) are applied to sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute, utils
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import NUM_MATRICES
from overlap_gemm.config.visitors import Operand, Visitor
from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, LANES, store_run
from overlap_gemm.device.traced import Extras, Fragment, Predicate, Scalar
from overlap_gemm.device.values import Register, raw
from overlap_gemm.epilogues import Sum, maximum


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
    """Applies visitors to fp32 sums, in the two forms in which they come; loads and stores their operands.

    Attributes:
        config: the kernel's configuration.
        of: which sums these are: partial ones, complete ones, or both at once (no other rank adds to them).
    """

    config: GemmConfig
    of: tuple[Sum, ...]

    def on_chunk(
        self, values: Fragment, row: Scalar, column: Scalar, extras: Extras, parts: Sequence[Any] = ()
    ) -> None:
        """Visits ``values`` of neighbouring columns of ``row``, the first of which is ``column``, in range.

        Args:
            values: fp32, in registers.
            row: their row, see `visitors.Operand`.
            column: a multiple of their number.
            extras: the tensors of `GemmConfig.epilogue_operands`.
            parts: from `row_parts`: each gets the chunk's part of its row's sum or maximum.
        """
        size, parts = cute.size(values), list(parts)
        for visitor, tensors in self._visitors(extras):
            read = [
                _chunk(operand, tensor, row, column, size)
                for operand, tensor in zip(visitor.reads, tensors, strict=False)
            ]
            made = [
                visitor.epilogue.apply((Register(values[i]),), [Register(one[i]) for one in read])
                for i in range(size)
            ]
            of_results, *of_outputs = zip(*made, strict=True)
            elements = _of_kind(visitor, tensors, "element")
            for (_, kind), output in zip(visitor.epilogue.outputs, of_outputs, strict=True):
                if kind == "element":
                    _store_chunk(elements.pop(0), row, column, output)
                else:
                    parts.pop(0)[0] = raw(functools.reduce(_REDUCTIONS[kind], output))
            for i, result in enumerate(of_results):
                values[i] = raw(result)

    @property
    def reduces(self) -> bool:
        """Whether the epilogue has an output with a value for each row."""
        return any(visitor.reductions for visitor in self.config.epilogue if visitor.of in self.of)

    def row_parts(self) -> list[Any]:
        """Registers for a chunk's parts of the reductions of its row; a chunk out of range adds nothing."""
        kinds = [
            kind for visitor in self.config.epilogue if visitor.of in self.of for kind in visitor.reductions
        ]
        parts = [cute.make_rmem_tensor(1, cutlass.Float32) for _ in kinds]
        for part, kind in zip(parts, kinds, strict=True):
            part.fill(_NEUTRAL[kind])
        return parts

    def store_row_parts(
        self, parts: list[Any], row: Scalar, column: Scalar, width: int, extras: Extras, exists: Predicate
    ) -> None:
        """All lanes, of which ``width`` neighbours have a row: stores each reduction of a subtile's columns.

        Args:
            parts: this lane's, visited.
            row: its row, see `visitors.Operand`.
            column: the first column of its chunk.
            width: a power of two.
            extras: the tensors of `GemmConfig.epilogue_operands`.
            exists: whether the row does.
        """
        subtile, parts = column // self.config.epi_tile[1], list(parts)
        for visitor, tensors in self._visitors(extras):
            outputs = _of_kind(visitor, tensors, "row_parts")
            for kind, output in zip(visitor.reductions, outputs, strict=True):
                total, distance = Register(parts.pop(0)[0]), 1
                while distance < width:
                    other = cute.arch.shuffle_sync_bfly(total.raw, distance)
                    total = _REDUCTIONS[kind](total, Register(other))
                    distance *= 2
                store_by_first(output, total.raw, row, subtile, width, exists)

    def finish_rows(self, row: Scalar, rows: Scalar, columns: Scalar, extras: Extras) -> None:
        """All lanes, after a unit: the warp with the last unit of some rows reduces the parts of these.

        In the order of the columns: the results do not depend on which warp is the last.

        Args:
            row: the unit's first row.
            rows: rows of the output.
            columns: its columns.
            extras: the tensors of `GemmConfig.epilogue_operands`.
        """
        for visitor, tensors in self._visitors(extras):
            if visitor.reductions:
                (counts,) = _of_kind(visitor, tensors, "row_counts")
                values, parts = (_of_kind(visitor, tensors, kind) for kind in ("row_values", "row_parts"))
                triples = tuple(zip(visitor.reductions, values, parts, strict=True))
                subtiles = (columns + (self.config.epi_tile[1] - 1)) // self.config.epi_tile[1]
                _finish_rows(triples, counts, self.config.unit_rows, row, rows, subtiles)

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
            if not visitor.epilogue.pairs:
                self._apply(visitor, tensors, (fragment,), own, row, column)

    def on_pair(
        self,
        first: Fragment,
        second: Fragment,
        own: Any,
        row: Scalar,
        column: Scalar,
        extras: Extras,
        is_swapped: Any = None,
    ) -> None:
        """Visits two subtiles of the product as pairs; ``first`` gets the output's values.

        Args:
            first: the values of one, fp32, visited by `on_fragment`.
            second: those of the next one in the row.
            own: as for `on_fragment`.
            row: the output's first row.
            column: the output's first column.
            extras: as for `on_fragment`.
            is_swapped: whether `first` is the pair's second; None: it never is.
        """
        if is_swapped is not None:
            for i in range(cute.size(first)):
                one, other = first[i], second[i]
                first[i] = cutlass.select_(is_swapped != 0, other, one)
                second[i] = cutlass.select_(is_swapped != 0, one, other)
        for visitor, tensors in self._visitors(extras):
            if visitor.epilogue.pairs:
                self._apply(visitor, tensors, (first, second), own, row, column)

    def _apply(
        self,
        visitor: Visitor,
        tensors: Any,
        fragments: tuple[Fragment, ...],
        own: Any,
        row: Scalar,
        column: Scalar,
    ) -> None:
        """Applies a visitor to each element of a fragment, or of two; the first one gets the results."""
        assert not visitor.writes, f"{visitor.name} has outputs, which the receive role alone stores"
        size = cute.size(fragments[0])
        places = self._places(own, size)
        read = [
            _elements(operand, tensor, places, row, column)
            for operand, tensor in zip(visitor.reads, tensors, strict=True)
        ]
        for i in range(size):
            sums = [Register(fragment[i]) for fragment in fragments]
            fragments[0][i] = raw(visitor.apply(sums, [Register(one[i]) for one in read]))

    def _visitors(self, extras: Extras) -> list[tuple[Any, Any]]:
        """The visitors of these sums, each with its tensors."""
        found, first = [], NUM_MATRICES if self.config.blocks else 0
        for visitor in self.config.epilogue:
            end = first + len(visitor.operands)
            if visitor.of in self.of:
                found.append((visitor, extras[first:end] if extras is not None else ()))
            first = end
        return found

    def _places(self, own: Any, size: int) -> Places:
        """Where the elements of a thread's fragment lie in the subtile."""
        tile = self.config.epi_tile
        first = own(cute.make_identity_tensor(tile))[0]
        zero = cute.make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=16)

        def offsets(stride: tuple[int, int]) -> list[int]:
            layout = own(cute.make_tensor(zero, cute.make_layout(tile, stride=stride))).layout
            return [layout(i) for i in range(size)]

        return Places(first, offsets((1, 0)), offsets((0, 1)))


class Places(NamedTuple):
    """Where the elements of a thread's fragment lie in a subtile.

    Attributes:
        first: (row, column) of the first one.
        rows: rows from there to each, known when the kernel is traced.
        columns: columns likewise.
    """

    first: Any
    rows: list[int]
    columns: list[int]


_REDUCTIONS: dict[str, Any] = {"row_sum": lambda a, b: a + b, "row_max": maximum}

_NEUTRAL = {"row_sum": 0.0, "row_max": -inf}


def _of_kind(visitor: Visitor, tensors: Any, kind: str) -> list[Any]:
    """The tensors of a visitor's written operands of a kind."""
    written = tensors[len(visitor.reads) :]
    return [tensor for operand, tensor in zip(visitor.writes, written, strict=True) if operand.kind == kind]


def _store_chunk(matrix: Any, row: Scalar, column: Scalar, values: Sequence[Any]) -> None:
    rounded = cute.make_rmem_tensor(len(values), matrix.element_type)
    for i, value in enumerate(values):
        rounded[i] = raw(value).to(matrix.element_type)
    offset = Int64(row) * matrix.stride[0] + column
    store_run(matrix.iterator.toint() + offset * (matrix.element_type.width // 8), rounded)


def _chunk(operand: Operand, tensor: Any, row: Scalar, column: Scalar, size: int) -> Any:
    """An input's values, fp32, for neighbouring columns of a row."""
    if operand.kind in ("rows", "scalar"):
        return [tensor[row if operand.kind == "rows" else 0].to(cutlass.Float32)] * size
    vector = tensor if operand.kind == "columns" else _row(tensor, row)
    return _load_run(vector, column, size).load().to(cutlass.Float32)


def _elements(operand: Operand, tensor: Any, places: Places, row: Scalar, column: Scalar) -> list[Any]:
    """An input's value, fp32, for each element of a thread's fragment."""
    first_row, first_column = row + places.first[0], column + places.first[1]
    if operand.kind == "scalar":
        return [tensor[0].to(cutlass.Float32)] * len(places.rows)
    values: dict[tuple[int, int], Any] = {}
    if operand.kind == "rows":  # a size along rows need not be a multiple of anything, so one by one
        for one in sorted(set(places.rows)):
            place = cutlass.min(first_row + one, cute.size(tensor) - 1)
            values[one, 0] = tensor[place].to(cutlass.Float32)  # which may be apart
        return [values[one, 0] for one in places.rows]
    in_columns = operand.kind == "columns"
    rows = [0] if in_columns else sorted(set(places.rows))
    for one in rows:
        vector = tensor
        if not in_columns:
            vector = _row(tensor, cutlass.min(first_row + one, cute.size(tensor, mode=[0]) - 1))
        offsets = {c for r, c in zip(places.rows, places.columns, strict=True) if in_columns or r == one}
        ordered = sorted(offsets)
        run = next(
            n
            for n in (8, 4, 2, 1)
            if all(offset - ordered[i - i % n] == i % n for i, offset in enumerate(ordered))
        )
        for start in ordered[::run]:
            place = cutlass.min(first_column + start, cute.size(vector) - run)
            wide = _load_run(vector, place, run).load().to(cutlass.Float32)
            values |= {(one, start + i): wide[i] for i in range(run)}
    return [values[0 if in_columns else r, c] for r, c in zip(places.rows, places.columns, strict=True)]


def _row(matrix: Any, row: Scalar) -> Any:
    """A row of a matrix whose rows begin at multiples of 16 bytes."""
    whole = 128 // matrix.element_type.width
    offset = cute.assume(Int64(row) * matrix.stride[0], divby=whole)
    return cute.make_tensor(matrix.iterator + offset, cute.make_layout(cute.size(matrix, mode=[1])))


@cute.jit
def store_by_first(
    output: cute.Tensor,
    value: cutlass.Float32,
    row: Scalar,
    subtile: Scalar,
    width: cutlass.Constexpr,
    exists: Predicate,
) -> None:
    """The first of every ``width`` lanes stores a row's value, if the row exists."""
    if exists and cute.arch.lane_idx() % width == 0:
        output[(subtile, row)] = value


@cute.jit
def _finish_rows(
    reductions: Any,
    counts: cute.Tensor,
    unit_rows: cutlass.Constexpr,
    row: Scalar,
    rows: Scalar,
    subtiles: Scalar,
) -> None:
    """Counts a unit of ``unit_rows`` rows; with the last of its ``subtiles`` a lane finishes each row.

    What the other warps stored before they counted is there for the last: each counts after its barrier, by
    an operation that releases and acquires, and the last one's lanes read after another barrier. It sets the
    count back for the next call, which begins after this one.
    """
    is_last = Int32(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        word = counts.iterator + row // unit_rows
        if cute.arch.atomic_add(word, Int32(1), sem="acq_rel", scope="gpu") == subtiles - 1:
            cute.arch.store(word, Int32(0))
            is_last = Int32(1)
    is_last = Int32(cute.arch.shuffle_sync(is_last, 0))
    cute.arch.sync_warp()
    if is_last != 0:
        for first in cutlass.range_constexpr(0, unit_rows, LANES):
            own = row + first + cute.arch.lane_idx()
            if own < rows and first + cute.arch.lane_idx() < unit_rows:
                for kind, values, parts in reductions:
                    _reduce_parts(kind, values, parts, own, subtiles)


@cute.jit
def _reduce_parts(
    kind: cutlass.Constexpr, values: cute.Tensor, parts: cute.Tensor, row: Int32, subtiles: Int32
) -> None:
    """One lane: reduces the parts of a row in order."""
    total = Float32(parts[(0, row)])
    for subtile in cutlass.range(1, subtiles, unroll=4):
        total = raw(_REDUCTIONS[kind](Register(total), Register(parts[(subtile, row)])))
    values[row] = total


def _load_run(vector: Any, first: Scalar, run: int) -> Any:
    """``run`` neighbouring elements; ``first`` is a multiple of ``run``."""
    loaded = cute.make_rmem_tensor(run, vector.element_type)
    source = vector.iterator + cute.assume(first, divby=run)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(run)), loaded)
    return loaded
