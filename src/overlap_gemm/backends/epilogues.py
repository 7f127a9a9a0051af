"""Epilogues on the host: in which calls a kernel applies one, and the tensors that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..config.gemm_config import GemmConfig
from ..config.visitors import Visitor
from ..epilogues import PAIR, Epilogue
from .scales.tma_operands import ROW_BYTES, ROW_ELEMENTS, aligned_vector

if TYPE_CHECKING:
    from .base import Problem

INPUT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""Dtypes of inputs that kernels read, and their names in kernel configurations."""

_OF_NAMES = {name: dtype for dtype, name in INPUT_DTYPES.items()}

ONE_SHOT_ROWS = 128
"""Rows of an all-reduce up to which every rank makes all sums, at H200's rates (`tuning.space.with_pattern`):
with more rows, a rank does not have all columns of a row."""


class Applying(NamedTuple):
    """An epilogue with the dtypes of its operands.

    Attributes:
        epilogue: The epilogue.
        dtypes: Types of its inputs.
        out_dtype: Type of the result, and of outputs that have a value for each element.
    """

    epilogue: Epilogue
    dtypes: tuple[torch.dtype, ...]
    out_dtype: torch.dtype

    @property
    def visitor(self) -> Visitor:
        """Returns the epilogue in the form that kernel configurations take."""
        outputs = [self.out_dtype for _, kind in self.epilogue.outputs if kind == "element"]
        return Visitor(self.epilogue, tuple(INPUT_DTYPES[dtype] for dtype in (*self.dtypes, *outputs)))

    def __str__(self) -> str:
        """Returns the epilogue and its dtypes, for messages and for comparison between ranks."""
        return f"{self.epilogue.key}({', '.join(map(str, self.dtypes))}) to {self.out_dtype}"

    def on_sums(self, sums: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns result and outputs of complete sums, each rounded once."""
        result, *others = self.epilogue.on_tensors(sums, inputs)
        kinds = ("element", *(kind for _, kind in self.epilogue.outputs))
        return [
            value.to(self.out_dtype) if kind == "element" else value
            for kind, value in zip(kinds, (result, *others), strict=True)
        ]


def why_after(problem: Problem, columns: int) -> str | None:
    """Returns the reason no kernel applies a problem's epilogue to its sums; None if one does.

    Args:
        problem: The problem.
        columns: Rows of this rank's weight.
    """
    applying, spec = problem.applying, problem.spec
    assert applying is not None, problem
    epilogue = applying.epilogue
    if problem.num_weights > 1:
        columns *= problem.num_weights
        if problem.n is not None:  # the same on every rank, since callers may do something else
            columns = 0 if problem.n % problem.world_size else problem.n // problem.world_size
        if columns % (2 * PAIR) or not columns:
            return f"kernels read two weights in bands of {PAIR} rows, of which each rank must have as many"
    if epilogue.pairs and not spec.gathers_operand:
        return "kernels make pairs of columns where the product is the output, in all_gather_gemm"
    if spec.weight is None:
        return "kernels apply none in ops whose weight every rank has"
    if strange := [dtype for dtype in applying.dtypes if dtype not in INPUT_DTYPES]:
        return f"kernels read inputs of bfloat16, float16 and float32, not {strange[0]}"
    if epilogue.of == "partial" and not spec.sums:
        return "partial sums are those of a reduce-scatter and an all-reduce"
    if columns % ROW_ELEMENTS:
        return f"rows of a rank's product must be whole {ROW_BYTES} bytes of 16-bit elements, not N={columns}"
    if epilogue.outputs and not (spec.sums and problem.world_size > 1):
        return "outputs are stored where sums over ranks are made"
    if epilogue.outputs and spec.out is None and problem.m > ONE_SHOT_ROWS:
        return f"of an all-reduce of M={problem.m} rows, more than {ONE_SHOT_ROWS}, ranks have parts of rows"
    return None


def applied_after(run: Callable[..., Any], applying: Applying) -> Callable[..., Any]:
    """Returns a plain call extended by an epilogue: a function of `(x, weight, bias, inputs, *scales)`.

    The function returns a list of the result and the outputs; if an operand is gathered, the pair of that
    operand and this list.
    """

    def run_and_apply(x: Tensor, weight: Any, bias: Any, inputs: Sequence[Tensor], *scales: Any) -> Any:
        result = run(x, weight, bias, *scales)
        if isinstance(result, Tensor):
            return applying.on_sums(result, inputs)
        gathered, sums = result
        return gathered, applying.on_sums(sums[0] if len(sums) == 1 else tuple(sums), inputs)

    return run_and_apply


def read_by_kernel(visitor: Visitor, inputs: Sequence[Tensor], rows: int, columns: int) -> tuple[Tensor, ...]:
    """Returns the inputs in the layout that a kernel reads.

    Args:
        visitor: The epilogue.
        inputs: Its inputs, with no rows where the rank has none.
        rows: Rows of the sums, at least 1.
        columns: Columns of the sums.
    """
    shapes = {"element": (rows, columns), "rows": (rows,), "columns": (columns,), "scalar": (1,)}
    read = []
    for operand, tensor in zip(visitor.reads, inputs, strict=True):
        shape = shapes[operand.kind]
        if tensor.numel() == 0:
            read.append(tensor.new_zeros(shape))
        elif operand.is_matrix:
            read.append(
                tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
            )
        else:
            read.append(aligned_vector(tensor.reshape(-1), *shape))
    return tuple(read)


def written_by_kernel(
    visitor: Visitor, config: GemmConfig, counts: Tensor | None, x: Tensor, rows: int, columns: int
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Returns the tensors that a kernel writes for the outputs, and the outputs among them.

    Args:
        visitor: The epilogue.
        config: The kernel's configuration.
        counts: Zeros between calls, if an output has a value for each row.
        x: Operand, for its device.
        rows: Rows of the sums, at least 1.
        columns: Columns of the sums.
    """
    written: list[Tensor] = []
    outputs = []
    for operand in visitor.writes:
        if operand.kind == "row_counts":
            assert counts is not None
            written.append(counts)
            continue
        shape = operand.shape(config, rows, columns)
        written.append(x.new_empty(shape, dtype=_OF_NAMES[operand.dtype]))
        if operand.kind != "row_parts":
            outputs.append(written[-1])
    return tuple(written), outputs


def written_without_kernel(visitor: Visitor, result: Tensor) -> list[Tensor]:
    """Returns the outputs of a result without elements: zeros for each of its rows."""
    return [
        result.new_empty(result.shape) if kind == "element" else result.new_zeros(len(result)).float()
        for _, kind in visitor.epilogue.outputs
    ]


def own_columns(visitor: Visitor, inputs: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """Returns the part of each input for columns `first` to `end` of the result."""
    return [
        tensor[..., first:end] if operand.kind in ("element", "columns") else tensor
        for operand, tensor in zip(visitor.reads, inputs, strict=True)
    ]


def counts_of(config: GemmConfig, rows: int, columns: int, device: torch.device) -> Tensor | None:
    """Returns zeros for the counts of finished rows; None if no epilogue has such counts."""
    for visitor in config.epilogue:
        for operand in visitor.writes:
            if operand.kind == "row_counts":
                return torch.zeros(operand.shape(config, rows, columns), dtype=torch.int32, device=device)
    return None


def _is_aligned(matrix: Tensor) -> bool:
    pitch = matrix.stride(0) * matrix.itemsize
    return matrix.stride(1) == 1 and pitch % ROW_BYTES == 0 and matrix.data_ptr() % ROW_BYTES == 0
