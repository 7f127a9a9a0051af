"""Digests of an epilogue's source: the key of its compiled kernels. Standard library only."""

from __future__ import annotations

import dis
import hashlib
import inspect
import site
import sysconfig
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

CONSTANTS = bool, int, float, str, type(None)
"""Types of values that functions may refer to, in addition to functions."""

INSTALLED = sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()
"""Folders of packages whose functions are the same throughout a process, torch's among them."""


def digest_of(name: str, declared: str, functions: Sequence[Callable[..., Any]], gradient: Any) -> str:
    """Returns the key of an epilogue's source: its declaration, functions and gradient."""
    digest, seen = hashlib.sha256(declared.encode()), dict[int, int]()
    texts = [text for function in functions for text in _texts(name, function, seen)]
    if gradient is not None:
        texts += _texts(name, gradient, seen, of_gradient=True)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _source(name: str, function: Any) -> str:
    """Returns the source of a function; raises TypeError if it has none or is a lambda."""
    code = getattr(function, "__code__", function)  # the source of a wrapper would be what it wraps
    if getattr(code, "co_name", "") == "<lambda>":  # the source of all lambdas of a line is the same
        raise TypeError(
            f"epilogue {name}: define functions with def, not with lambda: kernels are kept by name"
        )
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError) as error:
        raise TypeError(
            f"epilogue {name}: the source of {function!r} must be in a file or a notebook, because the key "
            f"of a compiled kernel contains it: {error}"
        ) from error


def _texts(name: str, function: Any, seen: dict[int, int], of_gradient: bool = False) -> list[str]:
    """Returns the sources of a function and of the functions it calls, and the constants it uses.

    Args:
        name: Name of the epilogue.
        function: Function made with `def`.
        seen: Numbers of the functions before, by identity; such a function has its number as its text.
        of_gradient: Whether it is a gradient or one of its functions, which may refer to everything. Objects
            of other types are left out, and functions of `INSTALLED` packages.
    """
    if id(function) in seen:
        return [f"function {seen[id(function)]}"]
    seen[id(function)] = len(seen)
    if not inspect.isfunction(function) and not of_gradient:
        raise TypeError(
            f"epilogue {name}: define functions with def; got a {type(function).__name__}, which may hold "
            "values that its source does not contain"
        )
    texts = [_source(name, function)]
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        added = _texts_of_value(name, "default", value, seen, of_gradient)
        if added is not None:
            texts += added
        elif not of_gradient:
            texts.append(repr(value))
    attributes = sorted({one for code in _codes(function.__code__) for one in code.co_names})
    for one, value in sorted(_referred(function).items()):
        if isinstance(value, ModuleType):
            texts += _texts_of_module(name, value, attributes, seen, of_gradient)
        elif (added := _texts_of_value(name, one, value, seen, of_gradient)) is not None:
            texts += added
        elif not of_gradient:
            raise TypeError(
                f"epilogue {name}: {one} in {function.__name__} is a {type(value).__name__}; an epilogue may "
                "refer to numbers and functions only; declare everything else that it reads as an input"
            )
    return texts


def _referred(function: Any) -> dict[str, Any]:
    """Returns the global values and those of outer functions that a function refers to, by name."""
    read = [one for code in _codes(function.__code__) for one in dis.get_instructions(code)]
    names = {one.argval for one in read if one.opname in _OF_GLOBALS}
    values = {one: function.__globals__[one] for one in names if one in function.__globals__}
    return {**values, **inspect.getclosurevars(function).nonlocals}


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that read a global name."""


def _codes(code: CodeType) -> list[CodeType]:
    """Returns a function's code and that of the functions and comprehensions in it."""
    inner = [one for one in code.co_consts if inspect.iscode(one)]
    return [code, *(held for one in inner for held in _codes(one))]


def _texts_of_value(
    name: str, one: str, value: Any, seen: dict[int, int], of_gradient: bool
) -> list[str] | None:
    """Returns the texts of a function or a constant named `one`; None for everything else."""
    if inspect.isfunction(value):
        if of_gradient and value.__code__.co_filename.startswith(INSTALLED):
            return None
        return _texts(name, value, seen, of_gradient)
    return [f"{one}={value!r}"] if isinstance(value, CONSTANTS) else None


def _texts_of_module(
    name: str,
    module: ModuleType,
    attributes: Sequence[str],
    seen: dict[int, int],
    of_gradient: bool,
    path: tuple[str, ...] = (),
) -> list[str]:
    """Returns the texts of a module's attributes, and those of its modules, that a function names.

    Args:
        name: Name of the epilogue.
        module: Module that the function refers to.
        attributes: Names of attributes in the function.
        seen: As in `_texts`.
        of_gradient: As in `_texts`.
        path: Names of the modules that led to this one; none is entered twice.
    """
    texts = [f"module {module.__name__}"]
    if module.__name__ in path:
        return texts
    for attribute in attributes:
        value = getattr(module, attribute, None)
        if isinstance(value, ModuleType):
            texts += _texts_of_module(name, value, attributes, seen, of_gradient, (*path, module.__name__))
        elif value is not None:
            texts += _texts_of_value(name, attribute, value, seen, of_gradient) or []
    return texts
