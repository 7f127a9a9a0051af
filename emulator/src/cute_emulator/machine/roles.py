"""Names of warps, for messages and pictures: what each warp of a CTA is for, by its number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Roles = Mapping[int, str] | Callable[[int], str]

_PART = re.compile(r"(\d+)(?:-(\d+))?=([^,=]+)")


def role_of(roles: Roles, warp: int) -> str:
    """The name of a warp, empty where it has none."""
    return roles(warp) if callable(roles) else roles.get(warp, "")


def parse_roles(text: str) -> dict[int, str]:
    """From the command line: ``0-3=epilogue,4=mma,5=load``.

    Raises:
        ValueError: It does not read so.
    """
    found: dict[int, str] = {}
    for part in filter(None, text.split(",")):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"roles {text!r}: {part!r} must read like 4=mma or 0-3=epilogue")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"roles {text!r}: {part!r} names no warp")
        found |= dict.fromkeys(range(first, last + 1), match[3].strip())
    return found
