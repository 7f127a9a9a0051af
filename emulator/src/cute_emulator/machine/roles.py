"""Names of warps, for messages and pictures: the role of each warp of a CTA, by its number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Roles = Mapping[int, str] | Callable[[int], str]

_PART = re.compile(r"(\d+)(?:-(\d+))?=([^,=]+)")


def role_of(roles: Roles, warp: int) -> str:
    """Returns the name of a warp, empty if it has none."""
    return roles(warp) if callable(roles) else roles.get(warp, "")


def parse_roles(text: str) -> dict[int, str]:
    """Parses names of the command line: ``0-3=epilogue,4=mma,5=load``.

    Raises:
        ValueError: The syntax is wrong.
    """
    roles: dict[int, str] = {}
    for part in filter(None, text.split(",")):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"roles {text!r}: {part!r} must read like 4=mma or 0-3=epilogue")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"roles {text!r}: {part!r} names no warp")
        roles |= dict.fromkeys(range(first, last + 1), match[3].strip())
    return roles
