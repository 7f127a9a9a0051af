"""What an epilogue does to sums before they are rounded: visitors, each with the operands that it declares.

A product's sums are *partial* where other ranks have more to add, and *complete* after. A visitor says of
which it is: scales of a rank's own operands belong to its partial sums, a bias to the complete ones. It says
what it does to one element; whoever has the sums (the ring's writer in its fragments, the receive role in
chunks of a row) loads the operands' elements for it.

A visitor is a frozen dataclass, part of `GemmConfig`, with

- ``name``: short, for the kernel's name;
- ``of``: ``"partial"`` or ``"complete"``;
- ``operands``: a tuple of `Operand`; their tensors are arguments of the kernel, in order (`build`);
- ``apply(x, *values)``: fp32 values in, fp32 values out, traced. ``x`` and ``values`` are scalars, or vectors
  of neighbouring columns where a chunk is visited; operators and ``cute.math`` take both.

Imports neither the DSL nor torch: one that needs the DSL imports it in ``apply``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from overlap_gemm.device.traced import Fragment

Sum = Literal["partial", "complete"]


@dataclass(frozen=True)
class Operand:
    """A vector that a visitor reads.

    Attributes:
        along: ``"rows"``: an element for each row; ``"columns"``: for each column. Of partial sums the rows
            and columns are those of the rank's product (A's rows, B's rows), of complete ones its output's.
        dtype: element type, ``"bf16"``, ``"f16"`` or ``"f32"``.
    """

    along: Literal["rows", "columns"]
    dtype: str


class Visitor(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """Short, for the kernel's name."""

    @property
    def of(self) -> Sum:
        """Which sums."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What it reads."""

    def apply(self, x: Any, *values: Fragment) -> Any:
        """One element, or neighbouring ones of a row."""


@dataclass(frozen=True)
class Bias:
    """Adds the bias of its column to each complete sum.

    Attributes:
        dtype: the bias' element type.
    """

    dtype: str

    name: ClassVar[str] = "bias"
    of: ClassVar[Sum] = "complete"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The bias."""
        return (Operand("columns", self.dtype),)

    def apply(self, x: Any, *values: Fragment) -> Any:
        """Adds."""
        (bias,) = values
        return x + bias


@dataclass(frozen=True)
class RowColumnScale:
    """Multiplies each partial sum by the scale of its row and by that of its column, both fp32.

    They are the scales of the rank's own operands, so each partial is scaled before it is rounded and added.
    """

    name: ClassVar[str] = "scale"
    of: ClassVar[Sum] = "partial"
    operands: ClassVar[tuple[Operand, ...]] = (Operand("rows", "f32"), Operand("columns", "f32"))

    def apply(self, x: Any, *values: Fragment) -> Any:
        """Multiplies, the column's scale first into the row's."""
        row, column = values
        return x * (row * column)
