"""What users say in the environment: numbers with their rule, and which variable broke it.

Every `OVERLAP_GEMM_` variable that holds a number or a choice is read here, when it is needed. Ranks may have
different environments, so where others wait for this one the reading is an attempt of `agree.together`.
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
    """A size in bytes: a number, with a unit or without.

    Raises:
        ValueError: it is none.
    """

    def parsed(text: str) -> int | None:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
        return None if found is None else int(Fraction(found[1]) * UNITS[(found[2] or "").lower()])

    rule = "a number of bytes, as 8589934592, or with a unit, as 8GB (10^9) or 8GiB (2^30)"
    return _read(variable, default, rule, parsed)


def seconds(variable: str) -> float | None:
    """A number of seconds, 0 for no limit; None where the variable is not set.

    Raises:
        ValueError: it is none.
    """

    def parsed(text: str) -> float | None:
        try:
            found = float(text)
        except ValueError:
            return None
        return found if 0 <= found < 2**32 else None

    return _read(variable, None, "a number of seconds, 0 for no limit", parsed)


def count(variable: str, of: str) -> int:
    """A whole number, 0 or more; 0 where the variable is not set.

    Args:
        variable: its name.
        of: what is counted, for the message.

    Raises:
        ValueError: it is none.
    """
    return _read(variable, 0, f"a number of {of}", lambda text: int(text) if text.isdecimal() else None)


def choice(variable: str, choices: Sequence[str]) -> str:
    """One of several words; the first where it is not set.

    Raises:
        ValueError: it is none of them.
    """
    return _read(variable, choices[0], " or ".join(choices), lambda text: text if text in choices else None)


def _read(variable: str, default: T, rule: str, parsed: Callable[[str], T | None]) -> T:
    """What a variable says; `parsed`: of its text, None where it is against the rule."""
    text = os.environ.get(variable)
    if text is None:
        return default
    found = parsed(text)
    if found is None:
        raise ValueError(f"{variable} must be {rule}; got {text!r}")
    return found
