"""Digests of an epilogue's source: the key of its compiled kernels. Standard library only."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def digest_of(name: str, declared: str, functions: Sequence[Callable[..., Any]], gradient: Any) -> str:
    """Returns the key of an epilogue's source: its declaration, functions and gradient."""
    digest, seen = hashlib.sha256(declared.encode()), set[int]()
    texts = [text for function in functions for text in _texts(name, function, seen)]
    texts += [] if gradient is None else [_source(name, gradient)]
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _source(name: str, function: Any) -> str:
    """Returns the source of a function; raises TypeError if it has none or is a lambda."""
    if getattr(function, "__name__", "") == "<lambda>":  # the source of all lambdas of a line is the same
        raise TypeError(
            f"epilogue {name}: define functions with def, not with lambda: kernels are kept by name"
        )
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise TypeError(
            f"epilogue {name}: the source of {function!r} must be in a file or a notebook, because the key "
            f"of a compiled kernel contains it: {error}"
        ) from error


def _texts(name: str, function: Any, seen: set[int]) -> list[str]:
    """Returns the sources of a function and of the functions it calls, and the constants it uses."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    defaults = function.__defaults__, function.__kwdefaults__  # the source may name a constant
    texts = [_source(name, function), repr(defaults)]
    code, closure = function.__code__, inspect.getclosurevars(function)
    referred = {**closure.globals, **closure.nonlocals}
    for one, value in sorted(referred.items()):
        if inspect.isfunction(value):
            texts += _texts(name, value, seen)
        elif value is None or isinstance(value, (bool, int, float, str)):
            texts.append(f"{one}={value!r}")
        elif not isinstance(value, ModuleType):
            raise TypeError(
                f"epilogue {name}: {one} in {code.co_name} is a {type(value).__name__}; an epilogue may "
                "refer to numbers and functions only; declare everything else that it reads as an input"
            )
        else:
            texts += [
                text
                for attribute in sorted(set(code.co_names))
                if inspect.isfunction(called := getattr(value, attribute, None))
                for text in _texts(name, called, seen)
            ]
    return texts
