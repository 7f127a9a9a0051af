"""`overlap-gemm plan`: the model on the command line."""

import json
import math

import pytest
from typer.testing import CliRunner

from overlap_gemm.cli import app
from overlap_gemm.spec import OPS
from overlap_gemm.tuning.machine import MACHINE_VARIABLE, load, machine_for
from tests.support.ops import FUSED


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("op", "shape", "choice"),
    [
        ("gemm_reduce_scatter", (8192, 8192, 28672), "fused"),
        ("gemm_reduce_scatter", (128, 8192, 28672), "torch"),
        ("all_gather_gemm", (2048, 28672, 8192), "fused"),
        ("all_gather_gemm", (16, 10240, 8192), "torch"),
        ("gemm_all_reduce", (16, 8192, 8192), "fused"),
    ],
)
def test_choice_times_bound_and_why(op, shape, choice):
    result, said = plan(op, *shape, "--ranks", 4)
    assert result.exit_code == 0, result.output
    assert f"choice, captured in a CUDA graph: {choice}" in said
    assert "of the time of" in said
    assert "bound: the product" in said
    assert "limited by" in said


def test_the_link_bounds_where_it_is_slower():
    _, said = plan("gemm_reduce_scatter", 8192, 4096, 4096, "--ranks", 8)
    assert "bound: the link" in said
    assert "limited by the link" in said


@pytest.mark.parametrize("op", FUSED)
def test_every_op_is_fused_where_rows_are_many(op):
    _, said = plan(op, 8192, 8192, 28672, "--ranks", 4)
    assert "choice, captured in a CUDA graph: fused" in said


def test_an_unmeasured_machine_is_called_expected():
    _, said = plan("gemm_reduce_scatter", 4096, 4096, 4096, "--machine", "b200")
    assert "NVIDIA B200" in said and "constants expected" in said
    _, said = plan("gemm_reduce_scatter", 4096, 4096, 4096, "--arch", "sm_103a")
    assert "sm_103a" in said and "constants expected" in said


def test_constants_from_a_file_decide(tmp_path, monkeypatch):
    slow = load("h200").to_json().replace('"link_rate": 323000000000.0', '"link_rate": 1000000000.0')
    file = tmp_path / "mine.json"
    file.write_text(slow)
    shape = ("gemm_reduce_scatter", 8192, 8192, 8192, "--ranks", 4)
    assert "bound: the product" in plan(*shape, "--arch", "sm_90a")[1]
    _, said = plan(*shape, "--machine", file)
    assert "bound: the link" in said
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    machine_for.cache_clear()
    _, said = plan(*shape, "--arch", "sm_90a")
    machine_for.cache_clear()
    assert "bound: the link" in said


DAMAGED = [
    ("arrival", math.nan),
    ("launch", -1),
    ("mma_rate", 0),
    ("sms", None),
    ("few_rows", "64"),
    ("efficiency", {"cooperative 128x256 1x1": 0}),
    ("host", {"fused": []}),
    ("collectives", {"sum": {"2": []}}),
]


def test_wrong_arguments_are_named(tmp_path):
    assert "not among" in plan("gemm", 1, 1, 1)[1]
    assert "not one of sm_90a" in plan("gemm_all_reduce", 1, 1, 1, "--arch", "sm_80")[1]
    assert "not sm_90a" in plan("gemm_all_reduce", 1, 1, 1, "--arch", "sm_90a", "--machine", "b200")[1]
    (tmp_path / "bad.json").write_text("{}")
    result, said = plan("gemm_all_reduce", 1, 1, 1, "--machine", tmp_path / "bad.json")
    assert result.exit_code == 2 and "bad.json is damaged: not a machine's constants" in said
    good = json.loads(load("h200").to_json())
    damaged = [json.dumps(good | {name: value}).encode() for name, value in DAMAGED]
    for text in (b"\xff\xfe{", *damaged):
        (tmp_path / "bad.json").write_bytes(text)
        result, output = plan("gemm_all_reduce", 1, 1, 1, "--machine", tmp_path / "bad.json")
        assert result.exit_code == 2 and "bad.json is damaged: " in output, text[:50]
    result, said = plan("gemm_all_reduce", 1, 1, 1, "--machine", tmp_path / "none.json")
    assert result.exit_code == 2 and "shipped: b200, h100, h200" in said and "damaged" not in said


@pytest.mark.parametrize("op", FUSED)
def test_what_the_backend_refuses_is_not_chosen(op):
    """N of no multiple of 8; kernels of ops that send x pad it."""
    result, said = plan(op, 8192, 8191, 28672, "--ranks", 4)
    assert result.exit_code == 0, result.output
    if OPS[op].operand_is_sent:
        assert "choice, captured in a CUDA graph: fused" in said
    else:
        assert "choice, captured in a CUDA graph: torch" in said and "choice, eager: torch" in said
        assert "fused kernel: no, N=8191 must be a multiple of 8" in said


def test_an_expected_machines_plan_says_what_auto_does_there():
    _, said = plan("gemm_reduce_scatter", 8192, 8192, 8192, "--machine", "b200")
    assert "`auto` measures each call signature" in said
    assert "until `tune`" not in plan("gemm_reduce_scatter", 8192, 8192, 8192, "--machine", "h200")[1]


def test_operands_with_scales_are_planned_and_run_as_torchs_where_they_are_not_timed():
    how = ("gemm_reduce_scatter", 8192, 8192, 28672, "--ranks", 4, "--dtype", "float8_e4m3fn")
    _, said = plan(*how, "--machine", "b200")
    assert "choice, captured in a CUDA graph: torch" in said
    assert "not fused by default: products of 8-bit operands have not been timed on" in said
    _, said = plan(*how)
    assert "choice, captured in a CUDA graph: fused" in said and "not fused by default" not in said
    assert "e4m3_obf16_sbf16" in said and "96 MiB out of each rank" in said
    _, said = plan("all_gather_gemm", 8192, 28672, 8192, "--ranks", 4, "--dtype", "float8_e5m2")
    assert "48 MiB out of each rank" in said
    assert "decomposed" not in said


def test_scales_of_blocks_are_planned():
    how = ("gemm_reduce_scatter", 8192, 8192, 28672, "--ranks", 4, "--dtype", "float8_e4m3fn", "--block")
    _, said = plan(*how, 128, "--machine", "h200")
    assert "choice, captured in a CUDA graph: fused" in said and "b1x128x128" in said
    _, said = plan(*how, 32, "--machine", "h200")
    assert "choice, captured in a CUDA graph: sequential" in said and "b1x32x32" in said
    assert "not torch: F.scaled_mm has scales of blocks of 128 x 128, not of blocks of 32 x 32" in said
    assert "not fused by default: kernels with scales of blocks of 32 x 32 have not been timed on" in said
    _, said = plan(*how, 128, "--machine", "b200")
    assert "constants are those with scales of rows: kernels with scales of blocks of 128 x 128" in said
    assert "fused kernel: no, scales of blocks of 128 x 128 are for kernels of sm_90a" in said
    _, said = plan(*how, "mx", "--machine", "b200")
    assert "choice, captured in a CUDA graph: sequential" in said and "b1x1x32" in said
    assert "not torch: F.scaled_mm has scales of blocks of 128 x 128, not of blocks of 1 x 32" in said
    result, said = plan(*how[:6], "--block", 128)
    assert result.exit_code == 2 and "block must be one of None of torch.bfloat16, got 128" in said


def test_8_bit_operands_take_about_half_the_time():
    def bound(*more):
        words = plan("gemm_reduce_scatter", 8192, 8192, 28672, "--ranks", 4, *more)[1].split("product ")
        return float(words[1].split(" us")[0])

    assert 1.9 < bound() / bound("--dtype", "float8_e4m3fn") <= 2
