"""The commands under the launchers that users start them with."""

import contextlib
import io
import json
import re
import shlex
import sys
from unittest import mock

import pytest

from overlap_gemm.backends import portable_arithmetic as arithmetic
from overlap_gemm.cli import app
from overlap_gemm.spec import OPS
from overlap_gemm.tuning import timing


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_bench(launch, launcher, tmp_path):
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    shape = ["--m", "31", "--m", "32", "--n", "16", "--k", "16", "--rounds", "2"]
    files = ["--json", data, "--plot", picture]
    done = launch(launcher, 2, "python", "-m", "overlap_gemm.cli", "bench", *shape, *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(data.read_text())
    assert (report["machine"]["ranks"], report["machine"]["launcher"]) == (2, launcher)
    assert f"--json {data.name}" in report["command"] and str(tmp_path) not in report["command"]
    results = {(r["op"], r["m"]): r for r in report["results"]}
    assert set(results) == {(op, m) for op in OPS for m in (31, 32)}
    for (op, m), result in results.items():
        assert {"product", "bound", "auto", "decomposed"} <= set(result["eager"]["seconds"])
        uneven = m == 31 and "m" in (OPS[op].x, OPS[op].out)
        assert result["eager"]["best_other"] == (None if uneven else "torch"), (op, m)
        assert not uneven or result["eager"]["seconds"]["bound"] == result["eager"]["seconds"]["product"]
    assert sum("torch of" in line and "divisible by P=2, got 31" in line for line in report["skipped"]) == 4
    assert picture.stat().st_size > 1000
    assert done.stdout.count("/ best other") == 1, "one rank prints"


def command(rank: int, size: int, *arguments: str) -> str:
    """Runs a command on the ranks that are up; returns what it prints."""
    named = mock.patch.object(sys, "argv", ["overlap-gemm", *arguments])
    with named, contextlib.redirect_stdout(io.StringIO()) as printed:
        app(list(arguments), standalone_mode=False)
    return printed.getvalue()


def test_explain_and_bench_with_an_epilogue(ranks, tmp_path):
    """Checks that two ranks agree on the call and its epilogue."""
    data, shape = tmp_path / "out.json", ("gemm_reduce_scatter", "32", "64", "16")
    texts = ranks(2).run(command, "explain", *shape, "--epilogue", "add_residual", "--device", "cpu")
    assert "P=2" in texts[0] and texts[0].count("epilogue add_residual: after the op") == 1
    assert not texts[1]
    sizes = ["--op", "all_gather_gemm", "--m", "32", "--n", "128", "--k", "16", "--rounds", "2"]
    ranks(2).run(command, "bench", *sizes, "--epilogue", "swiglu", "--json", str(data))
    (row,) = json.loads(data.read_text())["results"]
    assert row["epilogue"] == "swiglu" and "--epilogue swiglu" in json.loads(data.read_text())["command"]
    assert {"auto, alone", "auto, eager", "decomposed", "torch"} <= set(row["eager"]["seconds"])


def time_by_a_clock_that_only_the_calls_move(rank: int, size: int) -> dict[str, tuple[float, ...]]:
    now = 0.0

    def call(seconds: float) -> None:
        nonlocal now
        now += seconds

    calls = {"even": lambda: call(1.0), "skewed": lambda: call(3.0 if rank == 1 else 0.5)}
    with mock.patch.object(timing.time, "perf_counter", lambda: now):
        return dict(timing.measure(calls, rounds=3).seconds)


def test_a_sample_is_the_slowest_ranks_and_all_ranks_know_it(ranks):
    for seconds in ranks(2).run(time_by_a_clock_that_only_the_calls_move):
        assert seconds == {"even": (1.0,) * 3, "skewed": (3.0,) * 3}


TINY = shlex.split("--steps 2 --batch 2 --sequence 15 --layers 1 --head-dim 4 --rows 9 --rounds 1")


@pytest.mark.parametrize("backend", ["auto", pytest.param("decomposed", marks=pytest.mark.slow)])
def test_demo(launch, tmp_path, backend):
    fused = backend == "auto"
    options = [*TINY, "--backend", backend, "--fused" if fused else "--no-fused", "--out", tmp_path]
    done = launch("torchrun", 2, "python", "-m", "overlap_gemm.cli", "demo", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo-timeline.png").read_bytes().startswith(b"\x89PNG")
    assert f"by '{'torch' if backend == 'auto' else backend}'" in done.stdout
    assert "It continues" in done.stdout
    last = done.stdout[done.stdout.index("PASS") :]
    assert "2 CPU ranks" in last
    assert "equals the unsharded model" in " ".join(last.split())
    quoted = re.findall(
        r"gemm_all_reduce takes ([\d.]+) \(([\d.]+)-([\d.]+)\) of the time of torch", " ".join(last.split())
    )
    assert [low <= median <= high for median, low, high in quoted] == [True], "with quartiles or not at all"
    assert ("the emulated fused kernel is right" in " ".join(last.split())) == fused
    assert (tmp_path / "demo-fused.png").exists() == fused


def sabotaged(rank: int, size: int, *arguments: str) -> tuple[object, str]:
    """Runs a command whose sums are a little wrong; returns its exit code, and what it prints."""
    honest = arithmetic.sum_in_rank_order

    def forgetful(partials, *others):
        return honest([partials[0], partials[1] * (1 - 1e-4)], *others)

    with (
        mock.patch.object(arithmetic, "sum_in_rank_order", forgetful),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        with pytest.raises(SystemExit) as ended:
            app(list(arguments))
        return ended.value.code, printed.getvalue()


def test_demo_fails_when_a_sum_over_the_ranks_is_a_little_wrong(ranks, tmp_path):
    options = ["--backend", "decomposed", "--no-fused", "--out", str(tmp_path)]
    (code, printed), _ = ranks(2).run(sabotaged, "demo", *TINY, *options)
    assert code != 0
    said = " ".join(printed.split())
    assert "DIFFERS FROM the unsharded model" in said
    assert said.count("TOO FAR") == 2
