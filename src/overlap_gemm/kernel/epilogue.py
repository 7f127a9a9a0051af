"""The application of the epilogue's visitors (`config.visitors`) to sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import NUM_MATRICES
from overlap_gemm.config.visitors import COUNT_PITCH, Operand, Visitor
from overlap_gemm.device.memory import DTYPES, store_run
from overlap_gemm.device.row_parts import (
    NEUTRAL,
    REDUCTIONS,
    load_aligned,
    reduced_by_lanes,
    row_of,
    run_of,
    store_by_first,
)
from overlap_gemm.device.traced import Extras, Fragment, Predicate, Scalar
from overlap_gemm.device.values import Register, raw
from overlap_gemm.epilogues import Sum


@dataclass(frozen=True)
class Visits:
    """Applies visitors to fp32 sums: fragments (before the ring) or chunks of a row (receive role).

    Both load inputs. Outputs (``Visitor.writes``) are stored from chunks only.

    Attributes:
        config: The kernel's configuration.
        of: Kinds of the sums: partial, complete, or both if no other rank adds to them.
    """

    config: GemmConfig
    of: tuple[Sum, ...]

    @property
    def is_empty(self) -> bool:
        """Returns whether no visitor is applied to these sums."""
        return not any(visitor.of in self.of for visitor in self.config.epilogue)

    @property
    def num_loads(self) -> int:
        """Returns the number of 16-byte loads for a chunk of inputs with a value for each element."""
        inputs = [reads for one in self.config.epilogue if one.of in self.of for reads in one.reads]
        widths = [DTYPES[operand.dtype].width for operand in inputs if operand.kind == "element"]
        return sum(max(width // DTYPES[self.config.slot_dtype].width, 1) for width in widths)

    def input_registers(self, size: int, chunks: int) -> list[Any]:
        """Returns registers ``(size, chunks)`` for each input with a value for each element."""
        return [
            cute.make_rmem_tensor((size, chunks), DTYPES[operand.dtype])
            for visitor in self.config.epilogue
            if visitor.of in self.of
            for operand in visitor.reads
            if operand.kind == "element"
        ]

    def load_chunk(self, loaded: Sequence[Any], row: Scalar, column: Scalar, extras: Extras) -> None:
        """Starts the loads of a chunk's inputs with a value for each element, before its sums are known.

        A chunk past the end gets the values of the last one.

        Args:
            loaded: Registers of one chunk, of each input in order.
            row: Row of the chunk, see `visitors.Operand`.
            column: First column, a multiple of the number of values.
            extras: Tensors of `GemmConfig.epilogue_operands`.
        """
        targets = list(loaded)
        for visitor, tensors in self._visitors(extras):
            for operand, tensor in zip(visitor.reads, tensors, strict=False):
                if operand.kind == "element":
                    target = targets.pop(0)
                    size, (rows, columns) = cute.size(target), tensor.shape
                    vector = row_of(tensor, cutlass.min(row, rows - 1))
                    source = run_of(vector, cutlass.min(column, columns - size), size)
                    cute.autovec_copy(source, target)

    def on_chunk(
        self,
        values: Fragment,
        row: Scalar,
        column: Scalar,
        extras: Extras,
        loaded: Sequence[Any] = (),
        parts: Sequence[Any] = (),
    ) -> None:
        """Visits ``values`` of adjacent columns of ``row`` from ``column`` on, which are in range.

        Args:
            values: Values, fp32, in registers.
            row: Row of the values, see `visitors.Operand`.
            column: First column, a multiple of the number of values.
            extras: Tensors of `GemmConfig.epilogue_operands`.
            loaded: Registers that `load_chunk` has filled.
            parts: Registers from `row_parts`: each gets the chunk's part of its row's sum or maximum.
        """
        size, parts, elements_of = cute.size(values), list(parts), iter(loaded)
        for visitor, tensors in self._visitors(extras):
            read = [
                next(elements_of).load().to(cutlass.Float32)
                if operand.kind == "element"
                else _chunk(operand, tensor, row, column, size)
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
                    parts.pop(0)[0] = raw(functools.reduce(REDUCTIONS[kind], output))
            for i, result in enumerate(of_results):
                values[i] = raw(result)

    @property
    def reduces(self) -> bool:
        """Returns whether the epilogue has an output with a value for each row."""
        return any(visitor.reductions for visitor in self.config.epilogue if visitor.of in self.of)

    @property
    def has_rows(self) -> bool:
        """Returns whether the epilogue has a function of complete rows."""
        return any(visitor.epilogue.then is not None for visitor in self.config.epilogue)

    def of_rows(self, extras: Extras) -> RowVisit:
        """Returns the visit of complete rows."""
        ((visitor, tensors),) = (one for one in self._visitors(extras) if one[0].epilogue.then is not None)
        (result,) = _of_kind(visitor, tensors, "element")
        values = _of_kind(visitor, tensors, "row_values")
        parts = zip(visitor.reductions, _of_kind(visitor, tensors, "row_parts"), strict=True)
        return RowVisit(visitor, tensors, result, values, tuple(parts))

    def row_parts(self) -> list[Any]:
        """Returns registers for a chunk's parts of its row's reductions, with neutral initial values."""
        kinds = [
            kind for visitor in self.config.epilogue if visitor.of in self.of for kind in visitor.reductions
        ]
        parts = [cute.make_rmem_tensor(1, cutlass.Float32) for _ in kinds]
        for part, kind in zip(parts, kinds, strict=True):
            part.fill(NEUTRAL[kind])
        return parts

    def store_row_parts(
        self,
        parts: Sequence[Sequence[Any]],
        row: Scalar,
        column: Scalar,
        width: int,
        extras: Extras,
        exists: Predicate,
    ) -> None:
        """Stores each reduction of a subtile's columns; all lanes, ``width`` adjacent ones for each row.

        Args:
            parts: Visited registers of this lane, of one or several chunks.
            row: Row of this lane's chunk ``lane % len(parts)``, see `visitors.Operand`.
            column: First column of that chunk.
            width: Number of lanes for a row, a power of two.
            extras: Tensors of `GemmConfig.epilogue_operands`.
            exists: Whether the row exists.
        """
        subtile, of_chunks = column // self.config.epi_tile[1], list(zip(*parts, strict=True))
        for visitor, tensors in self._visitors(extras):
            outputs = _of_kind(visitor, tensors, "row_parts")
            for kind, output in zip(visitor.reductions, outputs, strict=True):
                values = [one[0] for one in of_chunks.pop(0)]
                total = reduced_by_lanes(kind, values, width)
                store_by_first(output, total, row, subtile, width, len(values), exists)

    def row_values(self, extras: Extras) -> list[tuple[Any, Any, Any]]:
        """Returns (reduction, values, parts) of each output that has a value for each row."""
        triples: list[tuple[Any, Any, Any]] = []
        for visitor, tensors in self._visitors(extras):
            values, parts = (_of_kind(visitor, tensors, kind) for kind in ("row_values", "row_parts"))
            triples += zip(visitor.reductions, values, parts, strict=True)
        return triples

    def count(self, extras: Extras, row: Scalar = 0) -> Any:
        """Returns a pointer to a count of `device.row_parts`: of the unit rows from ``row``, or of all."""
        (counts,) = (one for visit in self._visitors(extras) for one in _of_kind(*visit, "row_counts"))
        return counts.iterator + row // self.config.unit_rows * COUNT_PITCH

    def on_fragment(
        self, fragment: Fragment, partition: Any, row: Scalar, column: Scalar, extras: Extras
    ) -> None:
        """Visits a thread's values of a subtile, loading once per run of adjacent columns.

        For rows and columns past the end it loads the inputs of the last ones; no access is outside a tensor.
        Their values are clipped when the subtile is stored. Visitors have no outputs here.

        Args:
            fragment: Values, fp32.
            partition: Function that returns this thread's part of a tensor shaped like a subtile.
            row: First row of the subtile, see `visitors.Operand`.
            column: First column of the subtile.
            extras: Tensors of `GemmConfig.epilogue_operands`, 16-byte aligned, rows as well. Sizes along
                columns are multiples of 8; sizes along rows are any.
        """
        for visitor, tensors in self._visitors(extras):
            if not visitor.epilogue.pairs:
                self._apply(visitor, tensors, (fragment,), partition, row, column)

    def on_pair(
        self,
        first: Fragment,
        second: Fragment,
        partition: Any,
        row: Scalar,
        column: Scalar,
        extras: Extras,
        is_swapped: Any = None,
    ) -> None:
        """Visits two subtiles of the product as pairs; ``first`` gets the output's values.

        Args:
            first: Values of one subtile, fp32, visited by `on_fragment`.
            second: Values of the next subtile in the row.
            partition: Function that returns this thread's part, as in `on_fragment`.
            row: First row of the output.
            column: First column of the output.
            extras: Tensors of `GemmConfig.epilogue_operands`, as in `on_fragment`.
            is_swapped: Whether `first` is the pair's second; None: it never is.
        """
        if is_swapped is not None:
            for i in range(cute.size(first)):
                one, other = first[i], second[i]
                first[i] = cutlass.select_(is_swapped != 0, other, one)
                second[i] = cutlass.select_(is_swapped != 0, one, other)
        for visitor, tensors in self._visitors(extras):
            if visitor.epilogue.pairs:
                self._apply(visitor, tensors, (first, second), partition, row, column)

    def _apply(
        self,
        visitor: Visitor,
        tensors: Any,
        fragments: tuple[Fragment, ...],
        partition: Any,
        row: Scalar,
        column: Scalar,
    ) -> None:
        """Applies a visitor to each element of a fragment, or of two; the first one gets the results."""
        assert not visitor.epilogue.outputs, f"{visitor.name} has outputs: the receive role stores them"
        size = cute.size(fragments[0])
        places = self.places(partition, size)
        read = [
            _elements(operand, tensor, places, row, column)
            for operand, tensor in zip(visitor.reads, tensors, strict=False)
        ]
        for i in range(size):
            sums = [Register(fragment[i]) for fragment in fragments]
            fragments[0][i] = raw(visitor.apply(sums, [Register(one[i]) for one in read]))

    def _visitors(self, extras: Extras) -> list[tuple[Any, Any]]:
        """Returns the visitors of these sums, each with its tensors."""
        visitors, first = [], NUM_MATRICES if self.config.blocks else 0
        for visitor in self.config.epilogue:
            end = first + len(visitor.operands)
            if visitor.of in self.of:
                visitors.append((visitor, extras[first:end] if extras is not None else ()))
            first = end
        return visitors

    def places(self, partition: Any, size: int) -> Places:
        """Returns the places of the elements of a thread's fragment in the subtile."""
        tile = self.config.epi_tile
        first = partition(cute.make_identity_tensor(tile))[0]
        zero = cute.make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=16)

        def offsets(stride: tuple[int, int]) -> list[int]:
            layout = partition(cute.make_tensor(zero, cute.make_layout(tile, stride=stride))).layout
            return [layout(i) for i in range(size)]

        return Places(first, offsets((1, 0)), offsets((0, 1)))


class RowVisit(NamedTuple):
    """Visit of complete rows, by chunks: `Epilogue.then` of stored values, row values and inputs.

    Attributes:
        visitor: Visitor with a function of rows.
        tensors: Its tensors; those of inputs are first.
        result: Matrix of the function's values.
        values: Vector of each of its values for a row.
        parts: Reduction and stored parts of each row value.
    """

    visitor: Visitor
    tensors: Any
    result: Any
    values: Sequence[Any]
    parts: tuple[tuple[Any, Any], ...]

    def input_registers(self, size: int, chunks: int) -> list[Any]:
        """Returns registers ``(values, chunks)`` for each input that the function takes."""
        read = [self.visitor.reads[i] for i in self.visitor.epilogue.second]
        return [
            cute.make_rmem_tensor((size if one.kind == "columns" else 1, chunks), DTYPES[one.dtype])
            for one in read
        ]

    def load(self, loaded: Sequence[Any], row: Scalar, column: Scalar) -> None:
        """Starts the loads of a chunk's inputs."""
        for i, target in zip(self.visitor.epilogue.second, loaded, strict=True):
            kind, tensor = self.visitor.reads[i].kind, self.tensors[i]
            if kind == "columns":
                cute.autovec_copy(run_of(tensor, column, cute.size(target)), target)
            else:
                target[0] = tensor[row if kind == "rows" else 0]

    def store(
        self, stored: Fragment, of_row: Sequence[Any], loaded: Sequence[Any], row: Scalar, column: Scalar
    ) -> None:
        """Applies the function to a chunk in range and stores its values, rounded once.

        The first chunk of a row stores the values for the row.

        Args:
            stored: Stored values of the epilogue's first function.
            of_row: Values of the row.
            loaded: Registers that `load` has filled.
            row: Row of the chunk.
            column: First column.
        """
        epilogue, made = self.visitor.epilogue, []
        rows = [Register(value) for value in of_row]
        for i in range(cute.size(stored)):
            inputs: dict[int, Any] = {}
            for position, one in zip(epilogue.second, loaded, strict=True):
                inputs[position] = Register(one[i if cute.size(one) > 1 else 0].to(cutlass.Float32))
            made.append(epilogue.finish(Register(stored[i].to(cutlass.Float32)), rows, inputs))
        results, *of_rows = zip(*made, strict=True)
        _store_chunk(self.result, row, column, results)
        for values, (value, *_) in zip(self.values, of_rows, strict=True):
            store_if(column == 0, values, row, raw(value))


class Places(NamedTuple):
    """Places of the elements of a thread's fragment in a subtile.

    Attributes:
        first: (row, column) of the first element.
        rows: Rows from the first element to each one, known when the kernel is traced.
        columns: Columns from the first element to each one, known when the kernel is traced.
    """

    first: Any
    rows: list[int]
    columns: list[int]


def _of_kind(visitor: Visitor, tensors: Any, kind: str) -> list[Any]:
    """Returns the tensors of a visitor's written operands of a kind."""
    written = tensors[len(visitor.reads) :]
    return [tensor for operand, tensor in zip(visitor.writes, written, strict=True) if operand.kind == kind]


def _store_chunk(matrix: Any, row: Scalar, column: Scalar, values: Sequence[Any]) -> None:
    """Rounds contiguous values to the matrix's type and stores them."""
    wide = cute.make_rmem_tensor(len(values), cutlass.Float32)
    rounded = cute.make_rmem_tensor(len(values), matrix.element_type)
    for i, value in enumerate(values):
        wide[i] = raw(value)
    rounded.store(wide.load().to(matrix.element_type))  # 8-bit types have no conversion of single values
    offset = Int64(row) * matrix.stride[0] + column
    store_run(matrix.iterator.toint() + offset * (matrix.element_type.width // 8), rounded)


@cute.jit
def store_if(condition: Predicate, vector: Any, place: Scalar, value: Any) -> None:
    """Stores a value of a vector if a condition holds at run time."""
    if condition:
        vector[place] = value


def _chunk(operand: Operand, tensor: Any, row: Scalar, column: Scalar, size: int) -> Any:
    """Returns an input's values, fp32, for adjacent columns of a row: those of its row, column or of all."""
    if operand.kind in ("rows", "scalar"):
        return [tensor[row if operand.kind == "rows" else 0].to(cutlass.Float32)] * size
    return load_aligned(tensor, column, size).load().to(cutlass.Float32)


def _elements(operand: Operand, tensor: Any, places: Places, row: Scalar, column: Scalar) -> list[Any]:
    """Returns an input's value, fp32, for each element of a thread's fragment."""
    first_row, first_column = row + places.first[0], column + places.first[1]
    if operand.kind == "scalar":
        return [tensor[0].to(cutlass.Float32)] * len(places.rows)
    values: dict[tuple[int, int], Any] = {}
    if operand.kind == "rows":  # a size along rows may be any number, so elements are loaded one by one
        for one in sorted(set(places.rows)):
            place = cutlass.min(first_row + one, cute.size(tensor) - 1)
            values[one, 0] = tensor[place].to(cutlass.Float32)  # elements need not be adjacent
        return [values[one, 0] for one in places.rows]
    in_columns = operand.kind == "columns"
    rows = [0] if in_columns else sorted(set(places.rows))
    for one in rows:
        vector = tensor
        if not in_columns:
            vector = row_of(tensor, cutlass.min(first_row + one, cute.size(tensor, mode=[0]) - 1))
        offsets = {c for r, c in zip(places.rows, places.columns, strict=True) if in_columns or r == one}
        ordered = sorted(offsets)
        run = next(
            n
            for n in (8, 4, 2, 1)
            if all(offset - ordered[i - i % n] == i % n for i, offset in enumerate(ordered))
        )
        for start in ordered[::run]:
            place = cutlass.min(first_column + start, cute.size(vector) - run)
            wide = load_aligned(vector, place, run).load().to(cutlass.Float32)
            values |= {(one, start + i): wide[i] for i in range(run)}
    return [values[0 if in_columns else r, c] for r, c in zip(places.rows, places.columns, strict=True)]
