"""Which line of the Python source a PTX instruction comes from, where the PTX has line information."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from pathlib import PurePath

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")


@lru_cache(maxsize=32)
def _places(ptx: str) -> tuple[list[int], list[str]]:
    """PTX lines from which on a place of the source holds, and these places."""
    files = {number: PurePath(path).name for number, path in _FILE.findall(ptx)}
    lines, places = [0], [""]
    if files:
        for number, text in enumerate(ptx.split("\n"), 1):
            found = _LOC.match(text)
            if found is not None:
                lines.append(number)
                places.append(f"{files.get(found[1], '?')}:{found[2]}" if found[2] != "0" else "")
            elif text.startswith("}"):
                lines.append(number)
                places.append("")
    return lines, places


def place(ptx: str, line: int) -> str:
    """A PTX line for messages, such as ``833 (gemm.py:120)``; the number alone where no more is known."""
    lines, places = _places(ptx)
    known = places[bisect_right(lines, line) - 1]
    return f"{line} ({known})" if known else str(line)
