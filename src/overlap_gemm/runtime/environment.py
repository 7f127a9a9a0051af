"""Environment variables with numbers or choices: parsing, and errors that name the variable and the rule.

Every such `OVERLAP_GEMM_` variable is read through this module, when it is needed; the caller may keep the
value. Ranks may have different environments; therefore, if other ranks wait for this one, the variable is
read within `agree.together`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
         "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def nbytes(variable: str, default: int) -> int:
    """Returns a size in bytes, written as a number with or without a unit.

    Raises:
        ValueError: The text is not a size.
    """

    def parsed(text: str) -> int | None:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
        return None if match is None else int(Fraction(match[1]) * UNITS[(match[2] or "").lower()])

    rule = "a number of bytes, such as 8589934592, 8GB (10^9) or 8GiB (2^30)"
    return _read(variable, default, rule, parsed)


def seconds(variable: str) -> float | None:
    """Returns a number of seconds, 0 for no limit; None if the variable is not set.

    Raises:
        ValueError: The text is not a number of seconds.
    """

    def parsed(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if 0 <= value < 2**32 else None

    return _read(variable, None, "a number of seconds, 0 for no limit", parsed)


def count(variable: str, of: str) -> int:
    """Returns a whole number, 0 or more; 0 if the variable is not set.

    Args:
        variable: Name of the variable.
        of: Name of the counted objects, for the message.

    Raises:
        ValueError: The text is not such a number.
    """
    return _read(variable, 0, f"a number of {of}", lambda text: int(text) if text.isdecimal() else None)


def choice(variable: str, choices: Sequence[str]) -> str:
    """Returns one of several words; the first if the variable is not set.

    Raises:
        ValueError: The text is none of the words.
    """
    return _read(variable, choices[0], " or ".join(choices), lambda text: text if text in choices else None)


def _read(variable: str, default: T, rule: str, parsed: Callable[[str], T | None]) -> T:
    """Returns the parsed value of a variable, or the default; `parsed` returns None for invalid text."""
    text = os.environ.get(variable)
    if text is None:
        return default
    value = parsed(text)
    if value is None:
        raise ValueError(f"{variable} must be {rule}; got {text!r}")
    return value
