"""`Epilogue`: a function of sums, which a GEMM applies before it rounds and stores them.

The function is written once. On tensors it is the reference, and what backends without kernels run; kernels
trace it on values in registers. Standard library only.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from .arithmetic import Value

Sum = Literal["partial", "complete"]
"""Of a reduce-scatter and an all-reduce, a rank's product is partial: other ranks have more to add."""

InputKind = Literal["element", "rows", "gathered_rows", "columns", "scalar"]
"""What an input has a value for: each element, each row, each column of the rank's result; or all of it.

``"gathered_rows"``: each row of a rank's shard in `all_gather_gemm`, whose values are gathered, too.
"""

OutputKind = Literal["element", "row_sum", "row_max"]
"""What an output has a value for: each element; or each row, of which it is the sum or the maximum."""

PAIR = 32
"""Columns of a pair's first values, after which as many of the second follow: gate and up of SwiGLU."""


@dataclass(frozen=True)
class Epilogue:
    """A function of a GEMM's sums, with declared inputs and outputs. Made by `epilogue`.

    Two of the same source, inputs and outputs are equal.

    Attributes:
        name: Name of the function; part of the kernel's name.
        inputs: (name, kind) of each input, in the order of the function's parameters.
        outputs: (name, kind) of each output after the result itself.
        of: Whether the function takes partial or complete sums.
        pairs: Whether it takes pairs of sums, and gives half as many columns.
        digest: Digest of the function's source, and of all that it refers to.
        function: The function.
        gradient: Its gradient, or None: see `epilogue`.
    """

    name: str
    inputs: tuple[tuple[str, InputKind], ...]
    outputs: tuple[tuple[str, OutputKind], ...]
    of: Sum
    pairs: bool
    digest: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    gradient: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> str:
        """Name and digest: names the epilogue in graphs, in records and between ranks (`epilogue_of`)."""
        return f"{self.name}:{self.digest}"

    @property
    def with_rows(self) -> Epilogue:
        """Returns the epilogue whose gathered rows are rows of the result."""
        if all(kind != "gathered_rows" for _, kind in self.inputs):
            return self
        inputs = tuple((name, "rows" if kind == "gathered_rows" else kind) for name, kind in self.inputs)
        made = replace(self, inputs=inputs, digest=f"{self.digest}r")  # type: ignore[arg-type]
        return _known.setdefault(made.key, made)

    def __call__(self, **inputs: Any) -> Applied:
        """Returns the epilogue with its inputs: the `epilogue` argument of an op.

        Args:
            **inputs: A tensor for each declared input (for a scalar, also a number).

        Raises:
            TypeError: Names are missing, or not declared.
        """
        names = [name for name, _ in self.inputs]
        if sorted(inputs) != sorted(names):
            raise TypeError(
                f"epilogue {self.name} takes the inputs ({', '.join(names)}), by name; "
                f"got ({', '.join(inputs)})"
            )
        return Applied(self, tuple([inputs[name] for name in names]))

    def apply(self, sums: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the result, then the outputs, of one value (of a pair, two) and the inputs' values.

        Raises:
            TypeError: The function does not return as many values as are declared.
        """
        values = self.function(*sums, *inputs)
        values = values if isinstance(values, tuple) else (values,)
        if len(values) != 1 + len(self.outputs):
            names = ["result", *(name for name, _ in self.outputs)]
            raise TypeError(
                f"epilogue {self.name} must return ({', '.join(names)}), as its outputs are declared; "
                f"got {len(values)} values"
            )
        return values

    def on_tensors(self, sums: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Applies the function to tensors, in float32 (of float64 in that); autograd follows.

        Args:
            sums: `[..., columns]`; all but the columns are rows. Of pairs also a tuple of the two tensors.
            inputs: A tensor for each input: `[..., columns]` as the result, `[...]`, `[columns]` or one
                element.

        Returns:
            The result `[..., columns]` (of pairs, half the columns), and the outputs, `[...]` or as the
            result. None is rounded.
        """
        wide = [_along(_wide(tensor), kind) for (_, kind), tensor in zip(self.inputs, inputs, strict=True)]
        result, *others = self.apply([_wide(part) for part in self.operands(sums)], wide)
        reduced = [_reduced(value, kind) for (_, kind), value in zip(self.outputs, others, strict=True)]
        return result, *reduced

    def operands(self, sums: Any) -> tuple[Any, ...]:
        """Returns the sums as the function takes them: themselves, or the two tensors of the pairs."""
        if isinstance(sums, tuple):
            return sums
        if not self.pairs:
            return (sums,)
        return tuple(part.flatten(-2) for part in sums.unflatten(-1, (-1, 2, PAIR)).unbind(-2))


class Applied(NamedTuple):
    """An epilogue with its inputs.

    Attributes:
        epilogue: The epilogue.
        inputs: A tensor (or number) for each declared input, in that order.
        otherwise: A function of the op's results that replaces the epilogue's where no kernel applies it, and
            in compiled graphs; None: the epilogue's.
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
) -> Any:
    """Makes an epilogue of a function, as a decorator: what ops take as `epilogue=`, with its inputs.

    The function takes an fp32 sum (with `pairs`, two), then a value of each input, and returns the result's
    value, or a tuple of that and each output's. It uses `+ - * /`, `abs`, numbers, and functions of
    `overlap_gemm.epilogues`, or made of these.

    Args:
        function: The function.
        inputs: Kind of each input, by the name of the function's parameter.
        outputs: Kind of each output after the result, in the order in which the function returns them.
        of: "complete": the sum over all ranks; "partial": a rank's part of it, which is added up afterwards.
        pairs: Whether the function takes pairs of columns: of every 64 columns of the product the first 32
            and the last 32. The result has half the columns. In `all_gather_gemm` also those of two weights.
        gradient: `(gradients, outputs, inputs) -> (gradient of the sum, *gradients of the inputs)`, all of
            them tensors, `outputs` with the result in front, a gradient None where it is not wanted or zero.
            None: autograd differentiates the function at the sum, which is kept for it.

    Returns:
        The `Epilogue`.

    Raises:
        TypeError, ValueError: The declaration does not fit the function; the message has the rule.
    """
    if function is None:
        return lambda function: epilogue(
            function, inputs=inputs, outputs=outputs, of=of, pairs=pairs, gradient=gradient
        )
    name, kinds, others = getattr(function, "__name__", "epilogue"), dict(inputs or {}), dict(outputs or {})
    for what, given, allowed in (
        *((f"input {one}", kind, get_args(InputKind)) for one, kind in kinds.items()),
        *((f"output {one}", kind, get_args(OutputKind)) for one, kind in others.items()),
        ("of", of, get_args(Sum)),
    ):
        if given not in allowed:
            raise ValueError(f"epilogue {name}: {what} must be one of {', '.join(allowed)}; got {given!r}")
    if of == "partial" and (others or pairs or gradient):
        raise ValueError(
            f"epilogue {name}: one of partial sums has one result, of the same columns, and no gradient: "
            "what it returns is added up over the ranks"
        )
    taken = list(inspect.signature(function).parameters)
    if taken[1 + pairs :] != list(kinds):
        raise TypeError(
            f"epilogue {name}: after {'a pair of sums' if pairs else 'the sum'} the function must take the "
            f"inputs ({', '.join(kinds)}), in this order; it takes ({', '.join(taken)})"
        )
    made = Epilogue(
        name, tuple(kinds.items()), tuple(others.items()), of, pairs,
        _digest(name, function, str((kinds, others, of, pairs)), gradient), function, gradient,
    )  # fmt: skip
    try:
        made.apply([_Probe()] * (1 + pairs), [_Probe()] * len(kinds))
    except Exception as error:
        raise TypeError(
            f"epilogue {name}: a function of values uses + - * /, abs, numbers and functions of "
            f"overlap_gemm.epilogues, and returns values; run on a value it failed: {error}"
        ) from error
    return _known.setdefault(made.key, made)


def epilogue_of(key: str) -> Epilogue:
    """Returns the epilogue of a key.

    Raises:
        ValueError: None has been made in this process.
    """
    if key not in _known:
        raise ValueError(
            f"no epilogue {key} has been made in this process: import the module that defines it, as it was "
            f"when the program was traced; there are {', '.join(_known) or 'none'}"
        )
    return _known[key]


_known: dict[str, Epilogue] = {}


class _Probe(Value):
    """A placeholder for any value: a function that runs on it uses nothing that values do not have."""

    def unary(self, name: str) -> Value:
        return self

    def binary(self, name: str, left: Any, right: Any) -> Value:
        for one in (left, right):
            if not isinstance(one, (_Probe, int, float)):
                raise TypeError(f"an epilogue computes with values and numbers; got {type(one).__name__}")
        return self


def _wide(tensor: Any) -> Any:
    return tensor if tensor.element_size() == 8 else tensor.float()


def _along(tensor: Any, kind: InputKind) -> Any:
    if kind == "scalar":
        return tensor.reshape(())
    return tensor.unsqueeze(-1) if kind in ("rows", "gathered_rows") else tensor


def _reduced(tensor: Any, kind: OutputKind) -> Any:
    if kind == "element":
        return tensor
    return tensor.sum(-1) if kind == "row_sum" else tensor.amax(-1)


def _digest(name: str, function: Callable[..., Any], declared: str, gradient: Any) -> str:
    digest = hashlib.sha256(declared.encode())
    texts = _texts(name, function, set()) + ([] if gradient is None else [inspect.getsource(gradient)])
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _texts(name: str, function: Any, seen: set[int]) -> list[str]:
    """Returns the sources of a function and of the functions it calls, and the constants it uses."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    try:
        texts = [textwrap.dedent(inspect.getsource(function))]
    except (OSError, TypeError) as error:
        raise TypeError(
            f"epilogue {name}: the source of {function!r} must be in a file or a notebook, since kernels are "
            f"kept by it: {error}"
        ) from error
    code, closure = function.__code__, inspect.getclosurevars(function)
    referred = {**closure.globals, **closure.nonlocals}
    for one, value in sorted(referred.items()):
        if inspect.isfunction(value):
            texts += _texts(name, value, seen)
        elif value is None or isinstance(value, (bool, int, float, str)):
            texts.append(f"{one}={value!r}")
        elif not isinstance(value, ModuleType):
            raise TypeError(
                f"epilogue {name}: {one} in {code.co_name} is a {type(value).__name__}; an epilogue refers "
                "to numbers and functions only, what else it reads is an input"
            )
        else:
            texts += [
                text
                for attribute in sorted(set(code.co_names))
                if inspect.isfunction(called := getattr(value, attribute, None))
                for text in _texts(name, called, seen)
            ]
    return texts
