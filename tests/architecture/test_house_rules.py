"""Rules of the house that a reader would otherwise have to check by eye."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 450
"""The habit is about 400 lines (CONTRIBUTING.md); this is where nobody would defend it any more."""


def lint_imports(*arguments: str) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_imports_keep_the_contracts():
    done = lint_imports()
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


def test_a_broken_contract_is_noticed(tmp_path):
    config = tmp_path / "importlinter.ini"
    config.write_text(
        "[importlinter]\nroot_package = overlap_gemm\n"
        "[importlinter:contract:upside-down]\nname = upside down\ntype = layers\n"
        "containers = overlap_gemm\nlayers =\n    runtime\n    backends\n"
    )
    done = lint_imports("--config", str(config))
    assert done.returncode != 0
    assert "BROKEN" in done.stdout


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_no_file_outgrows_its_reader(folder):
    lengths = {file: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    assert {str(file): lines for file, lines in lengths.items() if lines > LONGEST_FILE} == {}
