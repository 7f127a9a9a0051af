"""benchmarks/layer.py on two CPU ranks, with a tiny layer."""

import json
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layer.py"


def test_ways_agree_and_are_timed(launch, tmp_path):
    data = tmp_path / "layer.json"
    options = ["--model", "tiny", "--rows", "8", "--rounds", "2", "--json", data]
    done = launch("torchrun", 2, "python", SCRIPT, *options)
    assert done.returncode == 0, done.stderr
    results = json.loads(data.read_text())["results"]
    assert [(r["rows"], r["passes"]) for r in results] == [(8, "forward"), (8, "forward+backward")]
    for result in results:
        assert set(result["ways"]) == {"ours", "torch"}
        assert all(way["tokens_per_second"] > 0 for way in result["ways"].values())
        low, high = result["ours_against"]["torch"]["quartiles"]
        assert low <= result["ours_against"]["torch"]["ratio"] <= high
        assert result["skipped"] == {
            "ours, compiled": "compiled layers are timed on GPUs",
            "async-tp": "asynchronous tensor parallelism needs GPUs",
        }
    assert done.stdout.count("tokens/s") == 1, "one rank prints"
