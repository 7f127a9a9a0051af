"""`overlap-gemm bench` in a world of one; tests/multi runs it on several ranks."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import overlap_gemm
from overlap_gemm.backends.base import OPS
from overlap_gemm.cli import app
from overlap_gemm.cli.bench import read_shapes, row
from overlap_gemm.cli.workload import Workload
from overlap_gemm.runtime.group import Group
from overlap_gemm.tuning.timing import Timings

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes.json"


@pytest.fixture(autouse=True)
def _leave_the_world():
    yield
    overlap_gemm.finalize()


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_data_table_and_picture(tmp_path):
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = bench("--m", 6, "--m", 9, "--n", 8, "--k", 4, "--rounds", 2, "--json", data, "--plot", picture)
    assert result.exit_code == 0, result.output
    report = json.loads(data.read_text())
    assert [(r["op"], r["m"]) for r in report["results"]] == [(op, m) for op in OPS for m in (6, 9)]
    assert all(time > 0 for r in report["results"] for time in r["seconds"].values())
    assert report["machine"]["ranks"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "T_overlap" in result.output


def test_the_committed_shapes_can_be_read_and_m_overrides_theirs():
    shapes = list(read_shapes(SHAPES, None, torch.float32))
    assert {shape.name.split()[0] for shape in shapes} == {"Llama-8B", "Llama-70B"}
    assert {16, 8192} <= {shape.m for shape in shapes}
    assert {shape.m for shape in read_shapes(SHAPES, [7], torch.float32)} == {7}


def test_wrong_arguments_are_named():
    assert "not among" in bench("--op", "gemm").output
    assert bench("--dtype", "int8").exit_code == 2
    assert bench("--shapes", SHAPES, "--only", "no such model").exit_code == 2
    assert bench("--rounds", 0).exit_code == 2


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    "op", ["all_gather_gemm", "gemm_all_gather", "gemm_reduce_scatter", "gemm_all_reduce"]
)
def test_operands_are_this_ranks_shards(op, rank):
    x, weight = Workload("", op, 7, 5, 4, torch.float32).operands(
        Group("", rank, 3, None), torch.device("cpu")
    )
    rows, columns, depth = (3, 3, 1)[rank], (2, 2, 1)[rank], (2, 2, 0)[rank]
    assert (tuple(x.shape), tuple(weight.shape)) == {
        "all_gather_gemm": ((rows, 4), (columns, 4)),
        "gemm_all_gather": ((7, 4), (columns, 4)),
        "gemm_reduce_scatter": ((7, depth), (5, depth)),
        "gemm_all_reduce": ((7, depth), (5, depth)),
    }[op]


def test_a_row_carries_the_ratios():
    timings = Timings({"gemm": (2.0,), "comm": (1.0,), "sequential": (3.0,), "decomposed": (2.5,)})
    result = row(
        Workload("down", "gemm_reduce_scatter", 4, 4, 4, torch.bfloat16), "decomposed", timings, ranks=2
    )
    assert result["speedup"] == pytest.approx(1.2)
    assert result["hidden"] == pytest.approx(0.5)
    assert result["roof"] == pytest.approx(0.8)
    assert result["tflops"] == pytest.approx(2 * 4 * 4 * 4 / 2 / 2.5e12)
    assert result["dtype"] == "bfloat16"
