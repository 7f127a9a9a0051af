"""The linters refuse what needs a newer Python than the lowest that is promised.

vermin reads all files in CI (`.ci/run`): syntax, modules, names of the standard library. Of newer syntax ruff
says so, too (`target-version`), of newer names in annotations mypy (`python_version`).
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def promised():
    found = {setting("requires-python", folder).removeprefix(">=") for folder in (".", "emulator")}
    assert len(found) == 1, found
    return found.pop()


def setting(name, folder="."):
    [value] = re.findall(rf'^{name} = "(.*)"$', (ROOT / folder / "pyproject.toml").read_text(), re.MULTILINE)
    return value


def newer(path):
    """Returns vermin's report of a file if it needs a newer Python than the promised one."""
    vermin = Path(sys.executable).parent / "vermin"
    done = subprocess.run([vermin, path], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert "Minimum required versions" in done.stdout, done.stdout + done.stderr
    return done.stdout if done.returncode else ""


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
    assert "newer.py" in newer(file)


def unions_of_generics(source):
    """Returns arguments of traced functions with a union of a generic, such as `tuple[int] | None`.

    The DSL compares a value with each class of a union by `isinstance`, which raises TypeError for a generic.
    Python 3.10 takes generics for classes.
    """
    functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    traced = [
        one for one in functions if {"cute.jit", "cute.kernel"} & set(map(ast.unparse, one.decorator_list))
    ]
    annotated = [
        (one.arg, one.annotation) for f in traced for one in f.args.args if one.annotation is not None
    ]
    return [
        name
        for name, annotation in annotated
        for union in ast.walk(annotation)
        if isinstance(union, ast.BinOp) and any(isinstance(part, ast.Subscript) for part in ast.walk(union))
    ]


def test_the_dsl_reads_annotations_of_the_lowest_python():
    for file in (ROOT / "src").rglob("*.py"):
        assert not unions_of_generics(file.read_text()), file
    planted = "@cute.jit\ndef f(a: int | None, b: tuple[int, ...] | None, c: tuple[int]): pass"
    assert unions_of_generics(planted) == ["b"]


def test_the_tools_check_for_it():
    assert f"\n  {promised()}-\n" in (ROOT / "vermin.ini").read_text()
    assert "\nvermin src emulator/src " in (ROOT / ".ci" / "run").read_text()
    assert setting("python_version") == promised()
    assert setting("target-version") == "py" + promised().replace(".", "")
