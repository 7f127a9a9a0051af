"""Triton source of a kernel that applies an epilogue to the rows of a matrix; standard library only.

A program has one row, whose columns it takes `COLUMNS` at a time. Values are fp32. Each operation rounds, as
on tensors: there are no fused multiply-adds. An element differs from torch's only where torch approximates a
function otherwise (`exp`, `tanh`, `erf`, ...). A row's width alone determines the order in which its values
are reduced.

With `then`, a second loop computes the first function again, since the row is complete only after the first
loop. It reads from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .arithmetic import Value
from .definition import LARGEST, Epilogue

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
"""

_UNARY = {
    "neg": "-{}",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "libdevice.rsqrt({})",
    "reciprocal": "tl.div_rn(1.0, {})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + tl.exp(-{}))",
    "tanh": "libdevice.tanh({})",
    "erf": "libdevice.erf({})",
}

_BINARY = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "tl.div_rn({}, {})",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}

_FIRST = {"row_sum": "0.0", "row_mean": "0.0", "row_max": 'float("-inf")'}
"""Value with which a reduction begins."""


@dataclass(frozen=True)
class Expression(Value):
    """Value of an epilogue by the name of a variable; each operation adds a line.

    Attributes:
        name: Name of the variable.
        lines: Lines of the source, to which operations are added.
    """

    name: str
    lines: list[str]

    def unary(self, name: str) -> Expression:
        """Returns the function named ``name`` (as in torch) of this value."""
        return self.computed(_UNARY[name].format(self.name))

    def binary(self, name: str, left: Any, right: Any) -> Expression:
        """Returns the function named ``name`` (as in torch) of ``left`` and ``right``: values or numbers."""
        return self.computed(_BINARY[name].format(_text(left), _text(right)))

    def computed(self, text: str) -> Expression:
        """Returns the value of an expression."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return Expression(name, self.lines)


def _text(value: Any) -> str:
    """Returns a value's variable; a number as fp32, of the shape of a vector."""
    return value.name if isinstance(value, Expression) else f"tl.full((), {float(value)!r}, tl.float32)"


def body_of(epilogue: Epilogue, inputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the lines of the function of ``x`` and these inputs, and the names of its values."""
    lines: list[str] = []
    values = epilogue.apply((Expression("x", lines),), [Expression(name, lines) for name in inputs])
    return lines, [_text(value) for value in values]


def kernel_of(epilogue: Epilogue) -> str:
    """Returns the source of the kernel ``apply_epilogue``.

    Its arguments are sums, each input, and each tensor that it writes, in the order of the op's results.
    Constants follow: WIDTH is the number of columns, STRIDE the elements from row to row of sums. Each input
    of kind "element" has a stride, too (``STRIDE_i``). COLUMNS is last. What it writes is contiguous.

    Args:
        epilogue: Epilogue of single sums (no pairs), without scales of blocks.
    """
    inputs = [f"in{i}" for i in range(len(epilogue.inputs))]
    kinds: list[str] = [kind for _, kind in epilogue.inputs]
    of_outputs: list[str] = [kind for _, kind in epilogue.outputs]
    strides = [f"STRIDE_{i}" for i, kind in enumerate(kinds) if kind == "element"]
    written = [f"out{i}" for i in range(1 + len(epilogue.returned))]
    constants = ["WIDTH", "STRIDE", *strides, "COLUMNS"]
    parameters = ["sums", *inputs, *written, *(f"{name}: tl.constexpr" for name in constants)]
    reductions = [(f"r{i}", kind) for i, kind in enumerate(of_outputs) if kind != "element"]

    start = ["row = tl.program_id(0).to(tl.int64)"]
    for i, kind in enumerate(kinds):
        if kind in ("rows", "scalar"):
            start.append(f"i{i} = tl.load(in{i}{' + row' if kind == 'rows' else ''}).to(tl.float32)")
    start += [f"{name} = tl.full((COLUMNS,), {_FIRST[kind]}, tl.float32)" for name, kind in reductions]

    loads = [
        "column = first + tl.arange(0, COLUMNS)",
        "inside = column < WIDTH",
        "x = tl.load(sums + row * STRIDE + column, inside, 0.0).to(tl.float32)",
    ]
    for i, kind in enumerate(kinds):
        if kind in ("element", "columns"):
            place = f"row * STRIDE_{i} + column" if kind == "element" else "column"
            loads.append(f"i{i} = tl.load(in{i} + {place}, inside, 0.0).to(tl.float32)")
    lines, (result, *others) = body_of(epilogue, [f"i{i}" for i in range(len(inputs))])

    first_output = written[0 if epilogue.then is None else 1]
    stores = [*_stored(first_output, result, epilogue.then is None and epilogue.result is not None)]
    for i, (value, kind) in enumerate(zip(others, of_outputs, strict=True)):
        if kind == "element":
            stores += _stored(written[1 + i], value)
            continue
        reduced = f"tl.where(inside, {value}, {_FIRST[kind]})"
        is_max = kind == "row_max"
        stores.append(
            f"r{i} = {_BINARY['maximum'].format(f'r{i}', reduced) if is_max else f'r{i} + {reduced}'}"
        )
    end = []
    for name, kind in reductions:
        if kind == "row_max":  # a reduction to a maximum ignores NaN
            end.append(f"nan = tl.max(({name} != {name}).to(tl.int32), 0)")
            end.append(f'{name} = tl.where(nan > 0, float("nan"), tl.max({name}, 0))')
        else:
            end.append(f"{name} = tl.sum({name}, 0)")
        if kind == "row_mean":
            end.append(f"{name} = tl.div_rn({name}, tl.full((), WIDTH, tl.float32))")
        if epilogue.then is None:
            end.append(f"tl.store({written[1 + int(name[1:])]} + row, {name})")

    text = [*start, "for first in range(0, WIDTH, COLUMNS):", *_indented([*loads, *lines, *stores]), *end]
    if epilogue.then is not None:
        text += [
            "for first in range(0, WIDTH, COLUMNS):",
            *_indented(_finished(epilogue, loads, lines, result)),
        ]
    return f"{HEADER}def apply_epilogue({', '.join(parameters)}):\n" + "\n".join(_indented(text)) + "\n"


def _finished(epilogue: Epilogue, loads: list[str], lines: list[str], result: str) -> list[str]:
    """Returns the lines of the second loop, which computes and stores the values of ``then``."""
    again = [*lines, f"y = ({result}).to(out1.dtype.element_ty).to(tl.float32)"]
    rows = [Expression(f"r{i}", again) for i in range(len(epilogue.outputs))]
    inputs = [Expression(f"i{i}", again) for i in range(len(epilogue.inputs))]
    finished = _text(epilogue.finish(Expression("y", again), rows, inputs))
    return [*loads, *again, *_stored("out0", finished)]


def _stored(target: str, value: str, saturates: bool = False) -> list[str]:
    """Returns the lines that round a value and store it; 8-bit values end at the largest."""
    lines = []
    if saturates:
        low = _BINARY["maximum"].format(value, f"tl.full((), -{LARGEST!r}, tl.float32)")
        lines.append(f"held = {_BINARY['minimum'].format(low, f'tl.full((), {LARGEST!r}, tl.float32)')}")
        value = "held"
    lines.append(
        f"tl.store({target} + row * WIDTH + column, ({value}).to({target}.dtype.element_ty), inside)"
    )
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
