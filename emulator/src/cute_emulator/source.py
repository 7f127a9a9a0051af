"""PTX lines for messages: the instructions around a line, and the line of the Python source, if known."""

from __future__ import annotations

import linecache
import re
from bisect import bisect_right
from functools import lru_cache
from pathlib import PurePath

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+\s+\d+\s+\d+)(?:.*inlined_at\s+(\d+\s+\d+\s+\d+))?")
_LIBRARY = re.compile(r"(^|/)(triton/language|include)/")
"""Files whose lines are replaced by the line of the kernel that calls them."""

INLINE = "inline asm"
"""End of LLVM's comments around inline assembly: "// begin inline asm"."""

AROUND = 3  # instructions shown on either side


@lru_cache(maxsize=32)
def _places(ptx: str) -> tuple[list[int], list[tuple[str, int] | None]]:
    """Returns the PTX lines at which a position of the source begins, and these positions: path and line.

    For inline assembly the position is its first line: LLVM counts the lines of its text on from there.
    """
    files = dict(_FILE.findall(ptx))
    lines: list[int] = [0]
    places: list[tuple[str, int] | None] = [None]
    callers: dict[str, str | None] = {}

    def resolved(place: str | None) -> tuple[str, int] | None:
        """Returns the position itself, or the call of the library function that contains it."""
        innermost, called_from = None, place
        while called_from is not None:
            file, line, _ = called_from.split()
            path = files.get(file, "?")
            innermost = innermost or ((path, int(line)) if line != "0" else None)
            if line != "0" and not _LIBRARY.search(path):
                return path, int(line)
            called_from = callers.get(called_from)
        return innermost

    if files:
        inline = False
        for number, text in enumerate(ptx.split("\n"), 1):
            if text.endswith(INLINE):
                inline = text.lstrip().startswith("// begin inline asm")
            if inline:
                continue
            if (match := _LOC.match(text)) is not None:
                callers[match[1]] = match[2]
                lines.append(number)
                places.append(resolved(match[1]))
            elif text.startswith("}"):
                lines.append(number)
                places.append(None)
    return lines, places


def origin(ptx: str, line: int) -> tuple[str, int] | None:
    """Returns the path and the line of the source that a PTX line is compiled from; None if unknown."""
    lines, places = _places(ptx)
    return places[bisect_right(lines, line) - 1]


def place(ptx: str, line: int) -> str:
    """Returns a PTX line for messages, such as ``833 (gemm.py:120)``, or the number alone.

    The number alone is returned if its source is unknown.
    """
    source = origin(ptx, line)
    return f"{line} ({PurePath(source[0]).name}:{source[1]})" if source else str(line)


def line_of_source(ptx: str, line: int) -> tuple[str, int] | None:
    """Returns the file's name and the line that a PTX line is compiled from; None if unknown."""
    source = origin(ptx, line)
    return (PurePath(source[0]).name, source[1]) if source else None


def _python(ptx: str, line: int) -> str:
    """Returns the line of the Python source that a PTX line is compiled from; empty if unknown."""
    source = origin(ptx, line)
    text = linecache.getline(*source).strip() if source else ""
    return f"{PurePath(source[0]).name}:{source[1]}: {text}" if source and text else ""


@lru_cache(maxsize=4)
def _lines(ptx: str) -> list[str]:
    return ptx.split("\n")


def _instruction(text: str) -> bool:
    text = text.strip()
    return bool(text) and not text.startswith((".", "//", "{", "}", ")", "$L__tmp", "$L__func"))


def _shown(ptx: str, line: int, mark: str) -> str:
    text = " ".join(_lines(ptx)[line - 1].split())
    return f"    {mark} {line:>6} | {text if len(text) <= 160 else text[:157] + '...'}"


def excerpt(ptx: str, line: int) -> str:
    """Returns an instruction with `AROUND` on either side, below its line of the Python source."""
    lines = _lines(ptx)
    if not 0 < line <= len(lines):
        return ""
    window = range(max(1, line - 12 * AROUND), min(len(lines), line + 12 * AROUND) + 1)
    before = [n for n in window if n < line and _instruction(lines[n - 1])]
    after = [n for n in window if n > line and _instruction(lines[n - 1])]
    rows = [_shown(ptx, n, " ") for n in before[-AROUND:]]
    rows += [_shown(ptx, line, ">"), *(_shown(ptx, n, " ") for n in after[:AROUND])]
    python = _python(ptx, line)
    return "\n".join([f"      {python}", *rows] if python else rows)


def other(ptx: str, line: int) -> str:
    """Returns the other party's instruction, below its line of the Python source."""
    if not 0 < line <= len(_lines(ptx)):
        return ""
    python = _python(ptx, line)
    return "      the other" + (f", {python}" if python else ":") + "\n" + _shown(ptx, line, ">")
