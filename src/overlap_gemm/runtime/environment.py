"""What users say in the environment: numbers with their rule, and which variable broke it.

Every `OVERLAP_GEMM_` variable that holds a number or a choice is read here, when it is needed. Ranks may have
different environments, so where others wait for this one the reading is an attempt of `agree.together`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fractions import Fraction

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
         "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip


def nbytes(variable: str, default: int) -> int:
    """A size in bytes: a number, with a unit or without.

    Raises:
        ValueError: it is none.
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(
            f"{variable} must be a number of bytes, as 8589934592, or with a unit, as 8GB (10^9) or 8GiB "
            f"(2^30); got {text!r}"
        )
    number, unit = found.groups()
    return int(Fraction(number) * UNITS[(unit or "").lower()])


def seconds(variable: str) -> float | None:
    """A number of seconds, 0 for no limit; None where the variable is not set.

    Raises:
        ValueError: it is none.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 2**32:
        raise ValueError(f"{variable} must be a number of seconds, 0 for no limit; got {text!r}")
    return found


def count(variable: str, of: str, default: int = 0) -> int:
    """A whole number, 0 or more.

    Args:
        variable: its name.
        of: what is counted, for the message.
        default: where it is not set.

    Raises:
        ValueError: it is none.
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{variable} must be a number of {of}, got {text!r}")
    return int(text)


def choice(variable: str, choices: Sequence[str]) -> str:
    """One of several words; the first where it is not set.

    Raises:
        ValueError: it is none of them.
    """
    text = os.environ.get(variable, choices[0])
    if text not in choices:
        raise ValueError(f"{variable} must be {' or '.join(choices)}, got {text!r}")
    return text
