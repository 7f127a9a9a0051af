"""An epilogue in a kernel: the function, and the dtypes of its operands.

Sums of a product are *partial* before the sums of other ranks are added, and *complete* afterwards. An
epilogue declares whether it is a function of partial or of complete sums. Scales of a rank's operands are
applied to its partial sums, a bias to complete sums. The role that has the sums in registers loads the
inputs' elements: the ring's writer in fragments, or the receive role in chunks of a row. Only the receive
role stores outputs.

Imports neither the DSL nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from overlap_gemm.epilogues import (
    BLOCK,
    Epilogue,
    InputKind,
    OutputKind,
    Sum,
    add_bias,
    scale_rows_and_columns,
)
from overlap_gemm.spec.sharding import ceil_div

if TYPE_CHECKING:
    from overlap_gemm.config.gemm_config import GemmConfig

COUNT_PITCH = 16
"""Words from one count of rows to the next: they are in different lines of the L2 cache."""

OperandKind = Literal[InputKind, "row_values", "row_parts", "row_counts", "block_scales"]


@dataclass(frozen=True)
class Operand:
    """A tensor that a visitor reads or writes, an argument of the kernel.

    For partial sums the rows and columns are those of the rank's product (A's rows, B's rows), for complete
    ones its output's.

    Attributes:
        kind: ``"rows"``, ``"columns"``: a vector with an element for each; ``"scalar"``: a vector of one;
            ``"element"``: a matrix. Written, for an output with a value for each row: ``"row_values"``: the
            vector; ``"row_parts"``: a matrix, (subtiles along the columns, rows rounded up to 4);
            ``"row_counts"``: a vector with numbers of finished units, `COUNT_PITCH` words apart, zeros
            between calls: of each unit's rows if complete rows are visited, else of all rows together, the
            first. ``"block_scales"``: scales of an 8-bit result, (blocks along the columns, rows rounded up
            to 4).
        dtype: Element type, ``"bf16"``, ``"f16"``, ``"f32"``, ``"e4m3"`` (of a result) or ``"i64"``.
    """

    kind: OperandKind
    dtype: str

    @property
    def is_matrix(self) -> bool:
        """Returns whether the tensor has two dimensions."""
        return self.kind in ("element", "row_parts", "block_scales")

    def shape(self, config: GemmConfig, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the extents of the tensor of a call.

        Args:
            config: The kernel's configuration.
            rows: Rows of the sums, at least 1: the rank's product or output, see the class.
            columns: Columns of the sums.
        """
        if self.kind == "block_scales":
            return ceil_div(columns, BLOCK), ceil_div(rows, 4) * 4
        return {
            "element": (rows, columns),
            "rows": (rows,),
            "row_values": (rows,),
            "columns": (columns,),
            "scalar": (1,),
            "row_parts": (ceil_div(columns, config.epi_tile[1]), ceil_div(rows, 4) * 4),
            "row_counts": (ceil_div(rows, config.unit_rows) * COUNT_PITCH,),
        }[self.kind]


@dataclass(frozen=True)
class Visitor:
    """An epilogue and the element types of its tensors: part of `GemmConfig`.

    Attributes:
        epilogue: Function with declared inputs and outputs.
        dtypes: Dtype of each input, then of each output with a value for each element, in order.
        of_two_weights: Whether the columns of a pair are of two matrices B, else of one, interleaved.
    """

    epilogue: Epilogue
    dtypes: tuple[str, ...] = ()
    of_two_weights: bool = False

    @property
    def name(self) -> str:
        """Returns a short name, for the kernel's name."""
        return f"{self.epilogue.name}2" if self.of_two_weights else self.epilogue.name

    @property
    def of(self) -> Sum:
        """Returns the kind of sums to which the epilogue is applied."""
        return self.epilogue.of

    @cached_property
    def reads(self) -> tuple[Operand, ...]:
        """Returns the inputs' tensors."""
        return tuple(
            Operand(kind, dtype) for (_, kind), dtype in zip(self.epilogue.inputs, self.dtypes, strict=False)
        )

    @cached_property
    def writes(self) -> tuple[Operand, ...]:
        """Returns the outputs' tensors, in the order of the outputs.

        An output with a value for each element has one tensor. One with a value for each row has two, fp32:
        ``row_values``, then ``row_parts``. If there are any of the latter, one ``row_counts`` (int64) for all
        of them is the last. The scales of an 8-bit result have one tensor, the kernel's last operand.
        With `Epilogue.then` the values of that function come first, those for each row included; those of
        outputs are not stored. The kernel's output then has the values of the epilogue's first function.
        """
        if self.epilogue.block:
            return (Operand("block_scales", "f32"),)
        dtypes, operands = iter(self.dtypes[len(self.epilogue.inputs) :]), []
        if self.epilogue.then is not None:
            parts = [Operand("row_parts", "f32")] * len(self.reductions)
            made = [Operand("row_values", "f32")] * len(self.epilogue.finished)
            result = Operand("element", self.epilogue.result or next(dtypes))
            return result, *made, *parts, Operand("row_counts", "i64")
        for _, kind in self.epilogue.outputs:
            if kind == "element":
                operands.append(Operand("element", next(dtypes)))
            else:
                operands += [Operand("row_values", "f32"), Operand("row_parts", "f32")]
        return (*operands, Operand("row_counts", "i64")) if self.reductions else tuple(operands)

    @cached_property
    def reductions(self) -> tuple[OutputKind, ...]:
        """Returns the reduction of each output that has a value for each row."""
        return tuple(kind for _, kind in self.epilogue.outputs if kind != "element")

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Returns all operands, inputs first, in the order in which the kernel takes them."""
        return self.reads + self.writes

    def in_order(self, out: Any, outputs: Sequence[Any]) -> list[Any]:
        """Returns the op's results: the result first.

        Args:
            out: Output of the kernel.
            outputs: Tensors that it writes in addition, in the order of `writes`.
        """
        return [*outputs, out] if self.epilogue.then is not None else [out, *outputs]

    def apply(self, sums: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Returns the result of one value, or of a pair; for functions without outputs."""
        (result,) = self.epilogue.apply(sums, inputs)
        return result


def block_of(visitors: Sequence[Visitor]) -> int | None:
    """Returns the columns of the result that share a scale; None if it has no scales."""
    return visitors[-1].epilogue.block if visitors else None


def bias_of(dtype: str, of: Sum = "complete") -> Visitor:
    """Returns the visitor that adds a bias of this type.

    Args:
        dtype: Dtype of the bias.
        of: "complete": the bias is that of the output's columns; "partial": of the columns of the rank's
            product, where no other rank adds to it (`exchange.all_to_all`).
    """
    return Visitor(add_bias if of == "complete" else _PARTIAL_BIAS, (dtype,))


_PARTIAL_BIAS = replace(add_bias, of="partial")


SCALES = Visitor(scale_rows_and_columns, ("f32", "f32"))
"""Multiplies partial sums by the scale of their row and by that of their column."""
