"""No module needs a newer Python than the lowest that is promised.

Of newer syntax ruff says so, too (`target-version`), of newer names in annotations mypy (`python_version`).
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "emulator/src", "examples", "tests", "emulator/tests", "benchmarks")


def promised():
    found = {setting("requires-python", folder).removeprefix(">=") for folder in (".", "emulator")}
    assert len(found) == 1, found
    return found.pop()


def setting(name, folder="."):
    [value] = re.findall(rf'^{name} = "(.*)"$', (ROOT / folder / "pyproject.toml").read_text(), re.MULTILINE)
    return value


def newer(*paths):
    """What vermin finds that the promised Python has not: syntax, modules, names of the standard library."""
    command = [Path(sys.executable).parent / "vermin", f"--target={promised()}-", "--violations", "--no-tips"]
    done = subprocess.run(
        [*command, "--eval-annotations", "--no-parse-comments", *paths],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "Minimum required versions" in done.stdout, done.stdout + done.stderr
    return done.stdout if done.returncode else ""


def test_nothing_needs_a_newer_python():
    assert not newer(*SOURCES)


@pytest.mark.parametrize(
    "line",
    [
        "from typing import Self",
        "import tomllib",
        "from datetime import UTC",
        "type Pair = tuple[int, int]",
        "def f(x):\n    try:\n        x()\n    except* ValueError:\n        pass",
        "import asyncio\nasyncio.TaskGroup()",
    ],
)
def test_what_is_newer_is_noticed(tmp_path, line):
    file = tmp_path / "newer.py"
    file.write_text(f"{line}\n")
    assert "newer.py" in newer(str(file))


def test_the_tools_check_for_it():
    assert setting("python_version") == promised()
    assert setting("target-version") == "py" + promised().replace(".", "")
