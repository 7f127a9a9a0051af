"""docs/evidence.md has a row for each op and transport, and names tests that exist."""

import re
from pathlib import Path

import pytest

from overlap_gemm.spec import OPS
from overlap_gemm.spec.transport import transports_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "evidence.md").read_text()


def rows():
    """(op, cells) of the matrix; an empty first cell is that of the row above."""
    matrix = PAGE.split("## Fused kernels")[1].split("\n## ")[0]
    op = ""
    for line in matrix.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6:
            op = cells[0] or op
            yield op, cells


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_transport_of_an_op_has_a_row(op):
    found = {cells[1] for name, cells in rows() if f"`{op.name}`" in name or name == "two-shot"}
    assert {f"`{name}`" for name in transports_of(op)} <= found


def test_tests_that_it_names_exist():
    for _, (*_, emulated, on_gpus) in rows():
        for folder, cell in (("emulated", emulated), ("gpu", on_gpus)):
            for name in re.findall(r"test_\w+\.py", cell):
                assert (ROOT / "tests" / folder / name).exists(), (folder, name)
    for path in re.findall(r"(?:emulator/)?tests/\w+/\w+\.py|benchmarks/[\w/-]+\.\w+", PAGE):
        assert (ROOT / path).exists(), path
