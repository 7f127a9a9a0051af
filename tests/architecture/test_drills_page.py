"""docs/drills.md has no empty cell, names tests that exist, and every drill of both files test_drills.py."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "drills.md").read_text()
FAILURES = 25


def rows(page):
    """Cells of each drill."""
    table = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table[2:]]


def missing(page):
    """Rows without a test, and tests that do not exist."""
    wrong = []
    for failure, *_, cell in rows(page):
        tests = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", cell)
        wrong += [] if tests else [failure]
        wrong += [
            (file, test)
            for file, test in tests
            if not (TESTS / file).exists() or f"\ndef {test}(" not in (TESTS / file).read_text()
        ]
    return wrong


def test_every_drill_names_tests_that_exist():
    assert len(rows(PAGE)) >= FAILURES
    assert all(len(row) == 4 and all(row) for row in rows(PAGE))
    assert missing(PAGE) == []


def test_a_drill_without_a_test_is_noticed():
    assert missing(PAGE + "|a flood|right|right||\n") == ["a flood"]
    line = "| a flood | right | right | `multi/test_drills.py::test_a_flood` |\n"
    assert missing(PAGE + line) == [("multi/test_drills.py", "test_a_flood")]


def test_every_test_of_drills_is_in_the_table():
    for folder in ("multi", "emulated"):
        text = (TESTS / folder / "test_drills.py").read_text()
        defined = re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)
        assert [name for name in defined if f"{folder}/test_drills.py::{name}`" not in PAGE] == []
