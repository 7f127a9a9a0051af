"""docs/evidence.md has a cell for each op and transport, and names tests that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_gemm.spec import OPS
from overlap_gemm.spec.transport import TRANSPORTS, transports_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "evidence.md").read_text()


def rows_of_tables() -> Iterator[dict[str, str]]:
    """Yields the rows of the page's tables, cells by the name of their column."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M):
        columns, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        yield from (dict(zip(columns, cells, strict=True)) for cells in rows)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_transport_of_an_op_has_a_rung_and_no_other(op):
    (row,) = (row for row in rows_of_tables() if row.get("op", "").startswith(f"`{op.name}`"))
    assert {name for name in TRANSPORTS if row.get(f"`{name}`")} == set(transports_of(op))


def test_tests_that_it_names_exist():
    for row in rows_of_tables():
        for folder, column in (("emulated", "emulated by"), ("gpu", "on GPUs by")):
            for name in re.findall(r"test_\w+\.py", row[column]):
                assert (ROOT / "tests" / folder / name).exists(), (folder, name)
    for path in re.findall(r"(?:emulator/)?tests/\w+/\w+\.py|benchmarks/[\w/-]+\.\w+", PAGE):
        assert (ROOT / path).exists(), path
