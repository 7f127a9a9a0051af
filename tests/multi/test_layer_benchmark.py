"""benchmarks/layer.py and tokens.py on two CPU ranks; train_step.py, and host_time.py on one."""

import json
import re
from pathlib import Path

from tests.support.scripts import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "layer.py"


def test_ways_agree_and_are_timed(ranks, tmp_path):
    data = tmp_path / "layer.json"
    options = ["--model", "tiny", "--rows", "8", "--rounds", "2", "--json", data]
    printed = ranks(2).run(run_program, str(SCRIPT), options)
    results = json.loads(data.read_text())["results"]
    assert [(r["rows"], r["passes"]) for r in results] == [(8, "forward"), (8, "forward+backward")]
    for result in results:
        assert set(result["ways"]) == {"ours", "torch", "block"}
        assert all(way["tokens_per_second"] > 0 for way in result["ways"].values())
        low, high = result["ours_against"]["torch"]["quartiles"]
        assert low <= result["ours_against"]["torch"]["ratio"] <= high
        assert result["skipped"] == {
            "ours, compiled": "compiled layers are timed on GPUs",
            "block, compiled": "compiled layers are timed on GPUs",
            "async-tp": "asynchronous tensor parallelism needs GPUs",
        }
    assert "".join(printed).count("tokens/s") == 1, "one rank prints"


def test_training_steps_are_compared_and_timed(ranks, tmp_path):
    data = tmp_path / "steps.json"
    ways = ["ours, bfloat16", "float8", "float8, wgrad"]
    ranks(1).run(run_program, str(BENCHMARKS / "train_step.py"), [data, 60, "tiny", *ways])
    report = json.loads(data.read_text())
    assert list(report["ways"]) == ["bfloat16", *ways] and report["left_out"] == []
    for name, way in report["ways"].items():
        assert way["step_ms"] > 0 and way["passes_ms"] > 0
        assert way["passes_ratio"] == 1 or name != "bfloat16"
    exact, ours, rounded, also = (way["error"] for way in report["ways"].values())
    assert exact == [0, 0] and max(ours) < 0.01
    assert min(rounded) > 0.02 and rounded[0] == also[0] and rounded[1] != also[1]
    assert any("float8_e4m3fn" in line for line in report["chosen"])


def test_host_times_are_those_of_calls_that_work(ranks):
    """Makes each call of the benchmark at least once, and prints the times of few."""
    (printed,) = ranks(1).run(run_program, str(BENCHMARKS / "host_time.py"), ["layer with a residual"])
    rows = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    name = "fused gemm_reduce_scatter of a layer with a residual"
    assert [row[0] for row in rows] == ["torch.mm", name, f"{name}, recorded", f"{name}, and backward"]
    assert float(rows[0][3]) == 1 and all(float(least) <= float(median) for _, least, median, _ in rows)


def test_whole_models_are_trained_alike_and_timed(ranks, tmp_path):
    data, names = tmp_path / "tokens.json", ("transformers", "ours", "torch", "fsdp2")
    options = ["--model", "tiny", "--batch", 2, "--sequence", 14, "--dtype", "float32", "--rounds", 1]
    options += [option for name in names for option in ("--way", name)] + ["--json", data]
    ranks(2).run(run_program, str(BENCHMARKS / "tokens.py"), options)
    report = json.loads(data.read_text())
    assert report["left_out"] == {} and tuple(report["ways"]) == names
    expected, *others = (way["losses"] for way in report["ways"].values())
    assert expected[-1] < expected[0] - 0.01
    for losses in others:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
    assert all(way["tokens_per_second"] > 0 for way in report["ways"].values())
