"""Prints Python files of more than 450 lines, and fails if there are any. The habit is 400 (CONTRIBUTING.md).

python tools/lengths.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tools", "tests", "emulator", "benchmarks")
LONGEST = 450


def too_long() -> list[str]:
    """Returns a line for each file that is too long."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    lengths = {file: len(file.read_text().splitlines()) for file in files}
    return [f"{file.relative_to(ROOT)}: {n} lines" for file, n in lengths.items() if n > LONGEST]


if __name__ == "__main__":
    lines = too_long()
    print("\n".join(lines) or f"no file has more than {LONGEST} lines")
    sys.exit(bool(lines))
