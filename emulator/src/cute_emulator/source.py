"""PTX lines in words: the instructions around one, and where in the Python source it comes from, if known."""

from __future__ import annotations

import linecache
import re
from bisect import bisect_right
from functools import lru_cache
from pathlib import PurePath

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+\s+\d+\s+\d+)(?:.*inlined_at\s+(\d+\s+\d+\s+\d+))?")
_LIBRARY = re.compile(r"(^|/)(triton/language|include)/")
"""Files whose lines stand for the line of the kernel that calls them."""

INLINE = "inline asm"
"""How LLVM's comments around inline assembly end: "// begin inline asm"."""

AROUND = 3  # instructions shown on either side


@lru_cache(maxsize=32)
def _places(ptx: str) -> tuple[list[int], list[tuple[str, int] | None]]:
    """PTX lines from which on a place of the source holds, and these places: path and line.

    Of inline assembly that is the place where it begins: LLVM counts the lines of its text on from there.
    """
    files = dict(_FILE.findall(ptx))
    lines: list[int] = [0]
    places: list[tuple[str, int] | None] = [None]
    callers: dict[str, str | None] = {}

    def resolved(place: str | None) -> tuple[str, int] | None:
        """The place itself, or the call of the library function that it is in."""
        found, called_from = None, place
        while called_from is not None:
            file, line, _ = called_from.split()
            path = files.get(file, "?")
            found = found or ((path, int(line)) if line != "0" else None)
            if line != "0" and not _LIBRARY.search(path):
                return path, int(line)
            called_from = callers.get(called_from)
        return found

    if files:
        inline = False
        for number, text in enumerate(ptx.split("\n"), 1):
            if text.endswith(INLINE):
                inline = text.lstrip().startswith("// begin inline asm")
            if inline:
                continue
            if (found := _LOC.match(text)) is not None:
                callers[found[1]] = found[2]
                lines.append(number)
                places.append(resolved(found[1]))
            elif text.startswith("}"):
                lines.append(number)
                places.append(None)
    return lines, places


def origin(ptx: str, line: int) -> tuple[str, int] | None:
    """The path and the line of the source that a PTX line comes from; None where that is not known."""
    lines, places = _places(ptx)
    return places[bisect_right(lines, line) - 1]


def place(ptx: str, line: int) -> str:
    """A PTX line for messages, such as ``833 (gemm.py:120)``; the number alone where no more is known."""
    found = origin(ptx, line)
    return f"{line} ({PurePath(found[0]).name}:{found[1]})" if found else str(line)


def line_of_source(ptx: str, line: int) -> tuple[str, int] | None:
    """The file's name and the line in it that a PTX line comes from; None where that is not known."""
    found = origin(ptx, line)
    return (PurePath(found[0]).name, found[1]) if found else None


def _python(ptx: str, line: int) -> str:
    """The line of the Python source that a PTX line comes from; empty where that is not known."""
    found = origin(ptx, line)
    text = linecache.getline(*found).strip() if found else ""
    return f"{PurePath(found[0]).name}:{found[1]}: {text}" if found and text else ""


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
    """An instruction with `AROUND` on either side, below the line of the Python source that it comes from."""
    lines = _lines(ptx)
    if not 0 < line <= len(lines):
        return ""
    near = range(max(1, line - 12 * AROUND), min(len(lines), line + 12 * AROUND) + 1)
    before = [n for n in near if n < line and _instruction(lines[n - 1])]
    after = [n for n in near if n > line and _instruction(lines[n - 1])]
    rows = [_shown(ptx, n, " ") for n in before[-AROUND:]]
    rows += [_shown(ptx, line, ">"), *(_shown(ptx, n, " ") for n in after[:AROUND])]
    python = _python(ptx, line)
    return "\n".join([f"      {python}", *rows] if python else rows)


def other(ptx: str, line: int) -> str:
    """The other party's instruction, below the line of the Python source that it comes from."""
    if not 0 < line <= len(_lines(ptx)):
        return ""
    python = _python(ptx, line)
    return "      the other" + (f", {python}" if python else ":") + "\n" + _shown(ptx, line, ">")
