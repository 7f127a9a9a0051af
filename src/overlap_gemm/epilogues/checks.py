"""Checks of an epilogue's declaration. Standard library only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .arithmetic import Value


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def check_then(
    name: str, inputs: Mapping[str, str], outputs: Mapping[str, str], taken: list[str], then: Any, of: Any
) -> None:
    """Raises TypeError or ValueError for a second function that does not fit the declaration."""
    if of != "complete" or not outputs or "element" in outputs.values():
        raise ValueError(
            f"epilogue {name}: then= takes complete sums, one of them a value, and outputs for each row "
            f"(row_sum, row_mean, row_max), in the op's type; got outputs=({', '.join(outputs.values())})"
        )
    _, *of_then = parameters_of(then)
    rows, read = of_then[: len(outputs)], of_then[len(outputs) :]
    fit = [[one for one in inputs if one in names] == names for names in (taken, read)]
    if rows != list(outputs) or not all(fit) or set(inputs) - {*taken, *read}:
        raise TypeError(
            f"epilogue {name}: the function must take the sum, then= a value and the outputs "
            f"({', '.join(outputs)}); then each takes some of the inputs ({', '.join(inputs)}), in this "
            f"order, and one takes every input; they take (sum, {', '.join(taken)}) and (value, "
            f"{', '.join(of_then)})"
        )
    if wide := [one for one in read if inputs[one] == "element"]:
        raise ValueError(
            f"epilogue {name}: then= takes inputs of rows, columns and scalars; {wide[0]} is for each "
            "element: let the first function take it"
        )


def check_functions(made: Any) -> None:
    """Raises TypeError if a function of an epilogue fails on placeholders, or does not return values."""
    inputs = [Placeholder()] * len(made.inputs)
    try:
        for value in made.apply([Placeholder()] * (1 + made.pairs), inputs):
            if not isinstance(value, Value):
                raise TypeError(f"it must return values, not numbers or others; got {type(value).__name__}")
        if made.then is None:
            return
        of_columns = [Placeholder(kind == "columns") for _, kind in made.inputs]
        value, *rows = made.finish(Placeholder(), [Placeholder(False)] * len(made.outputs), of_columns)
        if not isinstance(value, Value):
            raise TypeError(f"then= must return values; got {type(value).__name__}")
        for name, row in zip(made.finished, rows, strict=True):
            if not isinstance(row, Placeholder) or row.varies:
                got = "one for each column" if isinstance(row, Placeholder) else type(row).__name__
                raise TypeError(f"{name}, an output of kind 'rows', must be a value for each row; got {got}")
    except Exception as error:
        raise TypeError(
            f"epilogue {made.name}: the function must use + - * /, abs, numbers and functions of "
            f"overlap_gemm.epilogues, and return values; a call with placeholder values failed: {error}"
        ) from error


@dataclass(frozen=True, eq=False)
class Placeholder(Value):
    """Placeholder value: a function that runs on it uses only operations that values have.

    Attributes:
        varies: Whether columns of a row have different values.
    """

    varies: bool = True

    def unary(self, name: str) -> Value:
        """Returns a placeholder."""
        return self

    def binary(self, name: str, left: Any, right: Any) -> Value:
        """Returns a placeholder; raises TypeError for operands that are no values or numbers."""
        for one in (left, right):
            if not isinstance(one, (Placeholder, int, float)):
                raise TypeError(f"an epilogue computes with values and numbers; got {type(one).__name__}")
        return Placeholder(any(isinstance(one, Placeholder) and one.varies for one in (left, right)))
