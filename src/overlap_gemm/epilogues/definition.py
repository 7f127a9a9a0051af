"""Definition of epilogues: functions that a GEMM applies to its fp32 sums before it rounds and stores them.

An author writes one Python function. Backends without kernels run it on tensors, and tests use that result
as the reference. A kernel traces the same function on values in registers. Standard library only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

from .checks import check_functions, check_then, parameters_of
from .sources import digest_of
from .tensors import along, in_fp32, own_copy, reduced

Sum = Literal["partial", "complete"]
"""Kind of sum that an epilogue's function takes.

``"partial"``: the product of one rank, in an op that then adds the products of all ranks. ``"complete"``: the
sum over K and over all ranks.
"""

InputKind = Literal["element", "rows", "gathered_rows", "columns", "scalar"]
"""Unit of a rank's result for which an input has one value.

``"element"``, ``"rows"``, ``"columns"``: one value for each element, row or column. ``"scalar"``: one value
for the full result. ``"gathered_rows"``: in `all_gather_gemm`, one value for each row of this rank's x; the
values of all ranks are gathered before the kernel.
"""

OutputKind = Literal["element", "row_sum", "row_mean", "row_max", "rows"]
"""Shape of an output: one value for each element, in the op's type even if the result has another; or for
each row the sum, mean or maximum of its values, in fp32 (of float64 operands in float64). ``"rows"``: a value
for each row that `then` returns, in fp32 as well."""

ResultType = Literal["e4m3"]
"""8-bit type of a result: float8_e4m3fn. Values are rounded to nearest; those beyond +-448, infinities
included, become +-448, and a NaN stays NaN."""

BLOCK = 128
"""Columns of a row of an 8-bit result that share a scale, with `block`."""

LARGEST = 448.0
"""Largest value of float8_e4m3fn."""

LEAST_SCALE = 2.0**-60
"""Minimum of scales: the product of two is a normal float32, and zeros need no special case."""

PAIR = 32
"""Width of a pair's column block: PAIR columns of first values (gate), then PAIR of second values (up)."""


@dataclass(frozen=True)
class Epilogue:
    """Function of a GEMM's sums with declared inputs and outputs, made by the decorator `epilogue`.

    Epilogues with the same source and the same declaration are equal. The source includes that of `gradient`.

    Attributes:
        name: Name of the function; part of the kernel's name.
        inputs: (name, kind) of each input, in the order of the function's parameters.
        outputs: (name, kind) of each output of `function` after the result.
        of: Kind of sum that the function takes: "partial" or "complete".
        pairs: Whether the function takes pairs of sums; the result then has half as many columns.
        digest: 16 hexadecimal digits of a SHA-256 of the declaration, the function's source, and the
            sources of functions and values of constants that it uses. The same of `gradient` is included,
            except functions of installed packages. Computed once, by the decorator.
        function: Function of values.
        gradient: Gradient function as in `epilogue`, or None.
        result: Type of the result (`ResultType`); None: that of the op.
        block: Columns of a row of the result that share a scale, `BLOCK`; None: there are no scales.
        then: Function of complete rows, whose values are the result; None: those of `function` are.
        finished: Name of each value for a row that `then` returns after the result, an output of kind "rows".
        first: Positions of the inputs that `function` takes.
        second: Positions of the inputs that `then` takes.
        returned: (name, kind) of each tensor that follows the result: the outputs; or the scales of blocks;
            or with `then` its values of rows, and the values of `function`, named as its first parameter.
        sums_result: Type of the values of `function` if that is all a kernel stores: `result`; with `then`
            they have the op's type.
        key: "name:digest", by which graphs, records and other ranks name it (see `epilogue_of`).
        has_gathered_rows: Whether an input is of kind "gathered_rows".
        reads_outputs: Whether `gradient` reads the result and the outputs: its second parameter has no
            leading underscore.
        reads_inputs: The same of the inputs, its third parameter.
    """

    name: str
    inputs: tuple[tuple[str, InputKind], ...]
    outputs: tuple[tuple[str, OutputKind], ...]
    of: Sum
    pairs: bool
    digest: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    gradient: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    result: ResultType | None = None
    block: int | None = None
    then: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    finished: tuple[str, ...] = ()

    first: tuple[int, ...] = field(init=False, repr=False, compare=False)
    second: tuple[int, ...] = field(init=False, repr=False, compare=False)
    returned: tuple[tuple[str, OutputKind | Literal["blocks"]], ...] = field(
        init=False, repr=False, compare=False
    )
    sums_result: ResultType | None = field(init=False, repr=False, compare=False)
    key: str = field(init=False, repr=False, compare=False)
    has_gathered_rows: bool = field(init=False, repr=False, compare=False)
    reads_outputs: bool = field(init=False, repr=False, compare=False)
    reads_inputs: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sets what every call reads: properties take host time, and compilers trace no cached ones."""
        object.__setattr__(self, "key", f"{self.name}:{self.digest}")
        first = self._taken(self.function, 1 + self.pairs) if self.then else range(len(self.inputs))
        object.__setattr__(self, "first", tuple(first))
        object.__setattr__(self, "second", self._taken(self.then, 1 + len(self.outputs)))
        returned: Any = (("scales", "blocks"),) if self.block else self.outputs
        if self.then is not None:
            of_rows = ((name, "rows") for name in self.finished)
            returned = *of_rows, (parameters_of(self.then)[0], "element")
        object.__setattr__(self, "returned", returned)
        object.__setattr__(self, "sums_result", self.result if self.then is None else None)
        gathered = any(kind == "gathered_rows" for _, kind in self.inputs)
        object.__setattr__(self, "has_gathered_rows", gathered)
        for attribute, position in (("reads_outputs", 1), ("reads_inputs", 2)):
            object.__setattr__(self, attribute, _is_read(self.gradient, position))

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets a copy be the same object, and pickle name it: its function's name is the epilogue's."""
        return imported, (self.function.__module__, self.key)

    def _taken(self, function: Callable[..., Any] | None, after: int) -> tuple[int, ...]:
        """Returns the positions of the inputs that a function takes as parameters ``after`` and later."""
        names = parameters_of(function)[after:] if function else ()
        return tuple(i for i, (name, _) in enumerate(self.inputs) if name in names)

    def is_partial(self, sums: bool) -> bool:
        """Returns whether an op applies the function to each rank's partial sum, before it adds them.

        Args:
            sums: Whether the op adds the products of all ranks (`OpSpec.sums`); else every sum is complete.
        """
        return sums and self.of == "partial"

    @property
    def needs_one_shot(self) -> bool:
        """Returns whether a kernel can apply it in a one-shot all-reduce only.

        There each rank sums entire rows, as outputs need, and no rank sends results, which may have 8 bits.
        """
        return bool(self.outputs) or self.result is not None

    @property
    def with_rows(self) -> Epilogue:
        """Returns the epilogue with inputs of kind "rows" in place of "gathered_rows"; "r" ends its digest.

        `all_gather_gemm` gathers these inputs and then applies the returned epilogue.
        """
        inputs = tuple((name, "rows" if kind == "gathered_rows" else kind) for name, kind in self.inputs)
        made = replace(self, inputs=inputs, digest=f"{self.digest}r")  # type: ignore[arg-type]
        return _known.setdefault(made.key, made)

    def __call__(self, **inputs: Any) -> Applied:
        """Returns the epilogue with its inputs, which ops take as the argument `epilogue=`.

        Ops raise TypeError for an epilogue that was not called; one without inputs is passed as
        `apply_silu()`.

        Args:
            **inputs: Tensor for each declared input, by name; for a scalar also a number. The op checks
                types, shapes and dtypes.

        Raises:
            TypeError: A declared name is missing, or a name is not declared.
        """
        names = [name for name, _ in self.inputs]
        if sorted(inputs) != sorted(names):
            raise TypeError(
                f"epilogue {self.name} takes the inputs ({', '.join(names)}), by name; "
                f"got ({', '.join(inputs)})"
            )
        return Applied(self, tuple([inputs[name] for name in names]))

    def apply(self, sums: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the function's values: the result (or the values that `then` takes), then the outputs.

        Args:
            sums: One sum, or the two sums of a pair: tensors or values of a kernel.
            inputs: Tensor or value for each declared input.

        Raises:
            TypeError: The number of returned values differs from the declaration.
        """
        values = self.function(*sums, *(inputs[i] for i in self.first))
        return self._declared(values, [name for name, _ in self.outputs], "epilogue")

    def finish(
        self, value: Any, rows: Sequence[Any], inputs: Mapping[int, Any] | Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns the values of `then`: the result, then one for each name in `finished`.

        Args:
            value: Stored value of the function.
            rows: Value of each output for the complete row.
            inputs: Tensor or value by position of the input; positions in `second` are read.

        Raises:
            TypeError: The number of returned values differs from the declaration.
        """
        assert self.then is not None
        values = self.then(value, *rows, *(inputs[i] for i in self.second))
        return self._declared(values, self.finished, "then= of epilogue")

    def _declared(self, values: Any, others: Sequence[str], what: str) -> tuple[Any, ...]:
        """Returns what a function returned as a tuple, if it has the result's value and each other one."""
        values = values if isinstance(values, tuple) else (values,)
        if len(values) != 1 + len(others):
            names = ["result", *others]
            raise TypeError(
                f"{what} {self.name} must return ({', '.join(names)}), that is {len(names)} values as "
                f"declared; got {len(values)} values"
            )
        return values

    def on_tensors(self, sums: Any, inputs: Sequence[Any], stored: Any = None) -> tuple[Any, ...]:
        """Applies the function to tensors, in float32 or, for float64 sums, in float64.

        Autograd can differentiate the results.

        Args:
            sums: `[..., columns]`; all leading dimensions are rows. With `pairs` also a tuple of two tensors,
                the first and the second sums, `[..., columns / 2]` each.
            inputs: Tensor for each input. Shape by kind: element `[..., result columns]`, rows `[...]`,
                columns `[result columns]`, scalar any shape with one element.
            stored: Dtype in which values are stored before `then` takes them; None: they are not rounded.

        Returns:
            The result `[..., result columns]`, then each output: `[..., result columns]` for an element
            output, else `[...]`. With `pairs`, result columns are half the columns. Values are not rounded
            to the op's dtype. With `then`: its values, those for each row, and the values of the function.
        """
        parts = [in_fp32(part) for part in self.operands(sums)]
        wide = [tensor.to(parts[0].dtype) for tensor in self.broadcast(inputs)]
        result, *others = self.apply(parts, wide)
        taken, shape = [*wide, result], parts[0].shape
        result, reductions = own_copy(result, wide, shape), []
        for (_, kind), value in zip(self.outputs, others, strict=True):
            is_full = kind == "element"
            reductions.append(own_copy(value, taken, shape) if is_full else reduced(value, kind, shape))
            taken.append(value)
        if self.then is None:
            return result, *reductions
        value = result if stored is None else in_fp32(result.to(stored))
        finished, *rows = self.finish(value, [row.unsqueeze(-1) for row in reductions], wide)
        pairs = enumerate(rows)
        of_rows = [own_copy(row, [*wide, *rows[:i]], (*shape[:-1], 1)).squeeze(-1) for i, row in pairs]
        return own_copy(finished, [*wide, value], shape), *of_rows, result

    def operands(self, sums: Any) -> tuple[Any, ...]:
        """Returns the function's arguments: `(sums,)`, or with `pairs` the first and the second sums.

        Args:
            sums: As in `on_tensors`. With `pairs`, each 64 columns hold 32 first and then 32 second sums.
        """
        if isinstance(sums, tuple):
            return sums
        if not self.pairs:
            return (sums,)
        return tuple(part.flatten(-2) for part in bands(sums))

    def broadcast(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs as tensors that broadcast to the result; shapes are those of `on_tensors`."""
        return [along(tensor, kind) for (_, kind), tensor in zip(self.inputs, inputs, strict=True)]


def bands(sums: Any) -> tuple[Any, Any]:
    """Returns the first and the second sums of pairs as views `[..., columns / 64, 32]` of one tensor."""
    first, second = sums.unflatten(-1, (-1, 2, PAIR)).unbind(-2)
    return first, second


class Applied(NamedTuple):
    """An epilogue with its inputs: the argument `epilogue=` of an op.

    Attributes:
        epilogue: Epilogue to apply.
        inputs: Tensor or number for each declared input, in the order of the declaration.
        otherwise: Function of the op's results, applied instead of the epilogue in compiled graphs, and where
            no kernel can apply it in or after the op. None: the epilogue's function is applied there, too.
    """

    epilogue: Epilogue
    inputs: tuple[Any, ...]
    otherwise: Callable[..., Any] | None = None


def epilogue(
    function: Callable[..., Any] | None = None,
    *,
    inputs: Mapping[str, InputKind] | None = None,
    outputs: Mapping[str, OutputKind] | None = None,
    of: Sum = "complete",
    pairs: bool = False,
    gradient: Callable[..., Any] | None = None,
    result: ResultType | None = None,
    block: int | None = None,
    then: Callable[..., Any] | None = None,
) -> Any:
    """Makes an epilogue of a function; a decorator.

    The function takes one fp32 sum, or two with `pairs`. After them it takes one value of each input. It
    returns the value of the result, or a tuple of that and the value of each output.

    It may use `+ - * /`, `abs`, numbers, functions of `overlap_gemm.epilogues`, and functions made of these.
    The decorator tries it on placeholder values.

    Args:
        function: Function to decorate, with a source in a file or a notebook. Functions made by `exec` have
            none, and lambdas are refused: all lambdas of a line have the same source.
        inputs: Kind of each input (`InputKind`), by the name of the function's parameter.
        outputs: Kind of each output (`OutputKind`) after the result, in the order of the returned tuple.
            Those of kind "rows" are values that `then` returns after its first one. They are the same for
            all columns of a row.
        of: "complete": the function takes the sum over all ranks. "partial": it takes the sum of one rank,
            and the op then adds its results over the ranks. Because they are added, outputs, pairs and a
            gradient are not allowed.
        pairs: Whether the function takes pairs of columns: the first 32 and the last 32 of every 64 columns
            of the product. The result has half the columns. In `all_gather_gemm` a pair may also be the
            products of two weights.
        gradient: Function `(gradients, outputs, inputs)` that returns a tuple: the gradient of the sum, then
            the gradient of each input. All arguments are tuples of tensors; `outputs` begins with the result,
            and `gradients` has one gradient for each of them. An input's gradient is None where it is zero or
            not needed. With this function the outputs and the inputs are saved, but not the sum; a parameter
            with a leading underscore (`_inputs`) gets an empty tuple, and its tensors are not saved. None: in
            calls that need a gradient, no kernel applies the epilogue. The plain op runs, then the function
            on tensors; autograd differentiates both and saves the sum.
        result: "e4m3": the result is rounded to 8 bits (`ResultType`), outputs are not. The function divides
            by the scale, which is an input, unless `block` is passed. A call that needs a gradient raises
            TypeError. None: the result has the op's type.
        block: 128: the op divides each row's values in 128 columns by a scale, and returns the scales after
            the result. A scale is the largest magnitude / 448, at least 2^-60. As in `quantize_rows`, the
            scale of zeros is 2^-60, and a NaN makes its block NaN. Columns are a multiple of 128.
        then: Second function, of complete rows: `then(value, *outputs, *inputs)`. The value is that of the
            first function, rounded to the op's type. Outputs are those of the row; inputs are not of kind
            "element". Its values are the result. After it the op returns outputs of kind "rows", and then the
            first function's values in the op's type; no other outputs. Each of the two functions takes the
            inputs that it names.

    Returns:
        The `Epilogue`. If this process has made one with the same key before, the same object is returned.

    Raises:
        TypeError: The parameters of a function are not the sums (or value and outputs) and the declared
            inputs. Or it uses anything else than the operations above, or returns another number of values
            than declared. Or its source is not available, or it or a function that it uses is a lambda.
        ValueError: A kind or type does not exist; or `of="partial"` is combined with outputs, pairs, a
            gradient or `result`, or `gradient` with `result`. Or `then` is combined with `block`, pairs or
            outputs that are not of rows. Or an output is of kind "rows" without `then`.
    """
    if function is None:
        return lambda function: epilogue(
            function, inputs=inputs, outputs=outputs, of=of, pairs=pairs, gradient=gradient, result=result,
            block=block, then=then,
        )  # fmt: skip
    name, kinds, others = getattr(function, "__name__", "epilogue"), dict(inputs or {}), dict(outputs or {})
    for what, value, allowed in (
        *((f"input {one}", kind, get_args(InputKind)) for one, kind in kinds.items()),
        *((f"output {one}", kind, get_args(OutputKind)) for one, kind in others.items()),
        ("of", of, get_args(Sum)),
        *((("result", result, get_args(ResultType)),) if result is not None else ()),
    ):
        if value not in allowed:
            raise ValueError(f"epilogue {name}: {what} must be one of {', '.join(allowed)}; got {value!r}")
    if of == "partial" and (others or pairs or gradient):
        raise ValueError(
            f"epilogue {name}: of='partial' allows no outputs, pairs or gradient: the values that the "
            "function returns are added up over the ranks; use of='complete'"
        )
    if result is not None and (of == "partial" or gradient):
        raise ValueError(
            f"epilogue {name}: result={result!r} allows no gradient, and complete sums only; got "
            f"of={of!r}, gradient={gradient!r}"
        )
    if block is not None and (block != BLOCK or result is None or others):
        raise ValueError(
            f"epilogue {name}: block must be {BLOCK}, with result='e4m3' and without outputs; got "
            f"block={block!r}, result={result!r}, outputs=({', '.join(others)})"
        )
    taken, declared = parameters_of(function), (kinds, dict(others), of, pairs, result)
    finished = tuple(one for one, kind in others.items() if kind == "rows")
    if then is not None:
        for one in finished:
            del others[one]
        check_then(name, kinds, others, taken[1:], then, None if block or pairs else of)
    elif finished:
        raise ValueError(
            f"epilogue {name}: outputs of kind 'rows' are returned by then=; without it use row_sum, "
            f"row_mean or row_max; got outputs=({', '.join(others)})"
        )
    elif taken[1 + pairs :] != list(kinds):
        raise TypeError(
            f"epilogue {name}: after {'a pair of sums' if pairs else 'the sum'} the function must take the "
            f"inputs ({', '.join(kinds)}), in this order; it takes ({', '.join(taken)})"
        )
    functions = [function] if then is None else [function, then]
    digest = digest_of(name, str((*declared, *([block] if block else []))), functions, gradient)
    made = Epilogue(
        name, tuple(kinds.items()), tuple(others.items()), of, pairs, digest, function, gradient, result,
        block, then, finished,
    )  # fmt: skip
    check_functions(made)
    return _known.setdefault(made.key, made)


def epilogue_of(key: str) -> Epilogue:
    """Returns the epilogue of a key (`Epilogue.key`).

    Raises:
        ValueError: No epilogue of this key has been made in this process.
    """
    if key not in _known:
        raise ValueError(
            f"no epilogue {key} has been made in this process: import the module that defines it, with the "
            f"source it had when the program was traced; known are {', '.join(_known) or 'none'}"
        )
    return _known[key]


def imported(module: str, key: str) -> Epilogue:
    """Returns `epilogue_of` a key after the import of the module that defines it."""
    import_module(module)
    return epilogue_of(key)


_known: dict[str, Epilogue] = {}


def _is_read(gradient: Callable[..., Any] | None, position: int) -> bool:
    """Returns whether a gradient function reads its parameter at a position; True for `*parameters`."""
    if gradient is None:
        return False
    parameters = list(inspect.signature(gradient).parameters.values())[: position + 1]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    return not parameters[-1].name.startswith("_")
