"""The model's choice for all-gather GEMMs of few rows, against `h200x2-few-rows-gathers.json`."""

import json
from pathlib import Path

import pytest

from overlap_gemm.config.orders import joins_shards
from overlap_gemm.tuning.prediction import predict
from overlap_gemm.tuning.time_model import Facts

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200x2-few-rows-gathers.json"
CALLS = {(row["m"], row["n"]): row for row in json.loads(RESULTS.read_text())["results"]}
KERNELS = {
    ("pingpong", (64, 128), (1, 1)): "64x128",
    ("pingpong", (64, 128), (2, 1)): "64x128 c2x1",
    ("pingpong", (128, 128), (1, 1)): "128x128",
    ("pingpong", (64, 256), (2, 1)): "64x256 c2x1",
}


def predicted(m, n):
    row = CALLS[m, n]
    call = Facts(row["op"], m, n, row["k"], "bf16", 2)
    prediction = predict(call, "sm_90a", 132, captured=True)
    config = prediction.config
    assert joins_shards(config, m, call.full_shard)
    if config.mma == "swap_ab":
        assert (config.tile, config.k_split) == ((m, 64), 1)
    return prediction, row["us"][KERNELS.get((config.mma, config.tile, config.cluster), "swap")], row["us"]


@pytest.mark.parametrize(("m", "n"), CALLS)
def test_the_chosen_kernel_is_nearly_the_fastest(m, n):
    prediction, measured, us = predicted(m, n)
    assert measured < 1.10 * min(time for name, time in us.items() if name != "torch")
    assert prediction.seconds["fused"] * 1e6 == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(("m", "n"), CALLS)
def test_auto_is_nearly_as_fast_as_torch(m, n):
    prediction, measured, us = predicted(m, n)
    assert (measured if prediction.best == "fused" else us["torch"]) < 1.07 * us["torch"]
    if n < 10240:
        assert prediction.best != "fused", "a few columns keep most SMs idle"
