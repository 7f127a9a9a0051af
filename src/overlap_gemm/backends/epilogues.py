"""Epilogues in fused calls: the rules for which a kernel applies one, and the tensors it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.gemm_config import GemmConfig
from ..config.visitors import Visitor
from ..epilogues import PAIR, Applied, Epilogue, add_residual_rms_norm, apply_relu
from ..epilogues.definition import bands
from ..epilogues.library import BINARY, TORCH_OPERATIONS
from ..runtime.order import is_capturing
from ..spec import PATTERNS, OpSpec, patterns_of
from .scales.result_blocks import by_blocks, new_scales, rounded
from .scales.scale_layouts import LAYOUTS, ScaleLayout
from .scales.scaling import FLOAT8, OUT_DTYPES
from .scales.tma_operands import ROW_BYTES, ROW_ELEMENTS, aligned_vector
from .triton_kernels import epilogue_rows

if TYPE_CHECKING:
    from .base import Problem
    from .op_call import CallOperands

INPUT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""Names in kernel configurations of the dtypes of inputs that kernels can read."""

RESULT_DTYPES = {"e4m3": torch.float8_e4m3fn}
"""Dtypes of results, by `Epilogue.result`."""

_OF_NAMES = {**{name: dtype for dtype, name in INPUT_DTYPES.items()}, **RESULT_DTYPES}

ONE_SHOT_ROWS = 128
"""Rows of an all-reduce up to which it is one-shot at H200's rates (`tuning.space.with_pattern`).

In a one-shot all-reduce every rank sums all elements. With more rows, a rank sums a part of a row's columns.
"""


class Applying(NamedTuple):
    """An epilogue with the dtypes of its operands.

    Attributes:
        epilogue: Epilogue of the call.
        dtypes: Dtype of each input.
        out_dtype: Dtype of the op's results: of the result, if the epilogue has no type for it
            (`result_dtype`), and of outputs with a value for each element.
    """

    epilogue: Epilogue
    dtypes: tuple[torch.dtype, ...]
    out_dtype: torch.dtype

    @property
    def visitor(self) -> Visitor:
        """Returns the epilogue in the form that kernel configurations take."""
        outputs = [self.out_dtype for _, kind in self.epilogue.returned if kind == "element"]
        return Visitor(self.epilogue, tuple(INPUT_DTYPES[dtype] for dtype in (*self.dtypes, *outputs)))

    def __str__(self) -> str:
        """Returns the epilogue and its dtypes, for messages and for comparison between ranks."""
        return f"{self.epilogue.key}({', '.join(map(str, self.dtypes))}) to {self.out_dtype}"

    def in_one_pass(self, sums: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns `on_sums` without gradients: by one kernel, if there is one for the epilogue and device."""
        made = self.by_kernel(sums, inputs)
        return self.on_sums(sums, inputs) if made is None else made

    def by_kernel(self, sums: Any, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Returns `on_sums` without gradients by one kernel; None if there is none for them now."""
        read = epilogue_rows.readable(self.epilogue, sums, inputs)
        if read is None:
            return None
        written = new_results(self.epilogue, self.out_dtype, read.sums[0], *read.extents)
        return written if epilogue_rows.launch(self.epilogue, read, written) else None

    def on_sums(self, sums: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Applies the epilogue to complete sums; returns the result and the outputs, each rounded once.

        Epilogues of `TORCH_OPERATIONS` are applied by these, which make no float32 copies of 16-bit tensors.
        With two operations the result of the first one is rounded, too, as in a model without epilogues.
        So is `add_residual_rms_norm` if its eps was passed as a number.
        """
        if (operations := TORCH_OPERATIONS.get(self.epilogue.key)) is not None:
            return [_by_torch(self.epilogue, operations, sums, inputs).to(self.out_dtype)]
        if self.epilogue.key == add_residual_rms_norm.key and (eps := number_of(inputs[2])) is not None:
            residual, weight, _ = inputs
            stream = torch.add(sums, residual).to(self.out_dtype)
            normed = F.rms_norm(stream, weight.shape, weight.to(self.out_dtype), eps)
            return [normed, stream]
        result, *others = self.epilogue.on_tensors(sums, inputs, self.out_dtype)
        if self.epilogue.block is not None:
            return by_blocks(result.float(), self.epilogue.block)
        outputs = zip(self.epilogue.returned, others, strict=True)
        return [
            rounded(result, result_dtype(self.epilogue, self.out_dtype)),
            *(value.to(self.out_dtype) if kind == "element" else value for (_, kind), value in outputs),
        ]


MOST_NUMBERS = 64
"""Numbers of which a tensor is kept: the scales of a caller that passes a new one each time are not."""

_of_numbers: dict[tuple[float, float, torch.device], Tensor] = {}
_numbers: dict[int, float] = {}


def tensor_of(value: float, device: torch.device, keep: bool) -> Tensor:
    """Returns a number as a float32 tensor of one element.

    A kept tensor costs later calls no launch. It is complete when it is kept, for any stream. None is made
    while a CUDA graph is captured, in whose memory it would be.

    Args:
        value: Number.
        device: Device of the tensor.
        keep: Whether the tensor may be a kept one: no compiler is recording the call.
    """
    if keep and not math.isnan(value):  # which equals nothing
        key = value, math.copysign(1.0, value), device  # 0.0 equals -0.0
        if key not in _of_numbers and len(_of_numbers) < MOST_NUMBERS and not is_capturing(device):
            with torch.inference_mode(False):
                kept = _of_numbers[key] = torch.tensor([value], dtype=torch.float32).to(device)
            _numbers[id(kept)] = value
        if key in _of_numbers:
            return _of_numbers[key]
    return torch.full((1,), value, dtype=torch.float32, device=device)


def number_of(tensor: Tensor) -> float | None:
    """Returns the number of a kept tensor without reading its memory; None for others, and in compilers."""
    return None if torch.compiler.is_compiling() else _numbers.get(id(tensor))


def result_dtype(epilogue: Epilogue | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a call's result.

    Args:
        epilogue: Epilogue of the call, or None.
        dtype: Dtype of the op's results without an epilogue.
    """
    if epilogue is None or epilogue.result is None:
        return dtype
    return RESULT_DTYPES[epilogue.result]


def sums_dtype(epilogue: Epilogue | None, dtype: torch.dtype) -> torch.dtype:
    """Returns `result_dtype` of the values of an epilogue's first function, a kernel's output."""
    return dtype if epilogue is None or epilogue.sums_result is None else RESULT_DTYPES[epilogue.sums_result]


def new_results(epilogue: Epilogue, dtype: torch.dtype, x: Tensor, rows: Any, columns: Any) -> list[Tensor]:
    """Returns uninitialized results of a call with an epilogue: the result, then what it returns in addition.

    Args:
        epilogue: Epilogue of the call.
        dtype: Dtype of the op's results without an epilogue.
        x: Tensor on the device.
        rows: Rows of the result.
        columns: Columns of the result.
    """
    made = [x.new_empty(rows, columns, dtype=result_dtype(epilogue, dtype))]
    for _, kind in epilogue.returned:
        if kind == "blocks":
            made.append(new_scales(x, rows, columns)[1])
        elif kind == "element":
            made.append(x.new_empty(rows, columns, dtype=dtype))
        else:
            made.append(x.new_empty(rows, dtype=torch.promote_types(dtype, torch.float32)))
    return made


def _by_torch(epilogue: Epilogue, operations: Sequence[str], sums: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Returns the result of an epilogue by its `TORCH_OPERATIONS`; autograd saves what they save."""
    is_banded = epilogue.pairs and isinstance(sums, Tensor)  # views: `Epilogue.operands` would copy them
    result, *others = [*(bands(sums) if is_banded else epilogue.operands(sums)), *epilogue.broadcast(inputs)]
    for name in operations:
        operands = (result, others.pop(0)) if name in BINARY else (result,)
        result = _OF_TORCH[name](*operands)
    return result.flatten(-2) if is_banded else result


_OF_TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "mul": torch.mul, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
"""Functions of the names in `TORCH_OPERATIONS`."""


class TensorKind(NamedTuple):
    """Shape and dtype of a tensor that is not saved."""

    shape: Sequence[Any]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> list[TensorKind]:
        """Returns the kinds of tensors."""
        return [cls(one.shape, one.dtype) for one in tensors]


def author_gradient(
    epilogue: Epilogue,
    gradients: Sequence[Tensor],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    kinds: Sequence[TensorKind],
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the gradients of the sum and the inputs, by `Epilogue.gradient(gradients, outputs, inputs)`.

    It gets tuples: `outputs` are the result and the epilogue's outputs, `gradients` those of `outputs` (zeros
    if absent). It returns a tuple, which is cast: the gradient of the sum, and one, or None, for each input.

    Args:
        epilogue: Epilogue with a gradient.
        gradients: Gradients of the result and of the outputs.
        outputs: Result and outputs; empty if the gradient does not read them.
        inputs: Inputs of the epilogue; empty if the gradient does not read them.
        kinds: Shape and dtype of each input.

    Raises:
        TypeError: The function does not return a tuple with a gradient of the sum and one for each input.
        ValueError: The shape of an input's gradient differs from the shape of the input.
    """
    assert epilogue.gradient is not None
    if epilogue.key == apply_relu.key:  # one operation
        computed: Any = (torch.ops.aten.threshold_backward(gradients[0], outputs[0], 0),)
    else:
        computed = epilogue.gradient(tuple(gradients), tuple(outputs), tuple(inputs))
    if not isinstance(computed, tuple) or len(computed) != 1 + len(kinds):
        names = ", ".join(("the sum", *(name for name, _ in epilogue.inputs)))
        got = f"{len(computed)} values" if isinstance(computed, tuple) else type(computed).__name__
        raise TypeError(
            f"epilogue {epilogue.name}: its gradient must return a tuple, of ({names}); got {got}"
        )
    of_sums, *of_inputs = computed
    for (name, _), grad, one in zip(epilogue.inputs, of_inputs, kinds, strict=True):
        if grad is not None and grad.shape != one.shape:
            raise ValueError(
                f"epilogue {epilogue.name}: the gradient of {name} must have the shape {list(one.shape)}, "
                f"got {list(grad.shape)}"
            )
    cast = [g if g is None else g.to(one.dtype) for g, one in zip(of_inputs, kinds, strict=True)]
    return of_sums.to(gradients[0].dtype), cast


def usual_dtypes(epilogue: Epilogue, dtype: torch.dtype) -> list[torch.dtype]:
    """Returns the dtypes of inputs that calls are prepared for: scalars and values of rows are float32.

    Args:
        epilogue: Epilogue of the call.
        dtype: Dtype of the operands; if these have scales, inputs have the default dtype of results.
    """
    dtype = OUT_DTYPES[0] if dtype in FLOAT8 else dtype
    wide = torch.promote_types(dtype, torch.float32)
    return [dtype if kind in ("element", "columns") else wide for _, kind in epilogue.inputs]


def with_empty_inputs(
    epilogue: Epilogue, spec: OpSpec, x: Tensor, extents: tuple[int, int], local: Callable[[int], int]
) -> Applied:
    """Returns the epilogue with uninitialized inputs of the usual dtypes.

    Args:
        epilogue: Epilogue of the call.
        spec: Definition of the op.
        x: Operand of this rank.
        extents: M and N over all ranks.
        local: Function from a sharded extent to the rank's part of it.
    """
    rows, columns = spec.result(*extents, local)
    if epilogue.is_partial(spec.sums):
        rows = len(x)
    columns //= 2 if epilogue.pairs else 1
    shapes = {
        "element": (rows, columns), "rows": (rows,), "gathered_rows": (len(x),),
        "columns": (columns,), "scalar": (1,),
    }  # fmt: skip
    inputs = zip(epilogue.inputs, usual_dtypes(epilogue, x.dtype), strict=True)
    return epilogue(**{name: x.new_empty(shapes[kind], dtype=dtype) for (name, kind), dtype in inputs})


def why_after(problem: Problem, columns: int) -> str | None:
    """Returns the reason no kernel can apply a problem's epilogue to its sums; None if one can.

    Args:
        problem: Problem with an epilogue.
        columns: Rows of this rank's weight, that is columns of its product.
    """
    applying, spec = problem.applying, problem.spec
    assert applying is not None, problem
    epilogue = applying.epilogue
    if problem.num_weights > 1 and problem.blocks:
        return why_one_weight(LAYOUTS[problem.blocks])
    if problem.num_weights > 1:
        columns *= problem.num_weights
        if problem.n is not None:  # a rule on N over all ranks gives the same reason on every rank
            columns = 0 if problem.n % problem.world_size else problem.n // problem.world_size
        if columns % (2 * PAIR) or not columns:
            return f"kernels read two weights in bands of {PAIR} rows, equally many on each rank"
    if epilogue.pairs and not spec.gathers_operand:
        return "kernels support pairs of columns in all_gather_gemm only"
    if spec.weight is None and not all(PATTERNS[name].has_epilogue for name in patterns_of(spec.name)):
        return f"the kernel of {spec.name} is registered without epilogues"
    if strange := [dtype for dtype in applying.dtypes if dtype not in INPUT_DTYPES]:
        return f"kernels read inputs of bfloat16, float16 and float32, not {strange[0]}"
    if epilogue.of == "partial" and not spec.sums:
        return "kernels have partial sums in ops that sum over ranks only"
    multiple = ROW_ELEMENTS if epilogue.result is None else ROW_BYTES
    if columns % multiple:
        return f"N={columns} of a rank must be a multiple of {multiple}, which are {ROW_BYTES} bytes"
    if epilogue.result is not None and spec.gathers_output:
        return "kernels that gather results store none of 8 bits"
    if epilogue.result is not None and spec.weight is None:
        return "kernels of all-to-all ops store no results of 8 bits"
    if epilogue.block and not spec.gathers_operand:
        return f"kernels scale blocks of {epilogue.block} columns in all_gather_gemm only"
    if epilogue.outputs and not (spec.sums and problem.world_size > 1):
        return "kernels support outputs in ops that sum over several ranks only"
    is_all_reduce = spec.sums and spec.out is None and problem.world_size > 1
    if epilogue.then is not None and not is_all_reduce:
        return "kernels visit complete rows (then=) in all-reduces only"
    if is_all_reduce and epilogue.needs_one_shot and problem.m > ONE_SHOT_ROWS:
        what = "outputs" if epilogue.outputs else "8-bit results"
        return f"kernels support {what} of an all-reduce up to M={ONE_SHOT_ROWS}, not M={problem.m}"
    return None


def why_one_weight(layout: ScaleLayout) -> str:
    """Returns the reason no kernel reads pairs of two weights that have scales of blocks."""
    return f"kernels read scales of {layout} of one weight"


def applied_after(run: Callable[[CallOperands], Any], applying: Applying) -> Callable[[CallOperands], Any]:
    """Returns a bound function that applies an epilogue after a plain call.

    The function returns a list of the result and the outputs. If an operand is gathered, it returns a tuple
    of that operand and this list.

    Args:
        run: Bound function of the plain call.
        applying: Epilogue of the call.
    """

    def run_and_apply(operands: CallOperands) -> Any:
        result = run(operands)
        if isinstance(result, Tensor):
            return applying.in_one_pass(result, operands.inputs)
        gathered, sums = result
        return gathered, applying.in_one_pass(sums[0] if len(sums) == 1 else tuple(sums), operands.inputs)

    return run_and_apply


def read_by_kernel(visitor: Visitor, inputs: Sequence[Tensor], rows: int, columns: int) -> tuple[Tensor, ...]:
    """Returns the inputs in the layout that a kernel reads.

    Args:
        visitor: Epilogue in the form of kernel configurations.
        inputs: Inputs of the epilogue, without rows if the rank has none.
        rows: Rows of the sums, at least 1.
        columns: Columns of the sums.
    """
    read = []
    for operand, tensor in zip(visitor.reads, inputs, strict=True):
        if operand.is_matrix and tensor.numel():
            if not _is_aligned(tensor):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        else:
            shape = {"element": (rows, columns), "rows": (rows,), "columns": (columns,), "scalar": (1,)}
            extents = shape[operand.kind]
            if tensor.numel():
                tensor = aligned_vector(tensor.reshape(-1), *extents)
            else:
                tensor = tensor.new_zeros(extents)
        read.append(tensor)
    return tuple(read)


def written_by_kernel(
    visitor: Visitor, config: GemmConfig, counts: Tensor | None, x: Tensor, rows: int, columns: int
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Allocates the tensors that a kernel writes for the outputs; returns these, and the outputs among them.

    Args:
        visitor: Epilogue in the form of kernel configurations.
        config: Configuration of the kernel.
        counts: Counts of finished rows (`counts_of`), needed if an output has a value for each row.
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


def written_without_kernel(visitor: Visitor, result: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns the outputs for a result without elements, for which no kernel runs; row values are zeros.

    Args:
        visitor: Epilogue in the form of kernel configurations.
        result: The result.
        dtype: Dtype of outputs with a value for each element.
    """
    return [
        result.new_empty(result.shape, dtype=dtype)
        if kind == "element"
        else result.new_zeros(len(result), dtype=torch.float32)
        for _, kind in visitor.epilogue.returned
    ]


def slice_inputs(visitor: Visitor, inputs: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """Returns the part of each input for the result's columns `first` to `end`, `end` excluded."""
    return [
        tensor[..., first:end] if operand.kind in ("element", "columns") else tensor
        for operand, tensor in zip(visitor.reads, inputs, strict=True)
    ]


def counts_of(config: GemmConfig, rows: int, columns: int, device: torch.device) -> Tensor | None:
    """Returns int64 zeros for a kernel's counts of finished rows; None if no epilogue needs counts."""
    for visitor in config.epilogue:
        for operand in visitor.writes:
            if operand.kind == "row_counts":
                return torch.zeros(operand.shape(config, rows, columns), dtype=torch.int64, device=device)
    return None


def _is_aligned(matrix: Tensor) -> bool:
    pitch = matrix.stride(0) * matrix.itemsize
    return matrix.stride(1) == 1 and pitch % ROW_BYTES == 0 and matrix.data_ptr() % ROW_BYTES == 0
