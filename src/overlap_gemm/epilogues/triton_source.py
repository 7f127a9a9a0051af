"""Triton source of a kernel that applies an epilogue to the rows of a matrix; standard library only.

A program has one row, whose columns it takes `COLUMNS` at a time. Values are fp32. Each operation rounds, as
on tensors: there are no fused multiply-adds. An element differs from torch's only where torch approximates a
function otherwise (`exp`, `tanh`, `erf`, ...), and by a sigmoid's quotient. That is within 2 units in the
last place, as in GEMM kernels; an exact one takes as many instructions as the rest of a SwiGLU. The width of
a row alone determines the order in which its values are reduced.

With `then`, a second loop computes the first function again, since the row is complete only after the first
loop. It reads from the L2 cache.

| sums | pointers | columns of a pair |
|---|---|---|
| single | ``sums0`` | |
| pairs of two tensors | ``sums0``, ``sums1`` | the same of both |
| pairs in bands of one tensor | ``sums0``, twice | 32 of the first sums, then 32 of the second |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .arithmetic import Value
from .definition import BLOCK, LARGEST, LEAST_SCALE, PAIR, Epilogue

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit(do_not_specialize=("SCALES",))
"""

_UNARY = {
    "neg": "-{}",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "libdevice.rsqrt({})",
    "reciprocal": "tl.div_rn(1.0, {})",
    "sigmoid": "libdevice.fast_dividef(1.0, 1.0 + tl.exp(-{}))",
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


_LOOP = "for first in range(0, WIDTH, COLUMNS):"

_BY_BLOCKS = (
    # Magnitudes are compared as integers, of which a NaN is the largest.
    "most = tl.max(tiles.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)",
    f"scale = most * {1 / LARGEST!r}",
    f"scale = tl.where(scale < {LEAST_SCALE!r}, {LEAST_SCALE!r}, scale)",
    "narrow = tl.reshape(tiles * tl.div_rn(1.0, scale)[:, None], (COLUMNS,))",
    f"block = first // {BLOCK} + tl.arange(0, COLUMNS // {BLOCK})",
    f"tl.store(out1 + block * SCALES + row, scale, block * {BLOCK} < WIDTH)",
)
"""Lines that divide `tiles` by the scales of blocks and store these, as `backends.epilogues` on tensors."""


@dataclass(frozen=True, eq=False)
class Expression(Value):
    """Value of an epilogue by the name of a variable; each operation adds a line.

    Attributes:
        name: Name of the variable.
        lines: Lines of the source, to which operations are added.
        varies: Whether columns of a row have different values.
    """

    name: str
    lines: list[str]
    varies: bool = True

    def unary(self, name: str) -> Expression:
        """Returns the function named ``name`` (as in torch) of this value."""
        return self._computed(_UNARY[name].format(self.name), self)

    def binary(self, name: str, left: Any, right: Any) -> Expression:
        """Returns the function named ``name`` (as in torch) of ``left`` and ``right``: values or numbers."""
        return self._computed(_BINARY[name].format(_text(left), _text(right)), left, right)

    def _computed(self, text: str, *operands: Any) -> Expression:
        name, varies = f"v{len(self.lines)}", any(getattr(one, "varies", False) for one in operands)
        self.lines.append(f"{name} = {text}")
        return Expression(name, self.lines, varies)


def _text(value: Any) -> str:
    """Returns a value's variable; a number as fp32, of no dimension."""
    if isinstance(value, Expression):
        return value.name
    number = repr(float(value))
    number = number if math.isfinite(float(value)) else f'float("{number}")'
    return f"tl.full((), {number}, tl.float32)"


def is_uniform_in_8_bits(epilogue: Epilogue) -> bool:
    """Returns whether all columns of a row get one value, of 8 bits.

    Triton 3.6 rounds such a value to wrong bytes (seen on an H200; 3.9 in the emulator does not).
    """
    return epilogue.result is not None and not _Kernel(epilogue, False).varies


def kernel_of(epilogue: Epilogue, bands: bool = False) -> str:
    """Returns the source of the kernel ``apply_epilogue``.

    Its arguments are the sums, each input, and each tensor that it writes, in the order of the op's results.
    With scales of blocks their elements from block to block (SCALES) follow. Then come constants: WIDTH is
    the number of columns of the result, ``STRIDE0`` the elements from row to row of the sums. Each input of
    kind "element" has a stride, too (``STRIDE_i``). COLUMNS is last, a multiple of 128. What the kernel
    writes is contiguous, but for scales of blocks.

    Args:
        epilogue: Epilogue of complete sums.
        bands: Whether the sums of a pair are in bands of one tensor.
    """
    return _Kernel(epilogue, bands).source


class _Kernel:
    """The parts of a kernel's source, as lines.

    Args:
        epilogue: Epilogue.
        bands: As in `kernel_of`.
    """

    def __init__(self, epilogue: Epilogue, bands: bool) -> None:
        self.epilogue, self.bands = epilogue, bands
        self.kinds: list[str] = [kind for _, kind in epilogue.inputs]
        outputs: list[str] = [kind for _, kind in epilogue.outputs]
        self.reductions = [(i, kind) for i, kind in enumerate(outputs) if kind != "element"]
        self.lines: list[str] = []
        inputs = [
            Expression(f"i{i}", self.lines, kind in ("element", "columns"))
            for i, kind in enumerate(self.kinds)
        ]
        names = ("x0", "x1") if epilogue.pairs else ("x0",)
        values = epilogue.apply([Expression(name, self.lines) for name in names], inputs)
        self.result, *self.outputs = map(_text, values)
        self.stream = f"out{len(epilogue.returned)}"  # of the first function's values, with `then`
        self.varies = values[0].varies
        if epilogue.then is not None:
            self.varies = self._finish([], self.varies)[0].varies

    @property
    def source(self) -> str:
        """Returns the source."""
        first = [*self._loads(), *self.lines, *self._stores(), *self._reduced()]
        text = [*self._start(), _LOOP, *_indented(first), *self._end()]
        if self.epilogue.then is not None:
            text += [_LOOP, *_indented([*self._loads(), *self._finished()])]
        stride = ["SCALES"] if self.epilogue.block else []  # it changes with the rows, so it is no constant
        constants = (f"{name}: tl.constexpr" for name in self._constants())
        parameters = ", ".join([*self._tensors(), *stride, *constants])
        return f"{HEADER}def apply_epilogue({parameters}):\n" + "\n".join(_indented(text)) + "\n"

    @property
    def _pointers(self) -> tuple[str, ...]:
        return ("sums0", "sums1") if self.epilogue.pairs and not self.bands else ("sums0",)

    def _tensors(self) -> Iterator[str]:
        yield from self._pointers
        yield from (f"in{i}" for i in range(len(self.kinds)))
        yield from (f"out{i}" for i in range(1 + len(self.epilogue.returned)))

    def _constants(self) -> Iterator[str]:
        yield "WIDTH"
        yield from (f"STRIDE{name[-1]}" for name in self._pointers)
        yield from (f"STRIDE_{i}" for i, kind in enumerate(self.kinds) if kind == "element")
        yield "COLUMNS"

    def _start(self) -> Iterator[str]:
        yield "row = tl.program_id(0).to(tl.int64)"
        for i, kind in enumerate(self.kinds):
            if kind in ("rows", "scalar"):
                yield f"i{i} = tl.load(in{i}{' + row' if kind == 'rows' else ''}).to(tl.float32)"
        for i, kind in self.reductions:
            yield f"r{i} = tl.full((COLUMNS,), {_FIRST[kind]}, tl.float32)"

    def _loads(self) -> Iterator[str]:
        yield "column = first + tl.arange(0, COLUMNS)"
        yield "inside = column < WIDTH"
        if self.bands:
            band = f"column // {PAIR} * {2 * PAIR} + column % {PAIR}"
            yield _load("x0", f"sums0 + row * STRIDE0 + {band}")
            yield _load("x1", f"sums0 + row * STRIDE0 + {band} + {PAIR}")
        else:
            for name in self._pointers:
                yield _load(f"x{name[-1]}", f"{name} + row * STRIDE{name[-1]} + column")
        for i, kind in enumerate(self.kinds):
            if kind == "element":
                yield _load(f"i{i}", f"in{i} + row * STRIDE_{i} + column")
            elif kind == "columns":
                yield _load(f"i{i}", f"in{i} + column")

    def _stores(self) -> Iterator[str]:
        if self.epilogue.block:
            yield f"tiles = tl.reshape({self.result}, (COLUMNS // {BLOCK}, {BLOCK}))"
            yield from _BY_BLOCKS
            yield from _stored("out0", "narrow", saturates=True)
        elif self.epilogue.then is not None:
            yield from _stored(self.stream, self.result)
        else:
            yield from _stored("out0", self.result, saturates=self.epilogue.result is not None)
        reduced = dict(self.reductions)
        for i, value in enumerate(self.outputs):
            if i not in reduced:
                yield from _stored(f"out{1 + i}", value)

    def _reduced(self) -> Iterator[str]:
        for i, kind in self.reductions:
            value = f"tl.where(inside, {self.outputs[i]}, {_FIRST[kind]})"
            operation = _BINARY["maximum" if kind == "row_max" else "add"]
            yield f"r{i} = {operation.format(f'r{i}', value)}"

    def _end(self) -> Iterator[str]:
        for i, kind in self.reductions:
            if kind == "row_max":  # a reduction to a maximum ignores NaN
                yield f"nan = tl.max((r{i} != r{i}).to(tl.int32), 0)"
                yield f'r{i} = tl.where(nan > 0, float("nan"), tl.max(r{i}, 0))'
            else:
                yield f"r{i} = tl.sum(r{i}, 0)"
            if kind == "row_mean":
                yield f"r{i} = tl.div_rn(r{i}, tl.full((), WIDTH, tl.float32))"
            if self.epilogue.then is None:
                yield f"tl.store(out{1 + i} + row, r{i})"

    def _finished(self) -> list[str]:
        """Returns the lines of the second loop, which computes and stores the values of ``then``."""
        again = [*self.lines, f"y = ({self.result}).to({self.stream}.dtype.element_ty).to(tl.float32)"]
        value, *of_rows = map(_text, self._finish(again))
        stores = [f"tl.store(out{1 + i} + row, {text})" for i, text in enumerate(of_rows)]
        return [*again, *stores, *_stored("out0", value, saturates=self.epilogue.result is not None)]

    def _finish(self, lines: list[str], varies: bool = True) -> tuple[Any, ...]:
        """Returns the values of ``then``, of a value that may be the same for all columns."""
        rows = [Expression(f"r{i}", lines, False) for i, _ in self.reductions]
        inputs = [Expression(f"i{i}", lines, kind == "columns") for i, kind in enumerate(self.kinds)]
        return self.epilogue.finish(Expression("y", lines, varies), rows, inputs)


def _load(name: str, place: str) -> str:
    return f"{name} = tl.load({place}, inside, 0.0).to(tl.float32)"


def _stored(target: str, value: str, saturates: bool = False) -> Iterator[str]:
    """Yields the lines that round a value and store it; 8-bit values end at the largest."""
    if saturates:
        low = _BINARY["maximum"].format(value, _text(-LARGEST))
        yield f"held = {_BINARY['minimum'].format(low, _text(LARGEST))}"
        value = "held"
    yield f"tl.store({target} + row * WIDTH + column, ({value}).to({target}.dtype.element_ty), inside)"


def _indented(lines: Iterator[str] | Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
